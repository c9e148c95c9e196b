"""Completions of held-out prompts and summaries of their scores: pass@k, confidence intervals. Loads no models."""
