"""The log of rollouts for people: of some prompts of some steps, every token with what it was trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlhf_core.artifacts.live import LiveFiles
from rlhf_core.artifacts.logged_rollouts import (
    IMAGES_FOLDER,
    ROLLOUTS_FOLDER,
    Histogram,
    LoggedCompletion,
    LoggedGroup,
    LoggedImage,
    LoggedSequence,
    LoggedStep,
    encode_step,
    rollouts_file,
)
from rlhf_core.chat.rendering import Tokenizer
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.types import Prompt, Rollouts, SequenceImage, TrainingBatch, Trajectory

_BINS = 20


class RolloutLog:
    """Writes the logged steps of a run to its live files. A resumed run writes the same files again."""

    def __init__(self, config: RLConfig, tokenizer: Tokenizer, live: LiveFiles) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._live = live
        self._texts: dict[int, str] = {}

    def step(self, step: int, trajectories: Sequence[Trajectory], batch: TrainingBatch) -> None:
        """Log the step, counted from 1, if it is due. batch: all of the trajectories, as they are trained on."""
        members = self._members(step, trajectories)
        if not members:
            return
        size, spans = self._config.settings.group_size, _spans_by_trajectory(trajectories, batch)
        for index in chain.from_iterable(members):
            self._put_images(trajectories[index])
        logged = LoggedStep(
            step=step,
            prompts=len(trajectories) // size,
            completions=len(trajectories),
            histograms=_histograms(trajectories, batch),
            groups=tuple(
                self._group(
                    trajectories[each[0]].prompt, [self._completion(trajectories[i], batch, spans[i]) for i in each]
                )
                for each in members
            ),
        )
        self._live.put(f"{ROLLOUTS_FOLDER}/{rollouts_file(step)}", encode_step(logged))

    def mask(self, step: int, trajectories: Sequence[Trajectory], rollouts: Rollouts) -> Tensor | None:
        """Return whether each token of the step's trajectories will be logged, (N,) bool; None if none will."""
        indices = [index for members in self._members(step, trajectories) for index in members]
        return torch.isin(rollouts.episode_ids, torch.tensor(indices)) if indices else None

    def _members(self, step: int, trajectories: Sequence[Trajectory]) -> list[range]:
        """Return the indices of the trajectories to log, by prompt; none if the step is not due."""
        config, size = self._config.log_rollouts, self._config.settings.group_size
        if config is None or not config.includes(step, self._config.steps):
            return []
        chosen = chosen_groups([trajectory.total_reward for trajectory in trajectories], size, config.prompts)
        return [range(size * group, size * (group + 1)) for group in chosen]

    def _group(self, prompt: Prompt, completions: Sequence[LoggedCompletion]) -> LoggedGroup:
        answer = prompt.row.get("answer")
        return LoggedGroup(
            id=prompt.id,
            prompt=tuple(prompt.row["prompt"]),
            answer=None if answer is None else str(answer),
            completions=tuple(completions),
        )

    def _completion(self, trajectory: Trajectory, batch: TrainingBatch, spans: Sequence[slice]) -> LoggedCompletion:
        versions = [(stretch.tokens, stretch.weight_version) for stretch in trajectory.stretches]
        images = (trajectory.prompt.images + trajectory.feedback_images, *(b.images for b in trajectory.branches))
        settings, values = self._config.settings.rewards, trajectory.extra
        return LoggedCompletion(
            text=trajectory.completion,
            finish_reason=trajectory.finish_reason,
            turns=trajectory.turns,
            reward=_rounded(trajectory.total_reward),
            rewards={name: _rounded(values[name]) for name in settings if name in values},
            weighted={name: _rounded(each.weight * values[name]) for name, each in settings.items() if name in values},
            details={name: _rounded(value) for name, value in values.items() if name not in settings},
            score=None if trajectory.score is None else _rounded(trajectory.score),
            environment=_all_rounded(trajectory.environment_metrics),
            versions=tuple(versions) or ((trajectory.num_sampled_tokens, trajectory.weight_version),),
            messages=None if trajectory.messages is None else tuple(dict(each) for each in trajectory.messages),
            sequences=tuple(self._sequence(batch, span, shown) for span, shown in zip(spans, images, strict=True)),
        )

    def _sequence(self, batch: TrainingBatch, span: slice, images: Sequence[SequenceImage]) -> LoggedSequence:
        trained = batch.loss_mask[span]

        def of_trained(values: Tensor | None) -> tuple[float | None, ...] | None:
            return None if values is None else tuple(_rounded(value) for value in values[span][trained].tolist())

        ids = batch.input_ids[span].tolist()
        return LoggedSequence(
            texts=tuple(self._text(token) for token in ids),
            token_ids=tuple(ids),
            trained=tuple(trained.tolist()),
            engine_logprobs=of_trained(batch.rollout_logprobs) or (),
            trainer_logprobs=of_trained(batch.old_logprobs),
            entropies=of_trained(batch.entropies),
            reference_logprobs=of_trained(batch.ref_logprobs),
            values=of_trained(batch.values),
            advantages=of_trained(batch.advantages) or (),
            step_rewards=of_trained(batch.process_rewards),
            images=tuple(LoggedImage(sha256=Path(i.path).stem, start=i.start, length=i.length) for i in images),
        )

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = str(self._tokenizer.decode([token], skip_special_tokens=False))
        return self._texts[token]

    def _put_images(self, trajectory: Trajectory) -> None:
        branches = [image for branch in trajectory.branches for image in branch.images]
        for image in {*trajectory.prompt.images, *trajectory.feedback_images, *branches}:
            path = Path(image.path)
            self._live.put(f"{ROLLOUTS_FOLDER}/{IMAGES_FOLDER}/{path.stem}", path.read_bytes())


