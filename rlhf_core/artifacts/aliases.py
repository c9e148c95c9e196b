"""Aliases: `champion` of a model refers to one artifact, and is moved to another by compare-and-swap."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from pydantic import AwareDatetime

from rlhf_core.artifacts.deletions import wait_for_deletions
from rlhf_core.artifacts.documents import parsed
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.store import Store
from rlhf_core.config.base import Config
from rlhf_core.errors import ConflictError, StoreError

ALIASES = "aliases"
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")


class Alias(Config):
    manifest: ArtifactRef
    previous: ArtifactRef | None  # the artifact before the last move; None before the first
    by: str
    reason: str
    sequence: int  # starts at 1; every move adds 1
    moved_at: AwareDatetime

    @classmethod
    def parse(cls, path: str, data: bytes) -> Alias:
        return parsed(cls, data, path, "an alias", "delete it in the store, and set it again by `alignment alias`")


def alias_path(model: str, alias: str) -> str:
    """Return the object path of an alias. Raises StoreError if one of the names is not valid."""
    for name in (model, alias):
        if not is_name(name):
            raise StoreError(
                f"`{name}` is not a valid name of a model or an alias: use lower-case letters, digits, `_.-`"
            )
    return f"{ALIASES}/{model}/{alias}.json"


def is_name(text: str) -> bool:
    """Return whether `text` is a valid name of a model or an alias."""
    return _NAME.fullmatch(text) is not None


def read_alias(store: Store, model: str, alias: str) -> Alias | None:
    path = alias_path(model, alias)
    data = store.get(path)
    return None if data is None else Alias.parse(path, data)


def list_aliases(store: Store) -> dict[str, Alias]:
    """Return the aliases of all models by `model/alias`, sorted. Objects with other names are ignored."""
    aliases: dict[str, Alias] = {}
    for path in store.list(f"{ALIASES}/"):
        model, slash, alias = path.removeprefix(f"{ALIASES}/").removesuffix(".json").partition("/")
        if slash and is_name(model) and is_name(alias) and path == alias_path(model, alias):
            read = read_alias(store, model, alias)
            if read is not None:
                aliases[f"{model}/{alias}"] = read
    return aliases


def move_alias(
    store: Store, model: str, alias: str, to: ArtifactRef, *, by: str, reason: str, seen: int | None = None
) -> Alias:
    """Point `alias` at `to`.

    seen: the sequence number that the caller's decision was based on, 0 if there was no alias; None: any.
    Raises ConflictError if another process has moved it since. Not retried: the caller has to decide again. A garbage
    collection that is deleting the artifact at this moment is waited for: the caller checks that it is still there.
    """
    path = alias_path(model, alias)
    stored = store.get_tagged(path)
    old = None if stored is None else Alias.parse(path, stored[0])
    sequence = 0 if old is None else old.sequence
    if seen is not None and seen != sequence:
        raise ConflictError(_moved_meanwhile(model, alias, old))
    new = Alias(
        manifest=to,
        previous=None if old is None else old.manifest,
        by=by,
        reason=reason,
        sequence=sequence + 1,
        moved_at=datetime.now(UTC),
    )
    data = new.model_dump_json(indent=1).encode()
    try:
        if stored is None:
            store.put_if_absent(path, data)
        else:
            store.replace(path, data, stored[1])
    except ConflictError as error:
        now = read_alias(store, model, alias)
        if now != new:  # else it is our own write, retried because its response was lost
            raise ConflictError(_moved_meanwhile(model, alias, now)) from error
    wait_for_deletions(store, [to.path])
    return new


def _moved_meanwhile(model: str, alias: str, now: Alias | None) -> str:
    where = "is gone" if now is None else f"points at {now.manifest} since {now.by} moved it ({now.reason})"
    return f"the alias {model}/{alias} was moved by another process: it {where}; read it again before moving it"
