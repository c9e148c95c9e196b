from tests.cluster import ray_address

__all__ = ["ray_address"]
