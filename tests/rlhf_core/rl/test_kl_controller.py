from __future__ import annotations

import json

import pytest
import torch

from rlhf_core.config.algorithms import KLConfig
from rlhf_core.rl.kl_controller import KLController, completion_kl
from rlhf_core.types import Experience


def test_worked_by_hand() -> None:
    controller = KLController(KLConfig(coefficient=0.2, target=4.0, horizon=10))
    controller.update(4.4)  # 10 % too much
    assert controller.coefficient == pytest.approx(0.2 * 1.01)
    controller.update(1000.0)  # held at 20 %
    assert controller.coefficient == pytest.approx(0.2 * 1.01 * 1.02)
    controller.update(0.0)
    assert controller.coefficient == pytest.approx(0.2 * 1.01 * 1.02 * 0.98)


def test_the_default_is_the_papers_gain() -> None:
    controller = KLController(KLConfig(coefficient=1.0, target=1.0))
    controller.update(1.2)
    assert controller.coefficient == pytest.approx(1 + 0.1 * 0.2)


def test_without_a_target_nothing_changes() -> None:
    controller = KLController(KLConfig(coefficient=0.2))
    controller.update(1000.0)
    assert controller.coefficient == 0.2


def test_a_run_goes_on_where_it_was() -> None:
    config = KLConfig(coefficient=0.2, target=4.0)
    whole, first = KLController(config), KLController(config)
    for controller in (whole, first):
        controller.update(5.0)
    second = KLController(config)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for controller in (whole, second):
        controller.update(3.0)
    assert second.coefficient == whole.coefficient


@pytest.mark.parametrize("known", [True, False])
def test_the_kl_of_a_completion_is_a_sum_over_its_tokens(known: bool) -> None:
    logprobs = torch.tensor([0.0, -1.0, -2.0, 0.0, -3.0])
    experience = Experience(
        input_ids=torch.zeros(5, dtype=torch.int64),
        position_ids=torch.tensor([0, 1, 2, 0, 1]),
        sequence_lengths=torch.tensor([3, 2]),
        loss_mask=torch.tensor([False, True, True, False, True]),
        rollout_logprobs=torch.zeros(5) if known else logprobs,
        old_logprobs=logprobs if known else None,
        ref_logprobs=torch.tensor([9.0, -1.5, -1.0, 9.0, -4.0]),
    )
    assert completion_kl(experience) == pytest.approx((0.5 - 1.0 + 1.0) / 2)
