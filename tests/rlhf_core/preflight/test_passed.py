"""A library is asked before a run about the settings that are passed on to it."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.errors import StageError
from rlhf_core.preflight import passed
from tests.rlhf_core.recipes import Problems, both, put

pytestmark = pytest.mark.parts


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path_factory.mktemp("cache")))


def no_process(*arguments: Any, **options: Any) -> None:
    raise AssertionError("a process was started")


MISSPELT = put("sft", "engine", value={"deepspeed": {"zero_optimization": {"reduce_scater": False}}})
PROBLEM = (
    "sft.engine.deepspeed.zero_optimization.reduce_scater: DeepSpeed has no setting `reduce_scater` here (did you mean "
    "`reduce_scatter`?)"
)


def test_a_misspelt_setting_is_found_by_plan_once(problems: Problems, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(MISSPELT) == [PROBLEM]
    monkeypatch.setattr(passed, "tried", no_process)
    assert problems(MISSPELT) == [PROBLEM]
    with pytest.raises(AssertionError, match="a process was started"):
        problems(put("sft", "engine", value={"deepspeed": {"zero_optimization": {"reduce_scatter": False}}}))


@pytest.mark.slow("a process imports vLLM")
@pytest.mark.endurance("mutations")
def test_vllm_is_asked_too(problems: Problems) -> None:
    wrong = both(
        put("rl", "rollout", value={"max_length": 64, "vllm": {"block_sise": 16}}),
        put("evaluation", "rollout", value={"max_length": 64, "vllm": {"block_size": 16, "scheduling_policy": "lifo"}}),
    )
    assert problems(wrong) == [
        "rl.rollout.vllm.block_sise: vLLM has no such setting (did you mean `block_size`?)",
        "evaluation.rollout.vllm.scheduling_policy: Input should be 'fcfs' or 'priority'",
    ]


def test_no_process_starts_where_the_library_is_missing(problems: Problems, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passed, "tried", no_process)
    monkeypatch.setattr(passed, "find_spec", lambda name: None)
    assert problems(MISSPELT) == []


def test_what_takes_too_long_is_ended_and_named(problems: Problems, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passed, "_SECONDS", 0.01)
    with pytest.raises(StageError, match=r"^DeepSpeed could not validate .*: no answer within 0\.01 s"):
        problems(MISSPELT)
