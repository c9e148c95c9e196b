"""Sampling of completions from engines, greedily and at random, and scoring of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product

from rlhf_core.config.engines.rollout import SamplingConfig
from rlhf_core.episodes.rollouter import Start
from rlhf_core.errors import RewardError
from rlhf_core.evaluation.summary import Answered, ScoredCompletion
from rlhf_core.rewards import TrajectoryReward
from rlhf_core.training.randomness import derived_seed
from rlhf_core.types import Prompt, Trajectory


def answer(
    prompts: Sequence[Prompt],
    play: Callable[[Sequence[Start], SamplingConfig], list[Trajectory]],
    scorers: Mapping[str, TrajectoryReward],
    *,
    sampling: SamplingConfig,
    samples: int,
    seed: int,
    first: int = 0,
    progress: Callable[[str], None] = lambda phase: None,
) -> list[Answered]:
    """Sample one greedy and `samples` random completions of every prompt, and score each with every scorer.

    The same seed gives each sample of a prompt the same random numbers, so that two models can be compared.
    play: of a Rollouter. first: index of the first of `prompts` in its dataset. progress: called with the name of what
    is done next.
    """

    def starts(count: int) -> list[Start]:
        each = product(enumerate(prompts, first), range(count))
        return [
            Start(
                prompt,
                partial(_request_seed, seed, index, sample),
                derived_seed(seed, f"environment: prompt {index}, sample {sample}"),
            )
            for (index, prompt), sample in each
        ]

    progress("greedy")
    greedy = play(starts(1), SamplingConfig(temperature=0.0, max_tokens=sampling.max_tokens, stop=sampling.stop))
    progress("sampled")
    sampled = play(starts(samples), sampling)
    # Grouped by prompt, the greedy completion first.
    trajectories: list[Trajectory] = []
    for index, trajectory in enumerate(greedy):
        trajectories += [trajectory, *sampled[index * samples : (index + 1) * samples]]
    progress("scores")
    scored = _score(trajectories, scorers)
    each = samples + 1
    answered = []
    for index, prompt in enumerate(prompts):
        of_greedy, *others = scored[index * each : (index + 1) * each]
        answered.append(Answered(prompt.id, str(prompt.row.get("task") or "all"), of_greedy, tuple(others)))
    return answered


def _request_seed(seed: int, prompt: int, sample: int, turn: int) -> int:
    # Single replies keep the seed that they had before there were turns.
    later = f", turn {turn}" if turn else ""
    return derived_seed(seed, f"evaluation: prompt {prompt}, sample {sample}{later}")


def _score(trajectories: Sequence[Trajectory], scorers: Mapping[str, TrajectoryReward]) -> list[ScoredCompletion]:
    scores = {name: _scores(name, scorer, trajectories) for name, scorer in scorers.items()}
    return [
        ScoredCompletion(
            text=trajectory.completion,
            tokens=trajectory.num_sampled_tokens,
            finish_reason=trajectory.finish_reason,
            messages=trajectory.messages,
            scores={name: values[index] for name, values in scores.items()},
        )
        for index, trajectory in enumerate(trajectories)
    ]


def _scores(name: str, scorer: TrajectoryReward, trajectories: Sequence[Trajectory]) -> list[float]:
    """Return the scores, or the rewards of a scorer without scores. Raises RewardError unless each is in 0-1."""
    result = scorer(trajectories)
    result.require_applicable()
    scores = [reward if score is None else score for reward, score in zip(result.rewards, result.scores, strict=True)]
    for trajectory, score in zip(trajectories, scores, strict=True):
        if not 0 <= score <= 1:
            raise RewardError(
                f"scorer {name} returned {score} for {trajectory.completion!r}; an evaluation needs scores from 0 to 1"
            )
    return scores
