"""One entry of the recipe's `data` becomes one dataset artifact. Imports no torch: dataset jobs start fast."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.data import DatasetConfig, Source, WeightedSource
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.exclusion import Exclusion
from rlhf_core.data.formats import Row, RowError, canonical_row, duplicate_key
from rlhf_core.data.mixing import mix
from rlhf_core.data.reading import iterate_rows, write_dataset
from rlhf_core.data.sources import iterate_source
from rlhf_core.errors import StageError

_PROGRESS_EVERY = 2000  # rows


@dataclass
class _Counts:
    read: list[int] = field(default_factory=list)  # by source
    excluded: int = 0
    duplicates: int = 0
    not_drawn: int = 0  # left over when the mix's first source ran out
    over_limit: int = 0


def run(config: DatasetConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    """Read, check, drop what is excluded or repeated, mix, shuffle, limit.

    Raises StageError that names the row which does not fit, or says why nothing is left.
    """
    counts = _Counts()
    exclusion = Exclusion(
        row for name, given in inputs.items() if name.startswith("exclude.") for row in iterate_rows(given.folder)
    )
    sources = config.mix or (WeightedSource(source=_only_source(config)),)
    seen: set[str] = set()
    kept = [_usable_rows(entry.source, config, context, exclusion, seen, counts) for entry in sources]
    rows, drawn = _ordered(config, [entry.weight for entry in sources], kept, context.seed, counts)
    if not rows:
        raise StageError(
            f"{context.name}: no row is left of {sum(counts.read)} read: "
            f"{counts.excluded} occur in {', '.join(config.exclude) or 'excluded datasets'}, "
            f"{counts.duplicates} are duplicates, {counts.not_drawn} were not drawn by the mix"
        )
    folder = context.workdir / "dataset"
    info = _info(config, rows, drawn, counts)
    write_dataset(folder, rows, info)
    context.log(0, {"rows": len(rows), "excluded": counts.excluded, "duplicates": counts.duplicates})
    return Output(
        Kind.DATASET,
        folder,
        {"rows": len(rows), "read": sum(counts.read), "excluded": counts.excluded, "duplicates": counts.duplicates},
    )


def _only_source(config: DatasetConfig) -> Source:
    if config.source is None:
        raise StageError("this dataset names no `source` and no `mix`; give it one of them")
    return config.source


def _usable_rows(
    source: Source,
    config: DatasetConfig,
    context: StageContext,
    exclusion: Exclusion,
    seen: set[str],
    counts: _Counts,
) -> list[Row]:
    """Canonical rows of one source that are neither excluded nor seen before, in the source's order."""
    kept: list[Row] = []
    total = 0
    try:
        for where, raw in iterate_source(source, config.format, context.user_file):
            row = _canonical(where, raw, config)
            total += 1
            if total % _PROGRESS_EVERY == 0:
                context.progress(total, 0, "reading", kept=len(kept))
            if row in exclusion:
                counts.excluded += 1
            elif config.drop_duplicates and (key := duplicate_key(row, config.format)) in seen:
                counts.duplicates += 1
            else:
                if config.drop_duplicates:
                    seen.add(key)
                kept.append(row)
    except RowError as error:
        raise StageError(f"{context.name}: {error}") from error
    counts.read.append(total)
    return kept


def _canonical(where: str, raw: Mapping[str, Any], config: DatasetConfig) -> Row:
    try:
        return canonical_row(raw, config.format, config.columns)
    except RowError as error:
        raise RowError(f"{where}: {error}") from error


def _ordered(
    config: DatasetConfig, weights: list[float], kept: list[list[Row]], seed: int, counts: _Counts
) -> tuple[list[Row], list[int]]:
    """The rows in their final order, and how many came from each source."""
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


def _info(config: DatasetConfig, rows: list[Row], drawn: list[int], counts: _Counts) -> dict[str, Any]:
    ids = hashlib.sha256("\n".join(row["id"] for row in rows).encode()).hexdigest()
    tasks: dict[str, int] = {}
    for row in rows:
        if "task" in row:
            tasks[row["task"]] = tasks.get(row["task"], 0) + 1
    return {
        "format": config.format,
        "rows": len(rows),
        "sources": [
            {"source": json.loads(source.model_dump_json()), "read": read, "used": used}
            for source, read, used in zip(_sources(config), counts.read, drawn, strict=True)
        ],
        "dropped": {
            "excluded": counts.excluded,
            "duplicates": counts.duplicates,
            "not_drawn": counts.not_drawn,
            "over_limit": counts.over_limit,
        },
        "tasks": tasks,
        "rows_sha256": ids,
    }


def _sources(config: DatasetConfig) -> list[Source]:
    return [entry.source for entry in config.mix] or [_only_source(config)]
