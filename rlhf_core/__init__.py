"""Alignment of language models end to end. The library, independent of Prefect."""

__version__ = "0.2.0"
