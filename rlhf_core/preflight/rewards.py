"""Preflight checks of rewards and environments: the user's files, and required columns."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_core.config.environments.environments import AnyEnvironment
from rlhf_core.config.rewards.rewards import FunctionReward, RewardConfig, VerifierReward
from rlhf_core.data.sources.base import Located
from rlhf_core.data.sources.reasoning import check_task
from rlhf_core.errors import RecipeError, RewardError
from rlhf_core.graph.drafting import Draft
from rlhf_core.preflight.code import UserCode
from rlhf_core.rewards.code_tests import read_tests


def judging_functions(nodes: Mapping[str, Draft]) -> list[tuple[str, UserCode]]:
    """Return the user code of rewards and environments, each with its setting."""
    functions: list[tuple[str, UserCode]] = []
    for node in nodes.values():
        for judged in node.config.judges():
            judge = judged.judge
            place = f"{node.section}.{judged.setting}"
            if isinstance(judge, FunctionReward):
                functions.append((place, judge))
            elif isinstance(judge, AnyEnvironment):
                for part, environment in judge.parts().items():
                    for below, code in environment.code().items():
                        functions.append((".".join(filter(None, (place, part, below))), code))
    return functions


def check_rewards(nodes: Mapping[str, Draft], samples: dict[str, list[Located]]) -> list[str]:
    """Return the problems of rewards, scorers and environments. samples: readable rows of each dataset."""
    problems = []
    for node in nodes.values():
        datasets = {setting.path: setting.names[0] for setting in node.input_settings if setting.names}
        for judged in node.config.judges():
            dataset = datasets[judged.dataset] if judged.dataset else ""
            try:
                _check_columns(judged.judge, samples.get(dataset, []), dataset)
            except RecipeError as error:
                problems.append(f"{node.section}.{judged.setting}: {error}")
    return list(dict.fromkeys(problems))


def _check_columns(judged_by: RewardConfig | AnyEnvironment, rows: list[Located], dataset: str) -> None:
    tasks: set[str] = set()
    for where, row in rows:
        try:
            judge = judged_by.of_row(row) if isinstance(judged_by, AnyEnvironment) else judged_by
        except RecipeError as error:
            raise RecipeError(f"{error} ({where} in `data.{dataset}`)") from error
        lacking = [column for column in judge.row_columns if row.get(column, "") == ""]
        if lacking:
            name = f"the verifier `{judge.kind}`" if isinstance(judge, VerifierReward) else f"`{judge.type}`"
            raise RecipeError(f"{name} needs the column `{lacking[0]}`, which `data.{dataset}` lacks at {where}")
        if isinstance(judge, VerifierReward) and judge.verifier.runs_code:
            try:
                read_tests(row)
            except RewardError as error:
                raise RecipeError(f"{where} in `data.{dataset}`: {error}") from error
        if "task" in judge.row_columns and row["task"] not in tasks:
            tasks.add(row["task"])
            try:
                check_task(row["task"], {})
            except RecipeError as error:
                raise RecipeError(f"`task` of {where} in `data.{dataset}`: {error}") from error
