"""Names of training methods in papers and other frameworks, and their spelling in a recipe."""

from __future__ import annotations

from rlhf_core.config.rl.algorithm_table import ALGORITHMS
from rlhf_core.config.stages.preference_losses import PREFERENCE_LOSSES
from rlhf_core.stages.table import STAGES

# Names of elsewhere, written with `_`, of what has another name here.
_LOSSES = {"cdpo": "dpo", "rdpo": "robust_dpo", "slic": "hinge", "slic_hf": "hinge", "apo": "apo_zero"}
_ALGORITHMS = {"gae": "ppo", "reinforce": "reinforce++", "reinforce_baseline": "reinforce++-baseline"}
_STAGES = {
    "pt": "pretrain",
    "cpt": "pretrain",
    "rm": "reward_model",
    "prm": "process_reward_model",
    "gkd": "distillation",
    "kd": "distillation",
    "distill": "distillation",
    "raft": "best_of_n",
    "rejection_sampling": "best_of_n",
}


def method_hint(name: str) -> str:
    """Return a sentence with the recipe lines for the method `name`; empty if there is no such method."""
    plain = name.lower().replace("-", "_")
    loss = _LOSSES.get(plain, plain)
    if loss in PREFERENCE_LOSSES:
        line = f"preference: {{dataset: NAME, losses: {{{loss}: {{type: {loss}}}}}, …}}"
        return f"`{name}` is a loss of the stage `preference`: write `{line}`"
    wanted = _ALGORITHMS.get(plain, plain).replace("-", "_")
    for algorithm, entry in ALGORITHMS.items():
        if wanted in (algorithm.replace("-", "_"), entry.block):
            line = f"rl: {{algorithm: {algorithm}, {entry.block}: {{…}}, …}}"
            return f"`{name}` is an algorithm of the stage `rl`: write `{line}`"
    stage = _STAGES.get(plain, plain)
    if plain in _STAGES or (stage in STAGES and STAGES[stage].runs == "actors"):
        return f"`{name}` is a stage of its own: write `{stage}: {{…}}` beside `base`"
    return ""
