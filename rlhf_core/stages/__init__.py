"""One file per stage. `table.py` lists them; `python -m rlhf_core.stages` is the entry of a job."""
