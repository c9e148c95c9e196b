"""Open the store at a URL, or at the URL of the environment.

`s3://bucket/prefix` takes its endpoint and credentials from the usual AWS_* variables; any other URL is a local folder.
"""

from __future__ import annotations

from rlhf_core.artifacts.store import Store
from rlhf_core.errors import StoreError
from rlhf_core.system.paths import user_path
from rlhf_core.system.variables import store_problem, value_of

STORE_VARIABLE = "ALIGNMENT_STORE"


def open_store(url: str) -> Store:
    """Return the store at `url` without a request to it. Raises StoreError if `url` is not a store's."""
    if url.startswith("s3://"):
        # Imported here: it takes a second, which a local folder does not need.
        from rlhf_core.artifacts.s3_store import S3Store

        return S3Store(url)
    from rlhf_core.artifacts.local_store import LocalStore

    if problem := store_problem(url):
        raise StoreError(f"the store `{url}` cannot be opened: {problem}")
    return LocalStore(user_path(url.removeprefix("file://")))


def store_url() -> str:
    """Return the environment's store URL. Raises StoreError if it is not set, VariableError if it is not valid."""
    url = value_of(STORE_VARIABLE)
    if not url:
        raise StoreError(
            f"no artifact store is configured: run `alignment up`, or set {STORE_VARIABLE} to s3://bucket/prefix or a "
            "folder"
        )
    return url
