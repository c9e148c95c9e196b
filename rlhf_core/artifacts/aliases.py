"""Names that move: `champion` of a model points at one artifact, and only a compare-and-swap points it elsewhere."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from pydantic import ValidationError

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.store import Store
from rlhf_core.config.base import Config
from rlhf_core.errors import ConflictError, IntegrityError, StoreError

ALIASES = "aliases"
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")


class Alias(Config):
    manifest: ArtifactRef
    previous: ArtifactRef | None  # what it pointed at before; None at first
    by: str
    reason: str
    sequence: int  # 1 at first, one more with each move
    moved_at: datetime

    @classmethod
    def parse(cls, path: str, data: bytes) -> Alias:
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise IntegrityError(f"{path} is not an alias: {error}") from error


def alias_path(model: str, alias: str) -> str:
    """Raises StoreError for names that are not plain."""
    for name in (model, alias):
        if not is_name(name):
            raise StoreError(f"`{name}` is no name for a model or an alias: use lower-case letters, digits, `_.-`")
    return f"{ALIASES}/{model}/{alias}.json"


def is_name(text: str) -> bool:
    """Whether a model or an alias may be called so."""
    return _NAME.fullmatch(text) is not None


def read_alias(store: Store, model: str, alias: str) -> Alias | None:
    path = alias_path(model, alias)
    data = store.get(path)
    return None if data is None else Alias.parse(path, data)


def move_alias(
    store: Store, model: str, alias: str, to: ArtifactRef, *, by: str, reason: str, seen: int | None = None
) -> Alias:
    """Point `alias` at `to`.

    seen: the sequence of the alias that this move was decided on, 0 if there was none; None: whatever is there now.
    Raises ConflictError if somebody else has moved it: the decision is theirs to look at again, so nothing is repeated.
    """
    path = alias_path(model, alias)
    found = store.get_tagged(path)
    old = None if found is None else Alias.parse(path, found[0])
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
        if found is None:
            store.put_if_absent(path, data)
        else:
            store.replace(path, data, found[1])
    except ConflictError as error:
        now = read_alias(store, model, alias)
        if now != new:  # else our own write, repeated because its answer was lost
            raise ConflictError(_moved_meanwhile(model, alias, now)) from error
    return new


def _moved_meanwhile(model: str, alias: str, now: Alias | None) -> str:
    where = "is gone" if now is None else f"points at {now.manifest} since {now.by} moved it ({now.reason})"
    return f"the alias {model}/{alias} has moved meanwhile: it {where}; look again and decide anew"
