"""Each loss and its gradient against independent formulas in float64, and the papers' limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from rlhf_core.config.stages.preference_losses import PREFERENCE_LOSSES, PreferenceLossConfig
from rlhf_core.losses.preference import PairLogprobs, PreferenceLoss, build_preference_loss

CONFIG: TypeAdapter[PreferenceLossConfig] = TypeAdapter(PreferenceLossConfig)
Formula = Callable[[float, float, float, float, float, float], float]
MARGIN = 1.5  # of every pair, where it is not given


def loss(kind: str, **settings: Any) -> PreferenceLoss[Any]:
    return build_preference_loss(CONFIG.validate_python({"type": kind, **settings}))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def nll_sigmoid(x: float) -> float:
    return math.log1p(math.exp(-x))


def divergence_reward(name: str, r: float, beta: float) -> float:
    """beta f'(u) of f-DPO's table of divergences, with u = p / p_reference."""
    u = math.exp(r)
    return (
        beta
        * {
            "reverse_kl": math.log(u) + 1,
            "forward_kl": -1 / u,
            "js": math.log(2 * u / (1 + u)),
            "alpha": (1 - u**-0.3) / 0.3,
        }[name]
    )


def log_odds(mean: float) -> float:
    p = math.exp(mean)
    return math.log(p / (1 - p))


# Of log-probs c and d, their numbers of tokens n and m, and the reference's e and f.
FORMULAS: Mapping[str, tuple[dict[str, Any], Formula]] = {
    "dpo": ({"beta": 0.3}, lambda c, d, n, m, e, f: nll_sigmoid(0.3 * (c - e - d + f))),
    "cdpo": (
        {"kind": "dpo", "beta": 0.3, "label_smoothing": 0.2},
        lambda c, d, n, m, e, f: 0.8 * nll_sigmoid(0.3 * (c - e - d + f)) + 0.2 * nll_sigmoid(-0.3 * (c - e - d + f)),
    ),
    "normalised dpo": (
        {"kind": "dpo", "beta": 2.0, "logprobs": "mean"},
        lambda c, d, n, m, e, f: nll_sigmoid(2 * ((c - e) / n - (d - f) / m)),
    ),
    **{
        f"dpo by {name}": (
            {"kind": "dpo", "beta": 0.3, "divergence": name} | ({"alpha": 0.3} if name == "alpha" else {}),
            lambda c, d, n, m, e, f, name=name: nll_sigmoid(  # type: ignore[misc]
                divergence_reward(name, c - e, 0.3) - divergence_reward(name, d - f, 0.3)
            ),
        )
        for name in ("forward_kl", "js", "alpha")
    },
    "robust_dpo": (
        {"beta": 0.3, "label_smoothing": 0.2},
        lambda c, d, n, m, e, f: (
            (0.8 * nll_sigmoid(0.3 * (c - e - d + f)) - 0.2 * nll_sigmoid(-0.3 * (c - e - d + f))) / 0.6
        ),
    ),
    "ipo": ({"beta": 0.3}, lambda c, d, n, m, e, f: ((c - e) - (d - f) - 1 / 0.6) ** 2),
    "mean ipo": (
        {"kind": "ipo", "beta": 0.3, "logprobs": "mean"},
        lambda c, d, n, m, e, f: ((c - e) / n - (d - f) / m - 1 / 0.6) ** 2,
    ),
    "hinge": ({"beta": 0.3}, lambda c, d, n, m, e, f: max(0.0, 1 - 0.3 * (c - e - d + f))),
    "exo": (
        {"beta": 0.3, "label_smoothing": 0.1},
        lambda c, d, n, m, e, f: sum(
            p * math.log(p / q)
            for p, q in ((sigmoid(0.3 * (c - e - d + f)), 0.9), (sigmoid(-0.3 * (c - e - d + f)), 0.1))
        ),
    ),
    "apo_zero": ({"beta": 0.3}, lambda c, d, n, m, e, f: 1 - sigmoid(0.3 * (c - e)) + sigmoid(0.3 * (d - f))),
    "apo_down": (
        {"beta": 0.3},
        lambda c, d, n, m, e, f: sigmoid(0.3 * (c - e)) + 1 - sigmoid(0.3 * (c - e) - 0.3 * (d - f)),
    ),
    "sppo": ({"beta": 0.3}, lambda c, d, n, m, e, f: (c - e - 1 / 0.6) ** 2 + (d - f + 1 / 0.6) ** 2),
    "rebel": ({"beta": 0.3}, lambda c, d, n, m, e, f: (0.3 * (c - e - d + f) - MARGIN) ** 2),
    "mean rebel": (
        {"kind": "rebel", "beta": 0.3, "logprobs": "mean"},
        lambda c, d, n, m, e, f: (0.3 * ((c - e) / n - (d - f) / m) - MARGIN) ** 2,
    ),
    "simpo": ({"beta": 2.0, "margin": 0.7}, lambda c, d, n, m, e, f: nll_sigmoid(2 * (c / n - d / m) - 0.7)),
    "orpo": (
        {"beta": 0.4},
        lambda c, d, n, m, e, f: -c / n + 0.4 * nll_sigmoid(log_odds(c / n) - log_odds(d / m)),
    ),
    "cpo": ({"beta": 0.3}, lambda c, d, n, m, e, f: nll_sigmoid(0.3 * (c - d)) - c / n),
    "nll": ({}, lambda c, d, n, m, e, f: -c / n),
}  # fmt: skip
# c, d, n, m, e, f of pairs that the policy orders rightly, wrongly, and far apart.
PAIRS = [(-3.0, -9.0, 4.0, 7.0, -5.0, -6.0), (-8.0, -2.0, 5.0, 3.0, -6.5, -4.0), (-1.0, -12.0, 2.0, 9.0, -7.0, -3.0)]


def pairs_of(rows: list[tuple[float, ...]], dtype: torch.dtype) -> PairLogprobs:
    values = torch.tensor(rows, dtype=dtype)
    margins = torch.full((len(rows),), MARGIN, dtype=dtype)
    return PairLogprobs(values[:, :2].clone().requires_grad_(), values[:, 2:4], values[:, 4:], margins)


@pytest.mark.parametrize("name", FORMULAS)
def test_value_and_gradient(name: str) -> None:
    settings, formula = FORMULAS[name]
    for dtype, value_error, slope_error in ((torch.float32, 1e-5, 1e-4), (torch.float64, 1e-12, 1e-7)):
        given = pairs_of(PAIRS, dtype)
        values = loss(**{"kind": name, **settings})(given)
        assert values.tolist() == pytest.approx([formula(*row) for row in PAIRS], rel=value_error)
        values.sum().backward()  # type: ignore[no-untyped-call]
        assert given.logprobs.grad is not None
        for row, gradient in zip(PAIRS, given.logprobs.grad.tolist(), strict=True):
            slopes = [slope(formula, row, place) for place in (0, 1)]
            assert gradient == pytest.approx(slopes, abs=slope_error / 10, rel=slope_error)


def slope(formula: Formula, row: tuple[float, float, float, float, float, float], place: int) -> float:
    step = 1e-5
    low, high = list(row), list(row)
    low[place] -= step
    high[place] += step
    return (formula(*high) - formula(*low)) / (2 * step)


def test_every_loss_is_tested() -> None:
    assert {settings.get("kind", name) for name, (settings, _) in FORMULAS.items()} == set(PREFERENCE_LOSSES)


def gradient(kind: str, row: tuple[float, ...], **settings: Any) -> Tensor:
    given = pairs_of([row], torch.float64)
    loss(kind, **settings)(given).sum().backward()  # type: ignore[no-untyped-call]
    assert given.logprobs.grad is not None
    return given.logprobs.grad[0]


# Of a policy that equals its reference.
AT_THE_REFERENCE = {
    "dpo": math.log(2), "cdpo": math.log(2), "normalised dpo": math.log(2), "robust_dpo": math.log(2),
    "dpo by forward_kl": math.log(2), "dpo by js": math.log(2), "dpo by alpha": math.log(2),
    "ipo": 1 / 0.6**2, "mean ipo": 1 / 0.6**2, "hinge": 1.0, "exo": -0.5 * math.log(4 * 0.1 * 0.9),
    "apo_zero": 1.0, "apo_down": 1.0, "sppo": 2 / 0.6**2, "rebel": MARGIN**2, "mean rebel": MARGIN**2,
}  # fmt: skip
WITH_CONSTANTS = {"dpo by forward_kl", "dpo by js", "dpo by alpha"}  # in their rewards, which cancel in the difference
WITHOUT_REFERENCE = {"simpo", "orpo", "cpo", "nll"}


@pytest.mark.parametrize("name", AT_THE_REFERENCE)
def test_a_policy_that_equals_its_reference_prefers_neither(name: str) -> None:
    settings = {"kind": name, **FORMULAS[name][0]}
    found = loss(**settings)
    same = pairs_of([(-5.0, -4.0, 3.0, 3.0, -5.0, -4.0)], torch.float64)
    chosen, rejected = found.rewards(same)[0].tolist()
    assert chosen == rejected
    if name not in WITH_CONSTANTS:
        assert (chosen, rejected) == (0.0, 0.0)
    assert found(same).item() == pytest.approx(AT_THE_REFERENCE[name])


def test_every_loss_with_a_reference_is_tried_there() -> None:
    assert AT_THE_REFERENCE.keys() == FORMULAS.keys() - WITHOUT_REFERENCE


@pytest.mark.parametrize("name", FORMULAS)
def test_of_identical_completions_none_is_learned_but_its_own_likelihood(name: str) -> None:
    """Of a loss of differences both gradients cancel. What is left pulls the completion up, or to an anchor."""
    settings = {"kind": name, **FORMULAS[name][0]}
    r, n = 0.8, 4.0
    anchored = {
        "orpo": -1 / n, "cpo": -1 / n, "nll": -1 / n,  # mean -log p of its tokens
        "sppo": 4 * r,  # both squares, of which the aims cancel
        "apo_down": 0.3 * sigmoid(0.3 * r) * sigmoid(-0.3 * r),
    }  # fmt: skip
    both = gradient(row=(-5.0, -5.0, n, n, -5.0 - r, -5.0 - r), **settings).sum().item()
    assert both == pytest.approx(anchored.get(name, 0.0), abs=1e-12)


# What of beta times the gradient is left as beta goes to 0, by chosen and rejected; of others nothing.
WITHOUT_BETA = {"orpo": (-0.25, 0.0), "cpo": (-0.25, 0.0)}  # the chosen completion's likelihood, of four tokens
GROWING = {"ipo": (-1.0, 1.0), "sppo": (-1.0, 1.0)}  # their aim is 1 / (2 beta)


@pytest.mark.parametrize("kind", sorted(set(PREFERENCE_LOSSES) - {"nll"}))
def test_without_beta_no_preference_is_learned(kind: str) -> None:
    settings = {"label_smoothing": 0.1} if kind in ("exo", "robust_dpo") else {}
    found = gradient(kind, PAIRS[0], beta=1e-9, **settings)
    if kind in GROWING:
        assert (1e-9 * found).tolist() == pytest.approx(GROWING[kind], abs=1e-6)
    else:
        assert found.tolist() == pytest.approx(WITHOUT_BETA.get(kind, (0.0, 0.0)), abs=1e-8)


def test_rebel_regresses_each_pair_to_its_own_margin() -> None:
    """Worked by hand with beta 0.5: differences of ratios 4, -3 and 0, margins 2, -1.5 and 1; a step of gradient
    descent of 1 / (4 beta^2) ends where the rewards are their margins apart."""
    rows: list[tuple[float, ...]] = [
        (-3.0, -9.0, 4.0, 7.0, -5.0, -7.0), (-8.0, -2.0, 5.0, 3.0, -6.0, -3.0), (-1.0, -1.0, 2.0, 9.0, -2.0, -2.0)
    ]  # fmt: skip
    pairs = replace(pairs_of(rows, torch.float64), margins=torch.tensor([2.0, -1.5, 1.0], dtype=torch.float64))
    rebel = loss("rebel", beta=0.5)
    values = rebel(pairs)
    assert values.tolist() == [0.0, 0.0, 1.0]
    values.sum().backward()  # type: ignore[no-untyped-call]
    assert pairs.logprobs.grad is not None
    assert pairs.logprobs.grad.tolist() == [[0.0, 0.0], [0.0, 0.0], [-1.0, 1.0]]
    moved = replace(pairs, logprobs=pairs.logprobs.detach() - pairs.logprobs.grad)
    assert (rebel.rewards(moved)[:, 0] - rebel.rewards(moved)[:, 1]).tolist() == [2.0, -1.5, 1.0]


@pytest.mark.parametrize("kind", ["dpo", "exo"])
def test_labels_of_which_half_are_wrong_prefer_neither(kind: str) -> None:
    row = (-5.0, -4.0, 3.0, 3.0, -5.0, -4.0)
    assert gradient(kind, row, label_smoothing=0.5).tolist() == [0.0, 0.0]
    exchanged = (PAIRS[0][1], PAIRS[0][0], *PAIRS[0][3:1:-1], PAIRS[0][5], PAIRS[0][4])
    ours, theirs = gradient(kind, PAIRS[0], label_smoothing=0.5), gradient(kind, exchanged, label_smoothing=0.5)
    assert ours.tolist() == pytest.approx(theirs.flip(0).tolist())


def test_smoothing_ends_where_the_share_of_wrong_labels_says() -> None:
    """Conservative DPO has its minimum where sigmoid(d) is the share of right labels; robust DPO has none."""
    d = math.log(0.8 / 0.2)
    row = (d, 0.0, 1.0, 1.0, 0.0, 0.0)
    assert gradient("dpo", row, beta=1.0, label_smoothing=0.2).abs().max() < 1e-12
    assert gradient("robust_dpo", row, beta=1.0, label_smoothing=0.2)[0] < -0.1
    assert gradient("exo", row, beta=1.0, label_smoothing=0.2).abs().max() < 1e-12


def test_an_alpha_near_its_ends_is_the_kl_there() -> None:
    for alpha, name in ((1e-7, "reverse_kl"), (1 - 1e-7, "forward_kl")):
        ours = loss("dpo", divergence="alpha", alpha=alpha)(pairs_of(PAIRS, torch.float64))
        assert torch.allclose(ours, loss("dpo", divergence=name)(pairs_of(PAIRS, torch.float64)), atol=1e-5)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("far", [-2000.0, -1e-9, 0.0])
def test_no_log_prob_makes_a_loss_or_a_gradient_infinite(name: str, far: float) -> None:
    settings, _ = FORMULAS[name]
    for row in ((far, -5.0, 4.0, 4.0, -5.0, -5.0), (-5.0, far, 4.0, 4.0, -5.0, -5.0)):
        given = pairs_of([row], torch.float32)
        value = loss(**{"kind": name, **settings})(given)
        value.sum().backward()  # type: ignore[no-untyped-call]
        assert given.logprobs.grad is not None
        assert math.isfinite(value.item())
        assert bool(torch.isfinite(given.logprobs.grad).all())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"type": "dpp"}, "there is no preference loss `dpp` (did you mean `dpo`?)"),
        ({"type": "dpo", "beta": 0.0}, "more than 0"),
        ({"type": "dpo", "label_smoothing": 0.6}, "exchange chosen and rejected"),
        ({"type": "robust_dpo", "label_smoothing": 0.5}, "say nothing"),
        ({"type": "dpo", "divergence": "alpha"}, "divergence alpha needs a setting `alpha`"),
        ({"type": "dpo", "alpha": 0.5}, "set `divergence: alpha`"),
        ({"type": "nll", "weight": 0.0}, "it would not count"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        CONFIG.validate_python(settings)
    assert message in str(caught.value)
