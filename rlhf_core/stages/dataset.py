"""One entry of the recipe's `data` becomes one dataset artifact. Imports no torch: dataset jobs start fast."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.data import DatasetConfig, Source, WeightedSource
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.bad_rows import BadRows, bad_row_policy, canonical
from rlhf_core.data.formats import Row, RowError, format_of, normalised
from rlhf_core.data.mixing import mix
from rlhf_core.data.near_duplicates import NearDuplicates
from rlhf_core.data.overlap import PromptIndex
from rlhf_core.data.reading import read_dataset, write_info, write_rows
from rlhf_core.data.sources import iterate_source
from rlhf_core.data.spool import RowSpool
from rlhf_core.errors import StageError

_PROGRESS_EVERY = 2000  # rows
_NEAR_EXAMPLES = 3
_SHOWN_CHARACTERS = 200


@dataclass
class _Counts:
    read: list[int] = field(default_factory=list)  # by source, without bad rows
    bad: BadRows = field(default_factory=BadRows)
    excluded: int = 0
    duplicates: int = 0
    near_duplicates: int = 0  # that resemble an earlier row
    near_excluded: int = 0  # that ask nearly an excluded prompt
    near_examples: list[dict[str, str]] = field(default_factory=list)
    near_dropped: int = 0
    not_drawn: int = 0  # left over when the mix's first source ran out
    over_limit: int = 0


def run(config: DatasetConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    """Read, check, drop what is excluded or repeated, mix, shuffle, limit.

    inputs: `exclude.NAME`, datasets whose prompts are dropped.
    Raises StageError that names the row which does not fit, or says why nothing is left.
    """
    sources = config.mix or (WeightedSource(source=_only_source(config)),)
    with RowSpool(context.workdir / "rows.jsonl") as spool:
        selection = _Selection(config, inputs, context, spool)
        kept = [selection.read(entry.source) for entry in sources]
        kept = selection.without_near_duplicates(kept)
        counts = selection.counts
        order, drawn = _ordered(config, [entry.weight for entry in sources], kept, context.seed, counts)
        if not order:
            raise StageError(f"{context.name}: no row is left of {sum(counts.read)} read: {_reasons(config, counts)}")
        folder = context.workdir / "dataset"
        summary = _Summary()
        write_rows(folder, summary.of(spool.read(order)))
    write_info(folder, _info(config, summary, drawn, counts))
    # Not logged: one line is no curve, and starting the trackers would take longer than most datasets.
    return Output(Kind.DATASET, folder, _metrics(config, len(order), counts))


class _Selection:
    """Reads sources one after another and decides of each row whether it is kept. Kept rows go to the spool."""

    def __init__(
        self, config: DatasetConfig, inputs: Mapping[str, Input], context: StageContext, spool: RowSpool
    ) -> None:
        self.counts = _Counts()
        self._config = config
        self._format = format_of(config.format)
        self._context = context
        self._spool = spool
        self._bad_row = bad_row_policy(config, self.counts.bad)
        self._excluded = PromptIndex({name: read_dataset(given.folder) for name, given in inputs.items()})
        self._seen: set[str] = set()
        self._near: NearDuplicates | None = None
        if config.near_duplicates != "off":
            self._near = NearDuplicates(self._excluded.prompts, config.near_duplicate_threshold)

    def read(self, source: Source) -> list[int]:
        """The numbers in the spool of the source's rows that are kept, in the source's order."""
        kept: list[int] = []
        read = 0
        try:
            for where, raw in iterate_source(source, self._config.format, self._context, self._bad_row):
                row = canonical(where, raw, self._config, self._bad_row)
                if row is None:
                    continue
                read += 1
                if read % _PROGRESS_EVERY == 0:
                    self._context.progress(read, 0, "reading", kept=len(kept))
                if self._keeps(row):
                    kept.append(len(self._spool))
                    self._spool.append(row)
                    if self._near is not None:
                        self._near.add(self._text(row), normalised(self._format.asked_text(row)))
        except RowError as error:
            raise StageError(f"{self._context.name}: {error}") from error
        self.counts.read.append(read)
        return kept

    def _keeps(self, row: Row) -> bool:
        if self._excluded.find(row, self._format):
            self.counts.excluded += 1
            return False
        if self._config.drop_duplicates:
            key = self._format.duplicate_key(row)
            if key in self._seen:
                self.counts.duplicates += 1
                return False
            self._seen.add(key)
        return True

    def _text(self, row: Row) -> str:
        return normalised(self._format.whole_text(row))

    def without_near_duplicates(self, kept: list[list[int]]) -> list[list[int]]:
        """`kept`, after all sources were read, without near-duplicates if these are dropped."""
        counts = self.counts
        if self._near is None:
            return kept
        self._context.progress(sum(counts.read), 0, "comparing")
        earlier, near_prompt = self._near.finish()
        repeats = earlier >= 0
        counts.near_duplicates, counts.near_excluded = int(repeats.sum()), int(near_prompt.sum())
        for index in repeats.nonzero()[0][:_NEAR_EXAMPLES]:
            row, resembled = self._spool.read((int(index), int(earlier[index])))
            counts.near_examples.append({"row": _shown(self._text(row)), "resembles": _shown(self._text(resembled))})
        if self._config.near_duplicates != "drop":
            return kept
        dropped = repeats | near_prompt
        counts.near_dropped = int(dropped.sum())
        return [[index for index in of_source if not dropped[index]] for of_source in kept]


def _only_source(config: DatasetConfig) -> Source:
    if config.source is None:
        raise StageError("this dataset names no `source` and no `mix`; give it one of them")
    return config.source


def _ordered(
    config: DatasetConfig, weights: Sequence[float], kept: list[list[int]], seed: int, counts: _Counts
) -> tuple[list[int], list[int]]:
    """The rows' numbers in their final order, and how many came from each source."""
    if config.mix:
        mixed = mix(kept, weights, seed=seed, shuffle=config.shuffle)
    else:
        mixed = [(0, row) for row in kept[0]]
        if config.shuffle:
            random.Random(seed).shuffle(mixed)
    counts.not_drawn = sum(map(len, kept)) - len(mixed)
    limited = mixed[: config.limit]
    counts.over_limit = len(mixed) - len(limited)
    if config.mix and config.shuffle:
        # The mix interleaves its sources evenly; training wants them in no pattern.
        random.Random(seed + 1).shuffle(limited)
    drawn = [sum(1 for index, _ in limited if index == source) for source in range(len(kept))]
    return [row for _, row in limited], drawn


