"""Names of training methods and settings in papers and other frameworks, and their spelling in a recipe."""

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
_LENGTHS = (
    "`rollout.max_length`, of prompt and completion together; the dataset's `on_long_row: drop` drops longer ones"
)
# Settings of sampling and RL in TRL, OpenRLHF, verl and vLLM.
_SETTINGS = {
    "beta": "`kl: {coefficient: …}` of the algorithm's block",
    "gpu_memory_utilization": "`rollout.memory_share`",
    "learning_rate": "`optimizer: {learning_rate: …}` of the algorithm's block",
    "max_completion_length": "`sampling.max_tokens`",
    "max_model_len": "`rollout.max_length`",
    "max_new_tokens": "`sampling.max_tokens`",
    "max_prompt_length": _LENGTHS,
    "num_generations": "`group_size` of the algorithm's block",
    "n_samples_per_prompt": "`group_size` of the algorithm's block",
    "vllm_gpu_memory_utilization": "`rollout.memory_share`",
    "vllm_max_model_length": "`rollout.max_length`",
}


def setting_hint(name: str) -> str:
    """Return the place of a setting of a stage that samples, by its name elsewhere; empty for another name."""
    return f"here it is {_SETTINGS[name]}" if name in _SETTINGS else ""


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
