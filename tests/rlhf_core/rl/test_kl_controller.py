from __future__ import annotations

import json

import pytest

from rlhf_core.config.rl.algorithms import KLConfig
from rlhf_core.rl.kl_controller import KLController


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


def test_a_kl_that_is_not_finite_changes_nothing() -> None:
    controller = KLController(KLConfig(coefficient=0.5, target=1.0))
    controller.update(float("nan"))
    assert controller.coefficient == 0.5
