"""Processes that a process starts for itself: what they answer, what limits them, how they end."""
