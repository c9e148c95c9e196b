"""Episodes that a program of the user plays: its result is verified against the record of its calls."""

from __future__ import annotations

from collections.abc import Callable

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
        reward = outcome.reward
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not fits(reward):
            shown = written(reward) if isinstance(reward, int | float) else repr(reward)
            raise EpisodeError(f"it returned the reward {shown:.200}, expected a finite number")
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
    return trajectory_of(sequences, prompt, rules.text, float(reward), untrained)
