"""A reward model behind HTTP: `alignment serve-reward`."""
