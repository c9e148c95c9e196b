"""Checks of single kinds of stages; rlhf_core/stages/table.py lists them."""
