"""Rows of a result that are complete, kept in the store until the stage is done.

A part is a file of a checkpoint (artifacts/checkpoints.py), and its name says which rows it has. Each checkpoint has
the parts that were computed since the one before, and a resumed job uses every part that is intact, whatever became of
the others. So the division in parts must not depend on where a job resumes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from rlhf_core.artifacts.checkpoints import Checkpoint, Checkpoints
from rlhf_core.config.stages.checkpoint import PartialResultsConfig
from rlhf_core.contract import StageContext
from rlhf_core.errors import IntegrityError, StoreError
from rlhf_core.system.stopping import STOPS
from rlhf_core.system.watchdog import WATCHDOG

_MOST_BYTES = 1 << 26  # of parts that wait in memory for the next checkpoint


class PartialRows:
    """The parts of a stage's result. As a context manager: an error or a stop stores what is complete."""

    def __init__(self, config: PartialResultsConfig, context: StageContext) -> None:
        self._config, self._context = config, context
        self._checkpoint_of_part: dict[str, Checkpoint] = {}
        self._waiting: dict[str, bytes] = {}  # not stored yet, by part
        self._last_time = time.monotonic()
        self._kept = 0  # rows, of all attempts

    def __enter__(self) -> Self:
        if not self._config.resume:
            self._context.checkpoints.clear()
        for candidate in self._context.checkpoints.newest():
            if isinstance(candidate, IntegrityError):
                print(f"a checkpoint cannot be used, its rows are computed again: {candidate}", flush=True)
                continue
            self._kept = max(self._kept, candidate.step)
            for file in candidate.files:
                self._checkpoint_of_part.setdefault(file.path, candidate)
        if self._kept:
            self._context.checkpoints.resumed_after = self._kept
            self._context.progress(0, 0, f"resumes {self._config.position(self._kept)}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Store what waits, unless the stage is done."""
        if isinstance(error, Exception | KeyboardInterrupt | SystemExit):
            self._store_at_the_end()

    def rows(self, part: str, compute: Callable[[], list[Any]]) -> list[Any]:
        """Return the rows of a part, JSON values: those that are kept, or else those that `compute` returns.

        part: KIND-START-…, as a file is called; equal names have equal rows, and the parts of a kind have one size.
        Raises StoppedError, once the part is stored, if the job is to stop.
        """
        computed: list[list[Any]] = []

        def content() -> tuple[bytes, int]:
            computed.append(compute())
            return json.dumps(computed[0]).encode(), len(computed[0])

        stored = self.content(part, content)
        rows: list[Any] = computed[0] if computed else json.loads(stored)
        return rows

    def content(self, part: str, compute: Callable[[], tuple[bytes, int]]) -> bytes:
        """Return the content of a part as `rows` does. compute: returns it with the number of its rows."""
        checkpoint = self._checkpoint_of_part.get(part)
        if checkpoint is not None:
            try:
                return self._context.checkpoints.read(checkpoint, part)
            except IntegrityError as error:
                print(f"{part} cannot be used, its rows are computed again: {error}", flush=True)
        try:
            with WATCHDOG.phase(part.rsplit("-", 2)[0]):  # of sampled-0-32
                content, count = compute()
        except (Exception, KeyboardInterrupt, SystemExit):
            self._store_at_the_end()  # now: it may take the rest of the time of a stop to end engines
            raise
        self._waiting[part] = content
        self._kept += count
        self._after_part()
        return content

    def _after_part(self) -> None:
        if self._config.every_minutes is None:
            self._waiting.clear()
            return
        if STOPS.requested is not None:
            self._store()
            stop, resumes = STOPS.requested, self._config.position(self._kept)
            raise stop.error(f"{stop.reason}; it resumes {resumes}, which are stored")
        waited = (time.monotonic() - self._last_time) / 60
        if waited >= self._config.every_minutes or sum(map(len, self._waiting.values())) >= _MOST_BYTES:
            self._store()

    def _store_at_the_end(self) -> None:
        """Write a checkpoint, unless the store fails: what ends the stage is the error to be reported."""
        try:
            self._store()
        except StoreError as error:
            print(f"the complete rows could not be stored: {error}", flush=True)

    def _store(self) -> None:
        """Write a checkpoint of the parts that wait, if any: not beside another job that computes the same."""
        if self._waiting and not STOPS.superseded:
            checkpoints, name = self._context.checkpoints, Checkpoints.new_name(self._kept)
            entries = [checkpoints.add(name, part, content) for part, content in self._waiting.items()]
            checkpoints.commit(
                Checkpoint(
                    name=name, step=self._kept, ranks=1, files=tuple(entries), libraries=dict(self._context.libraries),
                    created_at=datetime.now(UTC),
                )
            )  # fmt: skip
            self._waiting.clear()
        self._last_time = time.monotonic()
