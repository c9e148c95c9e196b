"""The stage `score` before anything runs: columns of prompts, and what its reward models can read."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_core.chat.encoding import ended_completion
from rlhf_core.chat.sampled_tokens import reply_of
from rlhf_core.config.stages.score import ScoreConfig
from rlhf_core.errors import ConversationError, StageError
from rlhf_core.graph.drafting import Draft
from rlhf_core.models.folders.readers import STORED_SEPARATOR, reader_problem, scale_problem, separator_problem
from rlhf_core.preflight.lengths import tokenizer_of
from rlhf_core.preflight.model import BaseModel
from rlhf_core.preflight.stages.context import CheckContext

_ROWS = 200  # of the dataset, which are tokenised


def check(config: ScoreConfig, node: Draft, context: CheckContext) -> Iterator[str]:
    for name, reward in config.rewards.items():
        if reward.row_columns and config.prompts is None and (config.dataset or config.pairs) not in context.samples:
            yield (
                f"{node.section}.rewards.{name}: it reads the column `{reward.row_columns[0]}`, which completions have "
                f"not: set {node.section}.prompts to the dataset of their prompts"
            )
    for name, reward in config.model_rewards.items():
        judge = node.inputs[f"rewards.{name}.model"]
        model = context.models.get(judge)
        if model is None:
            continue
        assert config.max_length is not None
        problem = reader_problem(model.settings, "max_length", config.max_length, reads_tokens=True)
        if problem is None and "model" not in context.nodes[judge].inputs:  # one that was trained here has a scale
            problem = scale_problem(model.settings, reward)
            problem = problem or separator_problem(model.settings.get(STORED_SEPARATOR), reward)
        if problem is None and config.conversations is None:
            problem = _unreadable(config, model, context)
        yield from () if problem is None else (f"{node.section}.rewards.{name}: {problem}",)


def _unreadable(config: ScoreConfig, model: BaseModel, context: CheckContext) -> str | None:
    """Return the first completion's problem for the reward model; None if there is none, or no tokenizer at hand."""
    assert config.max_length is not None
    rows = context.samples.get(config.dataset or config.pairs or "", [])[:_ROWS]
    if not rows:
        return None
    try:
        tokenizer = tokenizer_of(model, context.root)
        for where, row in rows:
            for entry in row["completions"]:
                sampled = reply_of(entry, row.get("tokenizer"))
                ids, _ = ended_completion(tokenizer, row["prompt"], entry["text"], row.get("tools"), sampled=sampled)
                if len(ids) > config.max_length:
                    return f"{where}: a completion has {len(ids)} tokens, more than max_length={config.max_length}"
    except ConversationError as error:
        return f"{where}: {error}"
    except StageError as error:
        return str(error)
    return None
