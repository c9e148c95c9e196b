"""The messages in a job's output: what is written is read back, and nothing else is taken for a message."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.tracking.protocol import ERROR_PREFIX, PROGRESS_PREFIX, JobError, Progress, encode, parse

SECONDS = st.floats(min_value=0, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["step", "total", "type", "message"]), inner),
)


@given(
    st.integers(0, 2**53), st.integers(0, 2**53), st.text(), st.dictionaries(st.text(), st.floats(allow_nan=False)),
    st.none() | SECONDS,
)  # fmt: skip
def test_progress_is_read_back_as_written(
    step: int, total: int, phase: str, metrics: dict[str, float], seconds_left: float | None
) -> None:
    progress = Progress(step, total, phase, metrics, seconds_left)
    line = encode(progress)
    assert "\n" not in line
    assert parse(line) == progress


def test_a_metric_that_is_not_finite_is_still_reported() -> None:
    message = parse(encode(Progress(1, 2, "train", {"loss": math.nan, "norm": math.inf}, None)))
    assert str(message) == "step 1 of 2 · train · loss nan · norm inf"


@given(st.text(), st.text())
def test_an_error_is_read_back_as_written(kind: str, message: str) -> None:
    assert parse(encode(JobError(kind, message))) == JobError(kind, message)


def test_an_error_with_a_lone_surrogate_loses_only_that() -> None:
    line = encode(JobError("FileNotFoundError", "no file caf\udce9\nin ./data"))
    assert str(parse(line)) == "FileNotFoundError: no file caf?\nin ./data"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "step 1 of 2",
        ' @progress {"step": 1, "total": 2, "phase": "", "metrics": {}, "seconds_left": null}',
        "@progress",
        "@progress 50 %",
        '@progress {"step": 1}',
        '@progress {"step": Infinity, "total": 2, "phase": "", "metrics": {}, "seconds_left": null}',
        '@progress {"step": -1, "total": 2, "phase": "", "metrics": {}, "seconds_left": null}',
        '@progress {"step": 1e400, "total": 2, "phase": "", "metrics": {}, "seconds_left": null}',
        '@progress {"step": 1' + "0" * 400 + ', "total": 2, "phase": "", "metrics": {}, "seconds_left": null}',
        '@progress {"step": 1, "total": 2, "phase": "", "metrics": {}, "seconds_left": NaN}',
        '@progress {"step": 1, "total": 2, "phase": "", "metrics": {"loss": "low"}, "seconds_left": null}',
        "@progress " + "[" * 100_000,
        "@error the disk is full",
        '@error {"type": "ValueError"}',
        '@error {"type": 1, "message": 2}',
        "@error \udce9",
    ],
)
def test_a_line_that_only_looks_like_a_message_is_text(line: str) -> None:
    assert parse(line) is None


@given(st.sampled_from([PROGRESS_PREFIX, ERROR_PREFIX]), st.text(alphabet='{}[]":,.0123456789eE+-NaInfity ') | JSON)
def test_no_line_of_user_code_ends_the_reader(prefix: str, content: object) -> None:
    message = parse(f"{prefix}{content}")
    assert message is None or str(message)


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (Progress(1, 4, "rollout", {"reward": 0.51234}, 90.0), "step 1 of 4 · rollout · reward 0.5123 · 1:30 left"),
        (Progress(0, 4, "start workers", {}, None), "step 0 of 4 · start workers"),
        (Progress(2000, 0, "reading", {"kept": 1976}, None), "2000 · reading · kept 1976"),
        (Progress(0, 0, "publish", {}, None), "publish"),
        (
            Progress(12288, 0, "reading", {"kept": 10784, "loss": 1e-5}, None),
            "12288 · reading · kept 10784 · loss 1e-05",
        ),
        (Progress(1, 0, "", {"a": -12345.6, "b": 1e12, "c": math.inf}, None), "1 · a -12346 · b 1e+12 · c inf"),
    ],
)
def test_progress_as_text(progress: Progress, text: str) -> None:
    assert str(progress) == text
