"""Compatibility of each stage with its models: whether engines can serve them, and readers and judges their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from pkgutil import resolve_name

from rlhf_core.config.base import Dtype
from rlhf_core.config.engines.rollout import ENGINES
from rlhf_core.config.rewards.rewards import ModelReward
from rlhf_core.config.stages.base import StageConfig
from rlhf_core.config.stages.token_form import TokenForm
from rlhf_core.graph.drafting import Draft
from rlhf_core.models.folders.readers import (
    STORED_LABELS,
    STORED_SEPARATOR,
    judge_problem,
    reader_problem,
    scale_problem,
    separator_problem,
)
from rlhf_core.preflight.lengths import tokenizer_of
from rlhf_core.preflight.model import BaseModel
from rlhf_core.preflight.stages.tokens import same_tokens


def check_models(nodes: Mapping[str, Draft], models: Mapping[str, BaseModel], root: Path) -> Iterator[str]:
    """Yield the problems of all stages with their models. models: available base models, by node."""
    for node in nodes.values():
        for problem in _problems(node, nodes, models, root):
            yield f"{node.section}.{problem}"


def _problems(node: Draft, nodes: Mapping[str, Draft], models: Mapping[str, BaseModel], root: Path) -> Iterator[str]:
    config, model = node.config, models.get(node.name)
    if model is None:
        return
    if config.engines is not None:
        check = resolve_name(ENGINES[config.engines.type].checks)
        unserved = check(model.settings, model.class_settings, config.engines, _dtype(nodes, node.name))
        yield from (f"rollout: {problem}" for problem in unserved)
    yield from _readers(config, node, models, root)
    if config.engines is not None:
        yield from _judges(config, config.engines.max_length, node, nodes, models, root)


def _dtype(nodes: Mapping[str, Draft], name: str) -> Dtype | None:
    """Return the dtype of the model that the node trains, makes or serves; None if not known here."""
    node = nodes[name]
    if node.config.model_dtype is not None or "model" not in node.inputs:
        return node.config.model_dtype
    return _dtype(nodes, node.inputs["model"])


def _readers(config: StageConfig, node: Draft, models: Mapping[str, BaseModel], root: Path) -> Iterator[str]:
    """Check the available models that read the tokens of the stage's own."""
    for setting, (name, advice) in config.token_readers.items():
        reader = models.get(node.inputs[name])
        same = None if reader is None else same_tokens(reader, models[node.name], root)
        if reader is not None and same is not None:
            for bound, tokens in config.sequence_lengths().items():
                problem = reader_problem(reader.settings, bound, tokens, reads_tokens=same)
                if problem is not None:
                    yield f"{setting}: {problem}: {advice}"


def _judges(
    config: StageConfig,
    tokens: int,
    node: Draft,
    nodes: Mapping[str, Draft],
    models: Mapping[str, BaseModel],
    root: Path,
) -> Iterator[str]:
    """Yield the problems of reward models. tokens: length of the longest judged sequence."""
    policy = models[node.name]
    for judged in config.judges():
        reward = judged.judge
        if not isinstance(reward, ModelReward):
            continue
        judge = node.inputs[f"{judged.setting}.model"]
        model = models.get(judge)
        if model is None:
            continue
        settings = {**model.settings, **_form(nodes[judge].config)}
        problem = None
        if "model" not in nodes[judge].inputs:  # one that was trained here has a scale
            problem = scale_problem(settings, reward)
            problem = problem or separator_problem(settings.get(STORED_SEPARATOR), reward)
        same = same_tokens(model, policy, root)
        if problem is None and same is not None:
            reads = same and _template(model, root) == _template(policy, root)
            problem = judge_problem(settings, reward, reads_tokens=reads, tokens=tokens)
        if problem is not None:
            yield f"{judged.setting}: {problem}"


def _form(config: StageConfig) -> dict[str, object]:
    """Return what a stage adds to the config.json of a process reward model in token form; empty for others."""
    if not isinstance(config, TokenForm) or not config.in_token_form:
        return {}
    return {STORED_SEPARATOR: config.separator, STORED_LABELS: config.labels}


def _template(model: BaseModel, root: Path) -> str:
    return str(tokenizer_of(model, root).chat_template)
