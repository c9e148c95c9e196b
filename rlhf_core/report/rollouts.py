"""Logged rollouts, as the pages and the terminal show them: order of prompts, advantages, tokens with their values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rlhf_core.artifacts.logged_rollouts import LoggedCompletion, LoggedGroup, LoggedImage, LoggedSequence
from rlhf_core.errors import shortened

_DIGITS = 6  # after the point, of weights and shaping, which are differences of rounded numbers
_LONGEST_TOKEN = 200  # characters
_PROMPT_TOKENS = 16  # shown of a prompt whose sequence does not fit


def tokens_of(sequence: LoggedSequence) -> list[dict[str, Any]]:
    """Return each token of a sequence with its values; those that are not trained have only a text."""
    tokens: list[dict[str, Any]] = []
    trained = 0
    for text, token_id, is_trained in zip(sequence.texts, sequence.token_ids, sequence.trained, strict=True):
        token: dict[str, Any] = {"text": text, "id": token_id}
        if is_trained:
            token["engine"] = sequence.engine_logprobs[trained]
            token["advantage"] = sequence.advantages[trained]
            for name, values in (
                ("trainer", sequence.trainer_logprobs),
                ("entropy", sequence.entropies),
                ("reference", sequence.reference_logprobs),
                ("value", sequence.values),
                ("step reward", sequence.step_rewards),
            ):
                if values is not None:
                    token[name] = values[trained]
            trained += 1
        tokens.append(token)
    return tokens


def columns_of(tokens: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return tokens as columns, as tokens.js reads them; null where a token has no such value."""
    names = dict.fromkeys(name for token in tokens for name in token)
    return {name: [_short(token.get(name)) for token in tokens] for name in names}


def _short(value: Any) -> Any:
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return float(f"{value:.4g}")
    return shortened(value, _LONGEST_TOKEN) if isinstance(value, str) else value


def mean_advantage(completion: LoggedCompletion) -> float:
    values = [value for each in completion.sequences for value in each.advantages if value is not None]
    return fmean(values) if values else 0.0


def mean_ratio(completion: LoggedCompletion) -> float | None:
    """Return the geometric mean of the trainer's probabilities over the engine's, as the histogram of ratios has it;
    None if the step has no log-probs of the trainer.
    """
    differences = [
        trainer - engine
        for each in completion.sequences
        for engine, trainer in zip(each.engine_logprobs, each.trainer_logprobs or (), strict=False)
        if engine is not None and trainer is not None
    ]
    return exponential(fmean(differences)) if differences else None


def exponential(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


@dataclass(frozen=True, slots=True)
class RewardTerm:
    """A reward of a completion, with its part of the total."""

    name: str
    value: float | None
    weight: float | None  # None: not known, as of a value of 0
    contribution: float | None


@dataclass(frozen=True, slots=True)
class RewardSum:
    """The rewards of a completion as they add up to its total."""

    terms: Sequence[RewardTerm]
    shaping: float | None  # penalties of length, clips and normalisation; None: not known
    total: float | None
    details: Mapping[str, float | None]

    @property
    def is_weighted(self) -> bool:
        return any(term.contribution is not None for term in self.terms)


def reward_sum(completion: LoggedCompletion) -> RewardSum:
    """Return how a completion's reward is made; the contributions of logs of earlier releases are not known."""
    terms = []
    for name, value in completion.rewards.items():
        contribution = completion.weighted.get(name)
        weight = None if not value or contribution is None else round(contribution / value, _DIGITS)
        terms.append(RewardTerm(name, value, weight, contribution))
    known = [each for each in completion.weighted.values() if each is not None]
    shaping = None
    if known and len(known) == len(completion.weighted) and completion.reward is not None:
        shaping = round(completion.reward - sum(known), _DIGITS)
    return RewardSum(terms, shaping, completion.reward, completion.details)


@dataclass(frozen=True, slots=True)
class TokenStrip:
    """The tokens of a sequence as tokens.js reads them."""

    columns: Mapping[str, Sequence[Any]]
    left_out: int  # tokens
    images: Sequence[LoggedImage]


@dataclass(frozen=True, slots=True)
class CompletionView:
    """A logged completion as pages show it."""

    index: int  # in its group
    reward: float | None
    rewards: RewardSum
    environment: Mapping[str, float | None]
    advantage: float
    shade: str
    sampled_tokens: int
    turns: int
    finish_reason: str
    messages: Sequence[Mapping[str, Any]]  # that it answers; empty: the prompt
    text: str
    sequences: Sequence[TokenStrip]


def completion_view(group: LoggedGroup, index: int, most_tokens: int | None = None) -> CompletionView:
    """Return a completion of a group. most_tokens: of each sequence; the others are left out."""
    completion = group.completions[index]
    return CompletionView(
        index, completion.reward, reward_sum(completion), completion.environment, mean_advantage(completion),
        shade(group, completion), completion.sampled_tokens, completion.turns, completion.finish_reason,
        list(completion.messages or ()), completion.text,
        [_strip(sequence, most_tokens) for sequence in completion.sequences],
    )  # fmt: skip


def _strip(sequence: LoggedSequence, most: int | None) -> TokenStrip:
    """Return the strip of a sequence. Where not all fit, the last few tokens of its prompt come first."""
    tokens = tokens_of(sequence)
    if most is None or len(tokens) <= most:
        return TokenStrip(columns_of(tokens), 0, sequence.images)
    first = max(0, next((i for i, trained in enumerate(sequence.trained) if trained), 0) - _PROMPT_TOKENS)
    shown = tokens[first : first + most]
    return TokenStrip(columns_of(shown), len(tokens) - len(shown), ())


def rewards_of(group: LoggedGroup) -> list[float]:
    """Return the finite rewards of a prompt's completions."""
    return [each.reward for each in group.completions if each.reward is not None]


def lowest_first(groups: tuple[LoggedGroup, ...]) -> list[tuple[int, LoggedGroup]]:
    """Return prompts with their indices by their lowest reward, then by their mean."""

    def lowest_then_mean(item: tuple[int, LoggedGroup]) -> tuple[float, float]:
        rewards = rewards_of(item[1]) or [math.inf]
        return min(rewards), fmean(rewards)

    return sorted(enumerate(groups), key=lowest_then_mean)


def lowest_reward_first(group: LoggedGroup) -> list[tuple[int, LoggedCompletion]]:
    """Return the completions of a prompt with their indices by their reward; those without one are the last."""
    rewards = [math.inf if each.reward is None else each.reward for each in group.completions]
    return sorted(enumerate(group.completions), key=lambda item: rewards[item[0]])


def best_first(group: LoggedGroup) -> list[tuple[int, LoggedCompletion]]:
    """Return the completions of a prompt with their indices, the highest advantage first."""
    return sorted(enumerate(group.completions), key=lambda item: -mean_advantage(item[1]))


def shade(group: LoggedGroup, completion: LoggedCompletion) -> str:
    """Return how a completion's reward compares with those of its group: `high`, `low`, or nothing."""
    rewards = rewards_of(group)
    if completion.reward is None or min(rewards) == max(rewards):
        return ""
    return "high" if completion.reward == max(rewards) else "low" if completion.reward == min(rewards) else ""


def last_message(group: LoggedGroup) -> str:
    """Return the text of a prompt's last message, or its id if it has none."""
    content = group.prompt[-1].get("content") if group.prompt else None
    return content if isinstance(content, str) else group.id
