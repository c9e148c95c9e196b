"""Stages, one per file, listed in `table.py`; `python -m rlhf_core.stages` is the entry of a job."""
