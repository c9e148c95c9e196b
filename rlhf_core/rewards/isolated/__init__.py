"""Scorers that user_process.py loads into a process that can be killed, one per file."""
