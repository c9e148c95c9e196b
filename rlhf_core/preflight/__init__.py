"""Checks before a run: files, models, templates, lengths and user code of a recipe."""
