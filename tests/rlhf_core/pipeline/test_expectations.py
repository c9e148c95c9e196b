"""Expectations: median and interval of earlier results that are alike."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.artifacts.manifest import ArtifactRef, Manifest
from rlhf_core.config.engines.placement import Reservation
from rlhf_core.config.prices import PricesConfig
from rlhf_core.pipeline.expectations import History, Range, Work, range_of
from tests.rlhf_core.artifacts.manifests import manifest

START = datetime(2026, 1, 2, 3, tzinfo=UTC)
BASE = manifest("base", "base", metrics={"parameters": 1_000_000})
PRICES = PricesConfig.model_validate({"currency": "EUR", "core": 3.6})


def made(
    name: str, seconds: float, steps: int = 10, *, parents: dict[str, ArtifactRef] | None = None, **changes: Any
) -> Manifest:
    attempt = Attempt(
        id=name, host="n", device="cpu", gpus=0.0, cores=2.0, started_at=START,
        seen_at=START + timedelta(seconds=seconds), outcome="published",
    ).model_copy(update=changes)  # fmt: skip
    return manifest(
        name, parents={"model": BASE.ref} if parents is None else parents, metrics={"steps": steps}, config={},
        attempts=(attempt,),
    )  # fmt: skip


def work(steps: float | None = 20, parameters: int | None = 1_000_000, cpus: float = 2.0, gpus: float = 0.0) -> Work:
    return Work(parameters, Reservation(cpus, gpus), tokens=None, steps=steps)


def test_the_range_of_few_and_of_many() -> None:
    assert range_of([4.0]) == Range(4.0, 2.0, 8.0, 1)
    assert range_of([3.0, 1.0, 2.0]) == Range(2.0, 1.0, 3.0, 3)
    assert range_of([float(value) for value in range(1, 40)]) == Range(20.0, 2.0, 38.0, 39)
    assert Range(4.0, 2.0, 8.0, 1) + Range(2.0, 1.0, 3.0, 3) == Range(6.0, 3.0, 11.0, 1)


def test_time_and_money_per_step_of_all_that_are_alike() -> None:
    found = History([BASE, made("a", 100), made("b", 60, steps=5), made("c", 140)]).expect("sft", work(), PRICES)
    assert found is not None
    assert found.seconds == Range(240.0, 200.0, 280.0, 3)
    assert found.money is not None
    assert (found.money.expected, found.money.low) == (pytest.approx(0.48), pytest.approx(0.4))


@pytest.mark.parametrize("asked", [
    work(parameters=1_100_000), work(parameters=None), work(cpus=4.0), work(cpus=2.0, gpus=1.0),
])  # fmt: skip
def test_others_say_nothing(asked: Work) -> None:
    assert History([BASE, made("a", 100)]).expect("sft", asked, None) is None
    assert History([BASE, made("a", 100)]).expect("rl", work(), None) is None


def test_a_resumed_result_counts_by_the_steps_of_its_last_attempt() -> None:
    found = History([BASE, made("a", 30, steps=10, resumed_after=7, step=10)]).expect("sft", work(steps=6), None)
    assert found is not None
    assert found.seconds.expected == pytest.approx(60.0)


def test_tokens_count_before_steps() -> None:
    result = made("a", 100).model_copy(update={"metrics": {"steps": 10, "tokens": 5000}})
    asked = Work(1_000_000, Reservation(2.0), tokens=500, steps=10)
    found = History([BASE, result]).expect("sft", asked, None)
    assert found is not None
    assert found.seconds.expected == pytest.approx(10.0)


def test_parents_in_a_circle_end() -> None:
    first = made("a", 10)
    circle = first.model_copy(update={"parents": {"model": first.ref}})
    assert History([circle]).expect("sft", work(), None) is None
