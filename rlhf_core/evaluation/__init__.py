"""Answers held-out prompts and summarises the scores: pass@k, confidence intervals. Loads no models."""
