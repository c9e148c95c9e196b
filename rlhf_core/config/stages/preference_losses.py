"""Table of preference losses.

A new one is a file in rlhf_core/losses/preference, its config class, and one line here.

With r = log p(completion | prompt) - log p_reference(completion | prompt), each loss is a function of the two rewards
beta r of a pair, chosen and rejected, or, without a reference, of beta log p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlhf_core.config.numbers import (
    Coefficient,
    DivergenceAlpha,
    ExoSmoothing,
    LabelSmoothing,
    PositiveCoefficient,
    PreferenceBeta,
    RobustSmoothing,
)
from rlhf_core.config.plugins import Table
from rlhf_core.config.typed import TypedConfig


class PreferenceLossConfig(TypedConfig):
    """One term of the weighted sum that a preference stage minimises."""

    family: ClassVar[str] = "preference loss"
    uses_reference: ClassVar[bool] = False
    reads_margin: ClassVar[bool] = False  # every row needs its column `margin`

    weight: PositiveCoefficient = Field(default=1.0, description="weight of this loss in the sum")

    @classmethod
    def table(cls) -> Table[Any]:
        return PREFERENCE_LOSSES


def _beta(default: float, description: str) -> Any:
    return Field(default=default, description=description)


class ReferenceLoss(PreferenceLossConfig):
    """A loss of log-prob ratios to the reference."""

    family: ClassVar[str] = "preference loss with a reference"
    uses_reference: ClassVar[bool] = True

    beta: PreferenceBeta = _beta(0.1, "strength of the regularisation towards the reference: a reward is beta r")
    logprobs: Literal["sum", "mean"] = Field(
        default="sum", description="log-prob of a completion: sum over its tokens, or, normalised by length, mean"
    )


class DivergenceLoss(ReferenceLoss):
    """A loss of the difference of the two rewards, defined by an f-divergence to the reference, arXiv:2309.16240."""

    family: ClassVar[str] = "preference loss with a divergence"

    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = Field(
        default="reverse_kl",
        description="f-divergence of policy and reference; with u = exp(r) the reward is beta log u, -beta / u, beta "
        "log(2 u / (1 + u)) or beta (1 - u^-alpha) / alpha",
    )
    alpha: DivergenceAlpha | None = Field(default=None, description="alpha of the alpha-divergence")

    @model_validator(mode="after")
    def _alpha_is_used(self) -> Self:
        if (self.divergence == "alpha") != (self.alpha is not None):
            raise ValueError(
                "divergence alpha needs a setting `alpha` between 0 and 1"
                if self.alpha is None
                else f"alpha is {self.alpha:g}, but the divergence is {self.divergence}; set `divergence: alpha`"
            )
        return self


class DPOConfig(DivergenceLoss):
    """-(1 - s) log sigmoid(d) - s log sigmoid(-d) of the rewards' difference d: DPO, eq. 7 of arXiv:2305.18290; with
    label smoothing s, conservative DPO.
    """

    type: Literal["dpo"]
    label_smoothing: LabelSmoothing = Field(default=0.0, description="share of wrongly labelled pairs")


class RobustDPOConfig(DivergenceLoss):
    """(-(1 - s) log sigmoid(d) + s log sigmoid(-d)) / (1 - 2 s), unbiased if a share s of the labels is wrong,
    arXiv:2403.00409.
    """

    type: Literal["robust_dpo"]
    label_smoothing: RobustSmoothing = Field(description="share of wrongly labelled pairs")


class IPOConfig(ReferenceLoss):
    """(r_chosen - r_rejected - 1 / (2 beta))^2, eq. 17 of arXiv:2310.12036, which uses `logprobs: sum`."""

    type: Literal["ipo"]


class HingeConfig(DivergenceLoss):
    """max(0, 1 - d) of the rewards' difference d, SLiC's (arXiv:2305.10425) on log-prob ratios, arXiv:2309.06657."""

    type: Literal["hinge"]


class EXOConfig(DivergenceLoss):
    """Reverse KL from the labels, smoothed to (1 - s, s), to the softmax of the rewards, eq. 16 of arXiv:2402.00856."""

    type: Literal["exo"]
    label_smoothing: ExoSmoothing = Field(default=1e-3, description="probability of the rejected one in the labels")


class APOZeroConfig(ReferenceLoss):
    """(1 - sigmoid(chosen)) + sigmoid(rejected) of the rewards: raises the chosen and lowers the rejected one,
    arXiv:2408.06266.
    """

    type: Literal["apo_zero"]


class APODownConfig(ReferenceLoss):
    """sigmoid(chosen) + (1 - sigmoid(chosen - rejected)) of the rewards: lowers both, the rejected one more,
    arXiv:2408.06266. For a model that is better than its data."""

    type: Literal["apo_down"]


class SPPOConfig(ReferenceLoss):
    """(r_chosen - 1 / (2 beta))^2 + (r_rejected + 1 / (2 beta))^2, arXiv:2405.00675 with eta = 1 / beta."""

    type: Literal["sppo"]


class REBELConfig(ReferenceLoss):
    """(beta (r_chosen - r_rejected) - (R_chosen - R_rejected))^2 of the rewards R of the two completions, whose
    difference is the row's `margin`: REBEL with eta = 1 / beta, arXiv:2404.16767."""

    reads_margin: ClassVar[bool] = True

    type: Literal["rebel"]


