"""One part of each kind for the package `alignment`, which finds them by the entry points in pyproject.toml."""
