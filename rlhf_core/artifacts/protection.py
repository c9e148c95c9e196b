"""Protected aliases of a model: one document in the store, with every change of them.

registry/<model>/protection.json    replaced by compare-and-swap; without it `champion` alone is protected
"""

from __future__ import annotations

from datetime import UTC, datetime

from pydantic import AwareDatetime

from rlhf_core.artifacts.aliases import alias_path, registry_path
from rlhf_core.artifacts.documents import parsed
from rlhf_core.artifacts.store import Store
from rlhf_core.config.base import Config
from rlhf_core.config.texts import is_blank
from rlhf_core.errors import ConflictError, StoreError

CHAMPION, CANDIDATE = "champion", "candidate"


class ProtectionChange(Config):
    alias: str
    protected: bool
    by: str
    reason: str
    changed_at: AwareDatetime


class Protection(Config):
    changes: tuple[ProtectionChange, ...] = ()  # in order; the last one of an alias counts

    def protects(self, alias: str) -> bool:
        """Return whether moves of the alias need evidence."""
        changes = [change for change in self.changes if change.alias == alias]
        return changes[-1].protected if changes else alias == CHAMPION


def read_protection(store: Store, model: str) -> Protection:
    """Return the protection of a model's aliases. Raises IntegrityError if the document is damaged."""
    data = store.get(_path(model))
    return Protection() if data is None else _parsed(model, data)


def protect(store: Store, model: str, alias: str, *, protected: bool, by: str, reason: str) -> bool:
    """Protect an alias, or end its protection, which needs a reason. Returns False if it was so before.

    Raises StoreError for `candidate`, which gates move, and ConflictError if another process changes the document now.
    """
    alias_path(model, alias)
    if alias == CANDIDATE:
        raise StoreError(f"gates must move {model}/{CANDIDATE}, so it cannot be protected: protect another alias")
    if not protected and is_blank(reason):
        raise StoreError(f"without protection anyone can move {model}/{alias}: give a reason by --reason")
    tagged = store.get_tagged(_path(model))
    before = Protection() if tagged is None else _parsed(model, tagged[0])
    if before.protects(alias) == protected:
        return False
    change = ProtectionChange(alias=alias, protected=protected, by=by, reason=reason, changed_at=datetime.now(UTC))
    data = Protection(changes=(*before.changes, change)).model_dump_json(indent=1).encode()
    try:
        store.put_if_unchanged(_path(model), data, None if tagged is None else tagged[1])
    except ConflictError as error:
        if change not in read_protection(store, model).changes:  # else it is our own write, whose response was lost
            raise ConflictError(f"the protection of {model} was changed by another process: try again") from error
    return True


def _path(model: str) -> str:
    return f"{registry_path(model)}/protection.json"


def _parsed(model: str, data: bytes) -> Protection:
    return parsed(Protection, data, _path(model), "the protection of aliases", "copy it back from a backup")
