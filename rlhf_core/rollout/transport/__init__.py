"""The vLLM rollout engine, its settings, and the read-back of its weights."""
