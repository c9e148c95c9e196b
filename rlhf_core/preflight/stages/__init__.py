"""Checks that one kind of stage brings itself; rlhf_core/stages/table.py names them."""
