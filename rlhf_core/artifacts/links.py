"""Links that a browser can open to what lies in a store."""

from __future__ import annotations

from pathlib import Path

LINK_SECONDS = 7 * 24 * 3600  # the longest that S3 signs for


def browser_link(store_url: str, path: str, content_type: str) -> str:
    """A signed link, good for a week, into a bucket; a file: link into a folder. Asks nothing of the store."""
    if store_url.startswith("s3://"):
        import s3fs

        bucket = s3fs.S3FileSystem(skip_instance_cache=True)
        link: str = bucket.sign(f"{store_url}/{path}", expiration=LINK_SECONDS, ResponseContentType=content_type)
        return link
    return (Path(store_url.removeprefix("file://")) / path).resolve().as_uri()
