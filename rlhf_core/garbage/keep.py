"""Times to live: how long what nothing needs is kept, by kind."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import timedelta

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.errors import StoreError, did_you_mean

RUNS, CHECKPOINTS, BLOBS, ARTIFACTS = "runs", "checkpoints", "blobs", "artifacts"
_KEPT_ON_REQUEST = ("rollouts", "policies")  # of single steps, by the setting `keep` of RL
_NAMES = (RUNS, CHECKPOINTS, BLOBS, ARTIFACTS, *_KEPT_ON_REQUEST, *Kind)
_UNITS = {"m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}
_TIME = re.compile(r"([0-9]{1,5})([mhdw])")

Keep = Mapping[str, timedelta | None]  # by kind; None: forever

DEFAULTS: Keep = {
    RUNS: None,  # a record names what it needs for so long
    CHECKPOINTS: timedelta(days=30),  # of a stage that did not end, with its spec, after its last write
    BLOBS: timedelta(days=1),  # that no document names
    ARTIFACTS: timedelta(days=30),  # of kinds that are not given themselves
    **dict.fromkeys(_KEPT_ON_REQUEST),
}


def parse_keep(texts: Iterable[str]) -> Keep:
    """Return the defaults, changed by texts such as `rollouts=7d` or `runs=forever`. Raises StoreError."""
    given: dict[str, timedelta | None] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if name not in _NAMES or not equals:
            near = did_you_mean(name, _NAMES)
            raise StoreError(f"--keep {text}: write KIND=TIME{near}; the kinds are {', '.join(sorted(_NAMES))}")
        match = _TIME.fullmatch(value)
        if match is None and value != "forever":
            raise StoreError(f"--keep {text}: `{value}` is not a time: write a number with m, h, d or w, or `forever`")
        given[name] = None if match is None else int(match[1]) * _UNITS[match[2]]
    return {**DEFAULTS, **given}


def time_to_live(keep: Keep, kind: str) -> timedelta | None:
    return keep[kind] if kind in keep else keep[ARTIFACTS]


def kind_of(stage: str, kind: str) -> str:
    """Return the kind by which an artifact is kept: its own, or that of what a stage kept of a single step."""
    kept = {"rollouts": "rollouts", "policy": "policies"}
    return kept.get(stage.partition(".")[2], kind)


def described(time: timedelta | None) -> str:
    """Return a time as `--keep` takes it."""
    if time is None:
        return "forever"
    unit = next(name for name in reversed(_UNITS) if time % _UNITS[name] == timedelta(0))
    return f"{time // _UNITS[unit]}{unit}"
