"""The store at a URL, or the one that the environment names.

`s3://bucket/prefix` finds its endpoint and credentials in the usual AWS_* variables; any other URL is a local folder.
"""

from __future__ import annotations

import os

from rlhf_core.artifacts.store import Store
from rlhf_core.errors import StoreError
from rlhf_core.paths import user_path

STORE_VARIABLE = "ALIGNMENT_STORE"


def open_store(url: str) -> Store:
    """The store at `url`, without any request to it. Raises StoreError if `url` is not a store's."""
    if url.startswith("s3://"):
        # Imported here: it takes a second, which a local folder does not need.
        from rlhf_core.artifacts.s3_store import S3Store

        return S3Store(url)
    from rlhf_core.artifacts.local_store import LocalStore

    path = url.removeprefix("file://")
    if "://" in path:
        raise StoreError(f"{url}: unknown kind of store, give s3://bucket/prefix or the path of a folder")
    folder = user_path(path)
    if not path or not folder.is_absolute():
        # Jobs run in another folder than the process that submits them: a relative path would be another store there.
        raise StoreError(
            f"the store `{url}` must be an absolute path, such as {folder.absolute()}, or a URL s3://bucket/prefix"
        )
    return LocalStore(folder)


def store_url() -> str:
    """The store that the environment names. Raises StoreError if it names none."""
    url = os.environ.get(STORE_VARIABLE)
    if not url:
        raise StoreError(
            f"no artifact store is configured: run `alignment up`, or set {STORE_VARIABLE} to s3://bucket/prefix or a "
            "folder"
        )
    return url
