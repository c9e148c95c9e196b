"""Table of RL algorithms. A new one is a file in rlhf_core/algorithms, its config class, and one line here."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_core.config.plugins import Table
from rlhf_core.config.rl.algorithms import (
    AlgorithmConfig,
    CISPOConfig,
    DAPOConfig,
    DPPOConfig,
    DrGRPOConfig,
    GDPOConfig,
    GMPOConfig,
    GRPOConfig,
    GSPOConfig,
    OnPolicyDistillationConfig,
    PPOConfig,
    ReinforcePlusPlusBaselineConfig,
    ReinforcePlusPlusConfig,
    RLOOConfig,
    SAPOConfig,
)
from rlhf_core.errors import did_you_mean


@dataclass(frozen=True, slots=True)
class AlgorithmEntry:
    block: str  # key of its settings in `rl`
    config: type[AlgorithmConfig]
    implementation: str  # "package.module:Class", an Algorithm; imported only where it computes


ALGORITHMS: Table[AlgorithmEntry] = Table("algorithms", AlgorithmEntry, {
    "ppo": AlgorithmEntry("ppo", PPOConfig, "rlhf_core.algorithms.ppo:PPO"),
    "reinforce++": AlgorithmEntry(
        "reinforce_plus_plus", ReinforcePlusPlusConfig, "rlhf_core.algorithms.reinforce_plus_plus:ReinforcePlusPlus"
    ),
    "reinforce++-baseline": AlgorithmEntry(
        "reinforce_plus_plus_baseline", ReinforcePlusPlusBaselineConfig,
        "rlhf_core.algorithms.reinforce_plus_plus_baseline:ReinforcePlusPlusBaseline",
    ),
    "rloo": AlgorithmEntry("rloo", RLOOConfig, "rlhf_core.algorithms.rloo:RLOO"),
    "grpo": AlgorithmEntry("grpo", GRPOConfig, "rlhf_core.algorithms.grpo:GRPO"),
    # These two are GRPO with other settings.
    "dr-grpo": AlgorithmEntry("dr_grpo", DrGRPOConfig, "rlhf_core.algorithms.grpo:GRPO"),
    "dapo": AlgorithmEntry("dapo", DAPOConfig, "rlhf_core.algorithms.grpo:GRPO"),
    "gdpo": AlgorithmEntry("gdpo", GDPOConfig, "rlhf_core.algorithms.gdpo:GDPO"),
    "gspo": AlgorithmEntry("gspo", GSPOConfig, "rlhf_core.algorithms.gspo:GSPO"),
    "on-policy-distillation": AlgorithmEntry(
        "on_policy_distillation", OnPolicyDistillationConfig,
        "rlhf_core.algorithms.on_policy_distillation:OnPolicyDistillation",
    ),
    "cispo": AlgorithmEntry("cispo", CISPOConfig, "rlhf_core.algorithms.cispo:CISPO"),
    "gmpo": AlgorithmEntry("gmpo", GMPOConfig, "rlhf_core.algorithms.gmpo:GMPO"),
    "sapo": AlgorithmEntry("sapo", SAPOConfig, "rlhf_core.algorithms.sapo:SAPO"),
    "dppo": AlgorithmEntry("dppo", DPPOConfig, "rlhf_core.algorithms.dppo:DPPO"),
})  # fmt: skip


def known_algorithm(name: str) -> str:
    """Return `name`. Raises ValueError, with the nearest name, if there is no such algorithm."""
    if name not in ALGORITHMS:
        raise ValueError(
            f"there is no algorithm `{name}`{did_you_mean(name, ALGORITHMS)}; there are {', '.join(ALGORITHMS)}"
        )
    return name
