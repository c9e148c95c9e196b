"""Warm Python: programs start as forks of a process that has imported torch, transformers, DeepSpeed and vLLM."""
