"""Child processes: protocol, limits, shutdown."""
