"""Learning rates worked out by hand; which parameters decay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.stages.trained import OptimizerConfig
from rlhf_core.training.optimizers import build_optimizer, learning_rate, parameter_groups

pytestmark = pytest.mark.parts


def rates(schedule: str, total: int = 6, **settings: float) -> list[float]:
    fall = {} if schedule == "constant" else {"final_learning_rate_share": 0.2}
    config = OptimizerConfig.model_validate(
        {"learning_rate": 1.0, "schedule": schedule, "warmup_share": 1 / 3, **fall, **settings}
    )
    return [learning_rate(config, step, total) for step in range(total + 2)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.7333333, 0.4666667, 0.2, 0.2, 0.2]),
        ("cosine", [0.5, 1, 1, 0.8, 0.4, 0.2, 0.2, 0.2]),
    ],
)
def test_schedules(schedule: str, expected: list[float]) -> None:
    assert rates(schedule) == pytest.approx(expected, abs=1e-6)


def test_no_warmup_starts_at_the_top_and_all_warmup_never_falls() -> None:
    assert rates("linear", warmup_share=0.0, final_learning_rate_share=0.0)[:6] == pytest.approx(
        [1, 0.8, 0.6, 0.4, 0.2, 0]
    )
    assert rates("cosine", warmup_share=1.0)[:6] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1])


def test_a_single_step_trains_at_the_full_rate() -> None:
    assert rates("cosine", total=1, warmup_share=0.0)[0] == 1.0
    assert rates("cosine", total=1, warmup_share=0.05)[0] == 1.0


def test_matrices_decay_and_vectors_do_not() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    model[2].requires_grad_(False)
    groups = parameter_groups(model, OptimizerConfig(learning_rate=1.0, weight_decay=0.1))
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [id(p) for p in groups[0]["params"]] == [id(model[0].weight)]
    assert [id(p) for p in groups[1]["params"]] == [id(model[0].bias), id(model[1].weight), id(model[1].bias)]


def test_a_frozen_model_cannot_be_trained() -> None:
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        parameter_groups(nn.Linear(1, 1).requires_grad_(False), OptimizerConfig(learning_rate=1.0))


@pytest.mark.parametrize("epsilon", [1e-8, 0.5])
def test_an_update_is_divided_by_the_root_and_epsilon(epsilon: float) -> None:
    """The first step of AdamW: both means are those of one gradient, 3, whatever the betas are."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(2.0)
    config = OptimizerConfig(learning_rate=0.1, epsilon=epsilon)
    optimizer = build_optimizer(model, EngineConfig(), config)
    optimizer.param_groups[0]["lr"] = 0.1
    model.weight.grad = torch.full((1, 1), 3.0)
    optimizer.step()
    assert model.weight.item() == pytest.approx(2 - 0.1 * 3 / (3 + epsilon))
