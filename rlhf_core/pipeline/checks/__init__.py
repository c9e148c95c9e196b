"""Checks of single kinds of stages before anything runs, which `stages/table.py` names."""
