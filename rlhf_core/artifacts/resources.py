"""Resource use of an attempt's processes over time: `<artifact>/resources/<start>-<id>.json`, a document per attempt.

They are beside the artifact and not in it: two jobs of one key may make equal files, and never use equal seconds.
"""

from __future__ import annotations

from datetime import datetime

from pydantic import AwareDatetime

from rlhf_core.artifacts.attempts import document_name
from rlhf_core.artifacts.documents import parsed
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.store import Store
from rlhf_core.config.base import Config
from rlhf_core.errors import IntegrityError


class ProcessUses(Config):
    """Samples of one process and those below it, in columns."""

    seconds: tuple[float, ...]  # since the attempt's start
    cores: tuple[float, ...]
    host_bytes: tuple[int, ...]
    gpu_share: tuple[float | None, ...]  # how busy its GPUs were, from 0 to 1; None: unknown
    gpu_bytes: tuple[int | None, ...]

    @property
    def is_whole(self) -> bool:
        columns = (self.cores, self.host_bytes, self.gpu_share, self.gpu_bytes)
        return all(len(column) == len(self.seconds) for column in columns)


class AttemptUses(Config):
    started_at: AwareDatetime  # of the attempt
    processes: dict[str, ProcessUses]  # job, rank 0, engine 0


def uses_path(ref: ArtifactRef, started_at: datetime, attempt: str) -> str:
    """Return the path of an attempt's document. attempt: its id."""
    return f"{_folder(ref)}{document_name(started_at, attempt)}.json"


def read_uses(store: Store, ref: ArtifactRef) -> list[AttemptUses]:
    """Return the documents of all attempts at an artifact, in the order of their starts.

    Raises IntegrityError for a damaged one.
    """
    found = []
    for path in store.list(_folder(ref)):
        data = store.get(path)
        if data is None:
            continue
        uses = parsed(AttemptUses, data, path, "what an attempt used", "delete it in the store")
        if not all(each.is_whole for each in uses.processes.values()):
            raise IntegrityError(f"{path} is damaged: its columns differ in length: delete it in the store")
        found.append(uses)
    return found


def _folder(ref: ArtifactRef) -> str:
    return f"{ref.path}/resources/"
