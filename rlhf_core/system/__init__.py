"""Operating system: paths, environment variables, threads, terminals, JSON text."""
