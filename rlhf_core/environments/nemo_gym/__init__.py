"""Environments behind a NeMo Gym resource server."""
