"""Rewards before anything runs: the user's files, the patterns, the columns that a verifier reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlhf_core.config.rewards import FunctionReward, RewardConfig, VerifierReward
from rlhf_core.data.user_code import check_function
from rlhf_core.errors import RecipeError
from rlhf_core.pipeline.outline import Draft
from rlhf_core.pipeline.preflight_data import Located

_COLUMNS = {"exact": ("answer",), "reasoning_gym": ("task", "metadata")}


def check_rewards(nodes: Mapping[str, Draft], samples: dict[str, list[Located]], root: Path) -> list[str]:
    """samples: rows of each dataset that could be read."""
    problems = []
    for node in nodes.values():
        datasets = {reference.path: reference.names[0] for reference in node.references if reference.names}
        for judged in node.config.rewards():
            dataset = datasets[judged.dataset]
            try:
                _check(judged.reward, samples.get(dataset, []), dataset, root)
            except RecipeError as error:
                problems.append(f"{node.section}.{judged.setting}: {error}")
    return list(dict.fromkeys(problems))


def _check(reward: RewardConfig, rows: list[Located], dataset: str, root: Path) -> None:
    match reward:
        case FunctionReward():
            check_function(root / reward.path, reward.function, reward.path)
        case VerifierReward():
            for where, row in rows:
                lacking = [column for column in _COLUMNS[reward.kind] if column not in row]
                if lacking:
                    raise RecipeError(
                        f"the verifier `{reward.kind}` needs the column `{lacking[0]}`, "
                        f"which `data.{dataset}` lacks at {where}"
                    )
        case _:
            pass  # a reward model is made by the run, a server is where the jobs are