class SimPOConfig(PreferenceLossConfig):
    """-log sigmoid(beta (m_chosen - m_rejected) - margin) of mean log-probs m per token, eq. 6 of arXiv:2405.14734."""

    type: Literal["simpo"]
    beta: PreferenceBeta = _beta(2.0, "a reward is beta times the mean log-prob of the tokens")
    margin: Coefficient = Field(default=1.0, description="minimum difference of the two rewards")


class ORPOConfig(PreferenceLossConfig):
    """Mean -log p per token of the chosen completion - beta log sigmoid(log odds ratio), eqs. 6 and 7 of
    arXiv:2403.07691; the odds are p / (1 - p) of p = exp(mean log-prob per token).
    """

    type: Literal["orpo"]
    beta: PreferenceBeta = _beta(0.1, "weight of the odds ratio beside the chosen completion's likelihood")


class CPOConfig(PreferenceLossConfig):
    """-log sigmoid(beta (log p_chosen - log p_rejected)) + mean -log p per token of the chosen completion,
    arXiv:2401.08417.
    """

    type: Literal["cpo"]
    beta: PreferenceBeta = _beta(0.1, "a reward is beta times the log-prob of the completion")


class NLLConfig(PreferenceLossConfig):
    """Mean -log p per token of the chosen completion, added to another loss: keeps its likelihood from falling."""

    type: Literal["nll"]


@dataclass(frozen=True, slots=True)
class PreferenceLossEntry:
    config: type[PreferenceLossConfig]
    implementation: str  # "package.module:Class", a preference_losses.base.PreferenceLoss; imported where it computes


def _entry(config: type[PreferenceLossConfig], place: str) -> PreferenceLossEntry:
    return PreferenceLossEntry(config, f"rlhf_core.losses.preference.{place}")


PREFERENCE_LOSSES: Table[PreferenceLossEntry] = Table("preference_losses", PreferenceLossEntry, {
    "dpo": _entry(DPOConfig, "dpo:DPO"),
    "robust_dpo": _entry(RobustDPOConfig, "robust_dpo:RobustDPO"),
    "ipo": _entry(IPOConfig, "ipo:IPO"),
    "hinge": _entry(HingeConfig, "hinge:Hinge"),
    "exo": _entry(EXOConfig, "exo:EXO"),
    "apo_zero": _entry(APOZeroConfig, "apo:APOZero"),
    "apo_down": _entry(APODownConfig, "apo:APODown"),
    "sppo": _entry(SPPOConfig, "sppo:SPPO"),
    "rebel": _entry(REBELConfig, "rebel:REBEL"),
    "simpo": _entry(SimPOConfig, "simpo:SimPO"),
    "orpo": _entry(ORPOConfig, "orpo:ORPO"),
    "cpo": _entry(CPOConfig, "cpo:CPO"),
    "nll": _entry(NLLConfig, "nll:NLL"),
})  # fmt: skip
