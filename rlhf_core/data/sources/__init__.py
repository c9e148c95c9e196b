"""Rows from files, the hub, generators and the user's functions."""
