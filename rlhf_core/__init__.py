"""Aligning language models end to end. The library: no Prefect in it."""

__version__ = "0.1.0"
