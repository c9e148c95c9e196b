"""The reward server: `alignment serve-reward`."""
