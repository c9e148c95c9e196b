"""Settings of stages."""
