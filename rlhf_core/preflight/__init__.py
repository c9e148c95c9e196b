"""Checks before a run: files, models, templates, lengths and user code that a recipe names."""
