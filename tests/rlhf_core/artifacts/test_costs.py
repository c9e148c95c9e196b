"""Costs: quantities of attempts, at prices by GPU, core, GiB and token."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from pydantic import ValidationError

from rlhf_core.artifacts.attempt import Attempt, JudgeUse
from rlhf_core.artifacts.costs import cost_of, stage_cost, total
from rlhf_core.config.prices import PricesConfig
from rlhf_core.report.formatting import money

START = datetime(2026, 1, 2, 3, tzinfo=UTC)
PRICES = PricesConfig.model_validate_json(
    '{"currency": "EUR", "gpus": {"NVIDIA H200": 3.6, "*H*": 1.8}, "core": 0.036, "gib": 0.0036,'
    ' "judges": {"big-*": {"input": 2.0, "output": 8.0}}}'
)


def attempt(run: str, device: str = "NVIDIA H200", seconds: float = 1000.0, **changes: object) -> Attempt:
    plain = Attempt(
        id="a", run_id=run, host="node", device=device, gpus=2.0, cores=10.0, memory=100 << 30, started_at=START,
        seen_at=START + timedelta(seconds=seconds), outcome="published",
    )  # fmt: skip
    return plain.model_copy(update=changes)


def test_the_cost_of_an_attempt() -> None:
    judged = {"big-1": JudgeUse(calls=3, prompt_tokens=1_000_000, completion_tokens=250_000)}
    cost = cost_of([attempt("r", judges=judged, energy={"gpu": 7.0})], PRICES)
    assert cost.money == pytest.approx(2.0 + 0.1 + 0.1 + 2.0 + 2.0)
    assert (cost.gpu_seconds, cost.core_seconds, cost.gib_seconds) == (2000, 10_000, 100_000)
    assert (cost.judge_calls, cost.judge_tokens, cost.joules, cost.unpriced) == (
        3,
        1_250_000,
        {"gpu": 7.0},
        frozenset(),
    )
    assert cost_of([attempt("r", "NVIDIA H100", gpus=1.0, cores=0.0, memory=0)], PRICES).money == pytest.approx(0.5)


def test_what_has_no_price_is_named_and_not_guessed() -> None:
    judged = {"small": JudgeUse(calls=1), "big-1": JudgeUse(calls=2, unreported=2)}
    cost = cost_of([attempt("r", "AMD MI300", judges=judged)], PRICES)
    assert cost.unpriced == {
        "the GPU AMD MI300", "the judge small",
        "2 replies of the judge big-1, whose tokens its server did not report",
    }  # fmt: skip
    assert money(cost, PRICES) == "0.20 EUR + ?"
    assert money(cost_of([attempt("r")], None), None) == ""


def test_a_reused_stage_saves_and_attempts_of_other_runs_are_told_apart() -> None:
    attempts = [attempt("before", outcome="killed"), attempt("now")]
    computed, reused = (stage_cost("sft", outcome, attempts, "now", PRICES) for outcome in ("computed", "reused"))
    assert [round(total([computed], part).money, 2) for part in ("own", "others", "saved")] == [2.2, 2.2, 0.0]
    assert [round(total([reused], part).money, 2) for part in ("own", "others", "saved")] == [2.2, 0.0, 2.2]


@pytest.mark.parametrize("wrong", ['{"currency": "€"}', '{"core": 1.0}', '{"currency": "EUR", "core": -1.0}'])
def test_a_table_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(ValidationError):
        PricesConfig.model_validate_json(wrong)
