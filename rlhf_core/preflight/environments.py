"""Preflight checks of environments: whether the template renders their messages, and whether these fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from rlhf_core.chat.feedback import require_results_follow, require_turns_follow
from rlhf_core.config.environments.environments import AnyEnvironment, EnvironmentConfig, Retry, ToolsEnvironment
from rlhf_core.data.sources.base import Located
from rlhf_core.errors import RecipeError, StageError
from rlhf_core.graph.drafting import Draft
from rlhf_core.preflight.lengths import tokenizer_of
from rlhf_core.preflight.model import BaseModel


def environment_notes(nodes: Mapping[str, Draft], samples: Mapping[str, list[Located]]) -> Iterator[str]:
    """Yield a note for each environment whose messages no reply can follow, or that no readable row names."""
    for place, environment, node in _environments(nodes):
        datasets = [setting.names[0] for setting in node.input_settings if setting.path == "dataset" and setting.names]
        are_known = any(samples.get(name) for name in datasets)
        if ".choices." in place and are_known and not _rows_of(environment, node, samples):
            yield f"{place}: no row that could be read names it, so it may never be played"
        if environment.max_turns > 1:
            continue
        if isinstance(environment, Retry):
            yield f"{place}: max_turns is 1, so `feedback` is never said: every reply ends its episode"
        if isinstance(environment, ToolsEnvironment):
            yield f"{place}: max_turns is 1, so the policy never reads what a tool returns"


def check_turns(nodes: Mapping[str, Draft], models: Mapping[str, BaseModel], root: Path) -> Iterator[str]:
    """Yield a problem for each environment whose turns the model's chat template cannot render.

    models: available models, by node.
    """
    for node in nodes.values():
        model = models.get(node.name)
        for judged in node.config.judges():
            environment = judged.judge
            if model is None or not isinstance(environment, AnyEnvironment) or not environment.appends_turns:
                continue
            try:
                require_turns_follow(tokenizer_of(model, root))
                if environment.calls_tools:
                    require_results_follow(tokenizer_of(model, root))
            except StageError as error:
                yield f"{node.section}.{judged.setting}: {error}"


def _environments(nodes: Mapping[str, Draft]) -> Iterator[tuple[str, EnvironmentConfig, Draft]]:
    """Yield each environment of episodes, with its setting and its stage."""
    for node in nodes.values():
        for judged in node.config.judges():
            if isinstance(judged.judge, AnyEnvironment):
                for part, environment in judged.judge.parts().items():
                    yield ".".join(filter(None, (node.section, judged.setting, part))), environment, node


def _rows_of(environment: EnvironmentConfig, node: Draft, samples: Mapping[str, list[Located]]) -> list[Located]:
    """Return the readable rows whose episodes use the environment."""
    datasets = {setting.path: setting.names[0] for setting in node.input_settings if setting.names}
    rows = []
    for judged in node.config.judges():
        if isinstance(judged.judge, AnyEnvironment):
            for located in samples.get(datasets[judged.dataset], []):
                try:
                    is_own = judged.judge.of_row(located[1]) is environment
                except RecipeError:  # `check_rewards` reports that the row names none
                    is_own = False
                rows += [located] if is_own else []
    return rows
