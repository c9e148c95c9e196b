"""Aliases: `champion` of a model refers to one artifact. Read here, moved by artifacts/registry.py.

aliases/<model>/<alias>.json                    the newest move, replaced by compare-and-swap
registry/<model>/moves/<alias>/<sequence>.json  the earlier ones, each copied there before it is replaced

So each move in the history was the newest one once: a process that is killed between the two writes has only copied.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

from pydantic import AwareDatetime, Field

from rlhf_core.artifacts.documents import parsed
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.store import Store
from rlhf_core.config.base import Config
from rlhf_core.config.texts import is_model_name
from rlhf_core.errors import StoreError

ALIASES = "aliases"
_NUMBER = re.compile(r"(?!000000)[0-9]{6}|[1-9][0-9]{6,15}")  # as `move_path` writes it
_PARALLEL_REQUESTS = 8


class Evidence(Config):
    """The reasons for a move, as far as they can be checked."""

    gate: ArtifactRef | None = None  # the verdict that passed the model
    approved_by: str = ""  # the person who allows it
    restores: int | None = None  # of a rollback: sequence number of the move to whose model it goes back


NO_EVIDENCE = Evidence()


class Alias(Config):
    """A move of an alias; the newest one says where it points."""

    manifest: ArtifactRef
    previous: ArtifactRef | None  # the artifact before the move; None before the first
    by: str
    reason: str
    sequence: int  # starts at 1; every move adds 1
    moved_at: AwareDatetime
    evidence: Evidence = Field(default=NO_EVIDENCE)
    id: str = ""  # unique to each move; empty in those of releases without a history

    @classmethod
    def parse(cls, path: str, data: bytes) -> Alias:
        return parsed(cls, data, path, "an alias", "delete it in the store, and set it again by `alignment alias`")


def alias_path(model: str, alias: str) -> str:
    """Return the object path of an alias. Raises StoreError if one of the names is not valid."""
    for name in (model, alias):
        if not is_model_name(name):
            raise StoreError(
                f"`{name}` is not a valid name of a model or an alias: use lower-case letters, digits, `_.-`"
            )
    return f"{ALIASES}/{model}/{alias}.json"


def registry_path(model: str) -> str:
    """Return the folder of a model's documents beside its aliases."""
    return f"registry/{model}"


def move_path(model: str, alias: str, sequence: int) -> str:
    """Return the object path of an earlier move."""
    return f"{registry_path(model)}/moves/{alias}/{sequence:06}.json"


def read_alias(store: Store, model: str, alias: str) -> Alias | None:
    return read_move(store, alias_path(model, alias))


def read_move(store: Store, path: str) -> Alias | None:
    data = store.get(path)
    return None if data is None else Alias.parse(path, data)


def list_aliases(store: Store) -> dict[str, Alias]:
    """Return the aliases of all models by `model/alias`, sorted."""
    moves = {f"{model}/{alias}": read_alias(store, model, alias) for model, alias in alias_names(store)}
    return {name: move for name, move in moves.items() if move is not None}


def alias_names(store: Store, model: str | None = None) -> list[tuple[str, str]]:
    """Return model and name of each alias, sorted; of `model` alone if it is given. Ignores objects of other names."""
    prefix = f"{ALIASES}/" if model is None else alias_path(model, "x").removesuffix("x.json")
    paths = [path.split("/") for path in store.list(prefix) if path.endswith(".json")]
    names = [(parts[1], parts[2].removesuffix(".json")) for parts in paths if len(parts) == 3]
    return [each for each in names if is_model_name(each[0]) and is_model_name(each[1])]


def kept_sequences(store: Store, model: str, alias: str) -> list[int]:
    """Return the sequence numbers of the earlier moves in the store, in order. Ignores objects with other names."""
    prefix = move_path(model, alias, 1).removesuffix("000001.json")
    names = (path.removeprefix(prefix).removesuffix(".json") for path in store.list(prefix))
    return sorted(int(name) for name in names if _NUMBER.fullmatch(name))


def moves_of(store: Store, model: str, alias: str) -> list[Alias]:
    """Return all moves of an alias, the newest first; of releases without a history only the last one.

    Raises IntegrityError for a damaged one.
    """
    newest = read_alias(store, model, alias)  # first: whatever is listed after it leaves no gap below it
    paths = [move_path(model, alias, sequence) for sequence in kept_sequences(store, model, alias)]
    with ThreadPoolExecutor(_PARALLEL_REQUESTS) as pool:
        kept = [move for move in pool.map(lambda path: read_move(store, path), paths) if move is not None]
    moves = {move.sequence: move for move in (*kept, *([] if newest is None else [newest]))}
    return [moves[sequence] for sequence in sorted(moves, reverse=True)]
