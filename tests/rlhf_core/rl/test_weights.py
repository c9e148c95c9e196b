"""The moving average of trained weights, and the copy that is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf_core.errors import StageError
from rlhf_core.rl.weights import WeightAverage
from rlhf_core.training.state import RankState
from tests.rlhf_core.training.tiny_engine import batch, build, loss, tiny_model, weights_of

pytestmark = pytest.mark.parts


def test_the_average_by_hand(tmp_path: Path) -> None:
    engine = build(tiny_model(tmp_path), zero_stage=2)
    average = WeightAverage(engine, decay=0.75)
    steps = [{name: weight.double().clone() for name, weight in engine.master_weights()}]
    for _ in range(2):
        engine.step([batch()], loss)
        average.update()
        steps.append({name: weight.double().clone() for name, weight in engine.master_weights()})
    first, second, third = steps
    kept = {name.removeprefix("weight."): tensor for name, tensor in average.state().own.items()}
    for name, tensor in kept.items():
        expected = 0.75 * (0.75 * first[name] + 0.25 * second[name]) + 0.25 * third[name]
        torch.testing.assert_close(tensor.double(), expected, atol=1e-7, rtol=0)
    with average.in_place():
        state = weights_of(engine)
    assert all(torch.equal(state[name], kept[name]) for name in kept)


def test_an_average_goes_on_where_another_was(tmp_path: Path) -> None:
    engine = build(tiny_model(tmp_path), zero_stage=0)
    average, restored = WeightAverage(engine, 0.5), WeightAverage(engine, 0.5)
    engine.step([batch()], loss)
    average.update()
    restored.load_state(average.state())
    assert all(torch.equal(tensor, restored.state().own[name]) for name, tensor in average.state().own.items())
    with pytest.raises(StageError, match="is in this run, but not in the checkpoint"):
        restored.load_state(RankState())