class _Summary:
    """What the info file has of the rows, collected while they are written."""

    def __init__(self) -> None:
        self.rows = 0
        self.tasks: dict[str, int] = {}
        self._ids = hashlib.sha256()

    def of(self, rows: Iterator[Row]) -> Iterator[Row]:
        for row in rows:
            self._ids.update((f"\n{row['id']}" if self.rows else row["id"]).encode())
            self.rows += 1
            if "task" in row:
                self.tasks[row["task"]] = self.tasks.get(row["task"], 0) + 1
            yield row

    @property
    def ids_sha256(self) -> str:
        return self._ids.hexdigest()


def _dropped(counts: _Counts) -> dict[str, int]:
    return {
        "bad_rows": counts.bad.count,
        "excluded": counts.excluded,
        "duplicates": counts.duplicates,
        "near_duplicates": counts.near_dropped,
        "not_drawn": counts.not_drawn,
        "over_limit": counts.over_limit,
    }


def _reasons(config: DatasetConfig, counts: _Counts) -> str:
    """Where all rows went, for the error that none is left."""
    dropped = _dropped(counts)
    return (
        f"{dropped['excluded']} occur in {', '.join(config.exclude) or 'excluded datasets'}, "
        f"{dropped['duplicates']} are duplicates, "
        f"{dropped['near_duplicates']} near-duplicates, {dropped['not_drawn']} were not drawn by the mix; "
        f"{dropped['bad_rows']} bad rows are not counted as read"
    )


def _metrics(config: DatasetConfig, rows: int, counts: _Counts) -> dict[str, int]:
    metrics = {
        "rows": rows,
        "read": sum(counts.read),
        "excluded": counts.excluded,
        "duplicates": counts.duplicates,
        "bad_rows": counts.bad.count,
    }
    if config.near_duplicates == "off":
        return metrics
    return metrics | {"near_duplicates": counts.near_duplicates, "near_excluded": counts.near_excluded}


def _info(config: DatasetConfig, summary: _Summary, drawn: list[int], counts: _Counts) -> dict[str, Any]:
    return {
        "format": config.format,
        "rows": summary.rows,
        # For the stages that read it, which alone know its rows' lengths, and a chat template.
        "on_long_row": config.on_long_row,
        "on_bad_row": config.on_bad_row,
        "sources": [
            {"source": json.loads(source.model_dump_json()), "read": read, "used": used}
            for source, read, used in zip(_sources(config), counts.read, drawn, strict=True)
        ],
        "dropped": _dropped(counts),
        "bad_rows": counts.bad.info(),
        "near_duplicates": {
            "policy": config.near_duplicates,
            "threshold": config.near_duplicate_threshold,
            "rows": counts.near_duplicates,
            "near_excluded": counts.near_excluded,
            "examples": counts.near_examples,
        },
        "tasks": summary.tasks,
        "rows_sha256": summary.ids_sha256,
    }


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _sources(config: DatasetConfig) -> list[Source]:
    return [entry.source for entry in config.mix] or [_only_source(config)]
