"""Episodes that a program of the user plays: its result is verified against the record of its calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rlhf_core.environments.agents.program import Program
from rlhf_core.episodes.calls import Calls, chosen, joined, trajectory_of
from rlhf_core.episodes.episode import EpisodeRules
from rlhf_core.episodes.rounds import Ask
from rlhf_core.episodes.shown_images import row_with_data_urls
from rlhf_core.errors import EpisodeError
from rlhf_core.rewards.base import fits, written
from rlhf_core.types import Prompt, Trajectory


async def play_program(
    program: Program,
    prompt: Prompt,
    rules: EpisodeRules,
    ask: Ask,
    *,
    seed: Callable[[int], int],
    environment_seed: int,
) -> Trajectory:
    """Play an episode. seed: returns the seed of each call, by its number.

    Raises EpisodeError, with the row, if it fails.
    """
    calls = Calls(rules, seed, ask)
    try:
        outcome = await program.run(row_with_data_urls(prompt), environment_seed, calls)
        if not calls.completed:
            raise EpisodeError("it ended without a reply of the policy, so there is nothing to train")
        reward = _number(outcome.reward, "the reward")
        score = None if outcome.score is None else _number(outcome.score, "the score")
        if score is not None and not 0 <= score <= 1:
            raise EpisodeError(f"it returned the score {score:g}, expected 0 to 1")
        metrics = _metrics(outcome.metrics)
        trained = [call for call in calls.completed if call.trained]
        if not trained:
            raise EpisodeError(
                f"all of its {len(calls.completed)} replies were sampled under a structure, from another distribution "
                "than the policy's, so there is nothing to train"
            )
        sequences = joined(trained) if outcome.sequences is None else chosen(trained, outcome.sequences)
    except EpisodeError as error:
        num_replies = len(calls.completed)
        raise EpisodeError(
            f"environment {rules.environment}, row {prompt.id}, after {num_replies} replies: {error}"
        ) from error
    untrained = [call for call in calls.completed if not call.trained]
    made = trajectory_of(sequences, prompt, rules.text, reward, untrained)
    return replace(made, score=score, environment_metrics={**metrics, **made.environment_metrics})


def _metrics(returned: Any) -> dict[str, float]:
    """Return the metrics of a program. Raises EpisodeError if they are no numbers by name."""
    if not isinstance(returned, Mapping | None):
        raise EpisodeError(f"it returned the metrics {returned!r:.200}, expected numbers by name")
    return {str(name): _number(value, f"the metric {name}") for name, value in (returned or {}).items()}


def _number(value: Any, what: str) -> float:
    """Return a number that a program returned. Raises EpisodeError unless it is finite in float32."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
        shown = written(value) if isinstance(value, int | float) else repr(value)
        raise EpisodeError(f"it returned {what} {shown:.200}, expected a finite number")
    return float(value)
