"""Environments before anything runs: can what they say be said, and does it fit?"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlhf_core.config.environments import AnyEnvironment, EnvironmentConfig, Retry, ToolsEnvironment
from rlhf_core.config.stage import EnginesConfig
from rlhf_core.data.chat import Tokenizer, encode_prompt
from rlhf_core.data.feedback import encode_feedback, require_turns_follow
from rlhf_core.errors import ConversationError, RecipeError, StageError
from rlhf_core.pipeline.drafting import Draft
from rlhf_core.pipeline.preflight_lengths import tokenizer_of
from rlhf_core.pipeline.preflight_model import BaseModel
from rlhf_core.pipeline.samples import Located

_TOKENISED_ROWS = 1000  # of each dataset, those with the fewest characters


def environment_notes(nodes: Mapping[str, Draft], samples: Mapping[str, list[Located]]) -> Iterator[str]:
    """One sentence for each environment whose answers no reply can follow, or which no row that could be read names."""
    for place, environment, node in _environments(nodes):
        datasets = [setting.names[0] for setting in node.input_settings if setting.path == "dataset" and setting.names]
        are_known = any(samples.get(name) for name in datasets)
        if ".choices." in place and are_known and not _rows_of(environment, node, samples):
            yield f"{place}: no row that could be read names it, so that it may never be played"
        if environment.max_turns > 1:
            continue
        if isinstance(environment, Retry):
            yield f"{place}: max_turns is 1, so `feedback` is never said: every reply ends its episode"
        if isinstance(environment, ToolsEnvironment):
            yield f"{place}: max_turns is 1, so the policy never reads what a tool returns"


def check_feedback(
    nodes: Mapping[str, Draft],
    samples: Mapping[str, list[Located]],
    models: Mapping[str, BaseModel],
    root: Path,
) -> Iterator[str]:
    """One sentence for each environment `retry` whose feedback leaves no room for another reply behind any prompt.

    samples: the rows of each dataset that could be read. models: by node, of those whose model is at hand.
    """
    for place, environment, node in _environments(nodes):
        model = models.get(node.name)
        if not isinstance(environment, Retry) or environment.max_turns == 1 or model is None:
            continue
        assert isinstance(node.config, EnginesConfig)
        tokenizer = tokenizer_of(model, root)
        rows = _rows_of(environment, node, samples)
        problem = _feedback_problem(environment, rows, tokenizer, node.config.rollout.max_length)
        if problem is not None:
            yield f"{place}.feedback: {problem}"


def _environments(nodes: Mapping[str, Draft]) -> Iterator[tuple[str, EnvironmentConfig, Draft]]:
    """Each that episodes may be played in, with its setting and its stage."""
    for node in nodes.values():
        for judged in node.config.judges():
            if isinstance(judged.judge, AnyEnvironment):
                for part, environment in judged.judge.parts().items():
                    yield ".".join(filter(None, (node.section, judged.setting, part))), environment, node


def _rows_of(environment: EnvironmentConfig, node: Draft, samples: Mapping[str, list[Located]]) -> list[Located]:
    """The rows that could be read whose episodes are played in the environment."""
    datasets = {setting.path: setting.names[0] for setting in node.input_settings if setting.names}
    rows = []
    for judged in node.config.judges():
        if isinstance(judged.judge, AnyEnvironment):
            for located in samples.get(datasets[judged.dataset], []):
                try:
                    own = judged.judge.of_row(located[1]) is environment
                except RecipeError:  # `check_rewards` says that the row names none
                    own = False
                rows += [located] if own else []
    return rows


def _feedback_problem(environment: Retry, rows: list[Located], tokenizer: Tokenizer, room: int) -> str | None:
    feedback = [{"role": "user", "content": environment.feedback}]
    asked = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    try:
        require_turns_follow(tokenizer)
    except StageError:  # `check_models` says so
        return None
    try:
        said = len(encode_feedback(tokenizer, asked, feedback))
    except StageError as error:
        return str(error)
    shortest = None
    sizes = [len(str(row["prompt"])) for _, row in rows]
    for index in heapq.nsmallest(_TOKENISED_ROWS, range(len(rows)), key=sizes.__getitem__):
        row = rows[index][1]
        try:
            tokens = len(encode_prompt(tokenizer, row["prompt"], row.get("tools")))
        except ConversationError:  # `check_lengths` says so
            continue
        shortest = tokens if shortest is None else min(shortest, tokens)
    # A reply has at least the token that ends it, and another must have room.
    if shortest is None or shortest + 1 + said < room:
        return None
    return (
        f"it has {said} tokens with what the chat template writes around it, and the shortest prompt has {shortest}, "
        f"so that rollout.max_length={room} never has room for another reply: shorten it, or raise rollout.max_length"
    )
