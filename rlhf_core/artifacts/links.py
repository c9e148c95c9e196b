"""Links to objects of a store that a browser can open."""

from __future__ import annotations

from pathlib import Path

LINK_SECONDS = 7 * 24 * 3600  # the longest lifetime of a signed link that S3 allows


def browser_link(store_url: str, path: str, content_type: str) -> str:
    """A signed link, valid for a week, for a bucket; a file: link for a folder. Sends no request to the store."""
    if store_url.startswith("s3://"):
        import s3fs

        bucket = s3fs.S3FileSystem(skip_instance_cache=True)
        link: str = bucket.sign(f"{store_url}/{path}", expiration=LINK_SECONDS, ResponseContentType=content_type)
        return link
    return (Path(store_url.removeprefix("file://")) / path).resolve().as_uri()