def chosen_groups(rewards: Sequence[float], group_size: int, count: int) -> list[int]:
    """Return the groups to log, in order: that of the lowest reward, that of the highest, and the first others.

    rewards: of all completions, group after group.
    """
    lowest, highest = rewards.index(min(rewards)), rewards.index(max(rewards))
    preferred = dict.fromkeys([lowest // group_size, highest // group_size, *range(len(rewards) // group_size)])
    return sorted(list(preferred)[:count])


def _spans_by_trajectory(trajectories: Sequence[Trajectory], batch: TrainingBatch) -> list[list[slice]]:
    """Return where the tokens of each trajectory's sequences are in the batch."""
    ends = batch.sequence_lengths.cumsum(0).tolist()
    spans = iter([slice(start, end) for start, end in pairwise([0, *ends])])
    return [[next(spans) for _ in trajectory.sequences] for trajectory in trajectories]


def _histograms(trajectories: Sequence[Trajectory], batch: TrainingBatch) -> dict[str, Histogram]:
    """Return histograms over the completions, by name.

    reward: total; length: sampled tokens; ratio: geometric mean of the trainer's probabilities over the engine's.
    """
    values = {
        "reward": [trajectory.total_reward for trajectory in trajectories],
        "length": [float(trajectory.num_sampled_tokens) for trajectory in trajectories],
    }
    if batch.old_logprobs is not None:
        mask, episodes = batch.loss_mask, batch.episode_ids
        differences = (batch.old_logprobs - batch.rollout_logprobs)[mask].double()
        totals = torch.zeros(len(trajectories), dtype=torch.float64).index_add(0, episodes[mask], differences)
        counts = torch.bincount(episodes[mask], minlength=len(trajectories)).clamp(min=1)
        values["ratio"] = (totals / counts).exp().tolist()
    return {name: _histogram(each) for name, each in values.items()}


def _histogram(values: Sequence[float]) -> Histogram:
    finite = [value for value in values if math.isfinite(value)]
    counts, edges = np.histogram(finite, bins=_BINS)
    return Histogram(edges=tuple(_short(edge) for edge in edges.tolist()), counts=tuple(counts.tolist()))


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _rounded(value: float) -> float | None:
    return _short(value) if math.isfinite(value) else None


def _all_rounded(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _rounded(value) for name, value in values.items()}
