"""Files of logged rollouts: their names, their bounds, and which steps have one."""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.artifacts import logged_rollouts
from rlhf_core.artifacts.live import LiveFiles, LiveMetrics
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.logged_rollouts import (
    LoggedCompletion,
    LoggedGroup,
    LoggedSequence,
    LoggedStep,
    decode_step,
    encode_step,
    rollouts_file,
    step_of,
)
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.config.rl.keep import LogRolloutsConfig
from rlhf_core.errors import IntegrityError, StoreError

REF = ArtifactRef(stage="rl", key="0" * 64)
STEP = LoggedStep(step=3, prompts=1, completions=2, histograms={}, groups=())


@pytest.mark.parametrize("total", [1, 2, 3, 7, 99, 100, 101, 1000, 12345])
@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_as_many_steps_as_allowed_the_first_and_the_last_among_them(most: int, total: int) -> None:
    config = LogRolloutsConfig(steps=most)
    logged = [step for step in range(1, total + 1) if config.includes(step, total)]
    assert len(logged) == min(most, total)
    assert logged[-1] == total
    assert logged[0] == 1 or most == 1
    gaps = [after - before for before, after in pairwise(logged)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_a_step_is_read_as_it_was_written() -> None:
    assert decode_step(encode_step(STEP), "here") == STEP
    assert step_of(f"rollouts/{rollouts_file(3)}") == 3
    assert [step_of(name) for name in ("rollouts/images/ab", "rollouts/x.json.gz", "rollouts/٣.json.gz")] == [None] * 3


def test_damaged_cut_and_huge_files_are_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = encode_step(STEP)
    for data, reason in (
        (b"no gzip", "it is damaged"),
        (whole[: len(whole) // 2], "it is cut"),
        (gzip.compress(b'{"step": "3"}'), "it is not a step of logged rollouts"),
    ):
        with pytest.raises(IntegrityError, match=f"^{reason}"):
            decode_step(data, "it")
    monkeypatch.setattr(logged_rollouts, "_LARGEST", 10)
    with pytest.raises(IntegrityError, match="larger than 10 bytes"):
        decode_step(whole, "it")


@pytest.mark.parametrize(
    "changes",
    [
        {"texts": ("a",)},
        {"token_ids": (1, 2, 3)},
        {"engine_logprobs": ()},
        {"advantages": (0.5, 0.5)},
        {"values": ()},
        {"entropies": ()},
        {"trained": (True, True)},
    ],
)
def test_a_sequence_whose_columns_do_not_agree_is_refused(changes: dict[str, Any]) -> None:
    whole = LoggedSequence(
        texts=("a", "b"), token_ids=(1, 2), trained=(False, True), engine_logprobs=(-1.0,), advantages=(None,)
    )
    for sequence in (whole, whole.model_copy(update=changes)):
        completion = LoggedCompletion(
            text="b", finish_reason="stop", turns=1, reward=1.0, rewards={}, versions=(), sequences=(sequence,)
        )
        group = LoggedGroup(id="1", prompt=(), completions=(completion,))
        data = encode_step(STEP.model_copy(update={"groups": (group,)}))
        if sequence is whole:
            assert decode_step(data, "it").groups == (group,)
    with pytest.raises(IntegrityError, match=r"^it is not a step of logged rollouts: some tokens of it have no values"):
        decode_step(data, "it")


class _Broken(LocalStore):
    def put(self, path: str, data: bytes) -> None:
        raise StoreError("the disk is full")


def test_metrics_are_copied_at_most_every_ten_seconds_and_never_end_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    live = LiveFiles(LocalStore(tmp_path), REF)
    metrics = LiveMetrics(live, clock=lambda: now[0])
    for moment, lines in ((0.0, b"1\n"), (9.0, b"1\n2\n"), (10.0, b"1\n2\n3\n"), (19.0, b"1\n2\n3\n4\n")):
        now[0] = moment
        metrics.copy(lambda lines=lines: lines)  # type: ignore[misc]
        assert live.get("metrics.jsonl") == (b"1\n" if moment < 10 else b"1\n2\n3\n")
    live.clear()
    assert live.paths() == []
    LiveMetrics(LiveFiles(_Broken(tmp_path), REF)).copy(lambda: b"")
    assert "the metrics cannot be followed for now: the disk is full" in capsys.readouterr().out
