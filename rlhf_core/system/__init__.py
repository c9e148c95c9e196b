"""Small helpers around the operating system: paths, environment variables, threads, terminals, JSON text."""
