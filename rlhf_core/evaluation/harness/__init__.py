"""Tasks of lm-evaluation-harness: the harness in a process of its own, and what it asks of a model's engines."""
