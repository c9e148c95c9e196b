"""Garbage collection of a store: what is needed and why, what may go, and its deletion beside running jobs."""
