"""The `alignment` command."""
