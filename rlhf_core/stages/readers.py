"""Models that read completions one after the other, each on ranks of its own that end after it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial

from torch import Tensor

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.config.engines.placement import Placement
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.stages.sampled import RewardedConfig
from rlhf_core.contract import Input, StageContext
from rlhf_core.division import Division
from rlhf_core.models.vision import ImageProcessor, with_images
from rlhf_core.packing import pack
from rlhf_core.rewards import TrajectoryReward
from rlhf_core.rewards.model import RewardReader, TokenScores
from rlhf_core.rl.roles import REFERENCE, Role, reward_role
from rlhf_core.rl.scoring import FrozenWorker, scored
from rlhf_core.stages.cluster import Cluster
from rlhf_core.stages.partial_rows import PartialRows
from rlhf_core.training.group import WorkerGroup
from rlhf_core.types import PackedBatch, Trajectory

# Completions packed at a time. No setting: rounding depends on the rest of a micro-batch.
_TOGETHER = 512

Progress = Callable[[int], None]  # called with the number of completions that a model has read since
Run = tuple[ArtifactRef, EngineConfig, Placement]


@dataclass(frozen=True, slots=True)
class Readers:
    """Starts the models that read the completions of a stage, with the reward models' settings."""

    config: RewardedConfig
    inputs: Mapping[str, Input]
    rewards: Mapping[str, RewardReader]
    context: StageContext
    cluster: Cluster
    kept: PartialRows
    processor: ImageProcessor | None = None  # of the model that sampled
    temperature: float = 1.0  # at which it sampled
    compares: bool = False  # the model that sampled and the setting `reference` read them too

    @property
    def passes(self) -> int:
        """Number of models that read all completions."""
        return len(self._reward_models()) + len(self._compared())

    def judge(self, read: Callable[[str], Sequence[Trajectory]], progress: Progress) -> dict[str, list[float]]:
        """Return each model reward's values by name, one per completion, with the rewards of its steps added up.

        read: the completions in the tokens of the model, by the name of its first reward.
        """
        judged: dict[str, list[float]] = {}
        for number, ((ref, engine, placement), names) in enumerate(self._reward_models().items()):
            role = Role(reward_role(names[0]), ref, "scalar", engine)
            with self._scores(role, placement, role.name) as scores:
                rewards = {name: self.rewards[name].reward(scores) for name in names}
                for name, part in _parts(f"judged-{number}", read(names[0])):
                    for row in self.kept.rows(name, partial(totals, rewards, part)):
                        for reward, value in row.items():
                            judged.setdefault(reward, []).append(value)
                    progress(len(part))
        return judged

    def compare(self, sampled: Sequence[Trajectory], progress: Progress) -> tuple[list[float], list[float]]:
        """Return each completion's log-prob by the model, and by the reference.

        Both are computed on ranks: an engine's different rounding would be added to the KL.
        """
        logprobs_by_model: dict[ArtifactRef, list[float]] = {}
        for number, (ref, engine, placement) in enumerate(self._compared()):
            logprobs_by_model[ref] = []
            role = Role(REFERENCE, ref, "causal", engine)
            with self._scores(role, placement, "ref_logprobs") as scores:
                for name, part in _parts(f"compared-{number}", sampled):
                    logprobs_by_model[ref] += self.kept.rows(name, partial(self._logprobs, scores, part))
                    progress(len(part))
        return logprobs_by_model[self.inputs["model"].manifest.ref], logprobs_by_model[
            self.inputs["reference.model"].manifest.ref
        ]

    def _logprobs(self, scores: TokenScores, part: Sequence[Trajectory]) -> list[float]:
        """Return the log-prob of each completion."""
        batch = pack([t.token_ids for t in part], [t.loss_mask for t in part])
        batch = with_images(batch, [t.prompt.images for t in part], self.processor)
        each = scores(batch).double().split(batch.sequence_lengths.tolist())
        return [float(logprobs.sum()) for logprobs in each]

    def _reward_models(self) -> dict[Run, list[str]]:
        """Return the rewards of each model."""
        runs: dict[Run, list[str]] = {}
        for name in self.config.model_rewards:
            ref = self.inputs[f"rewards.{name}.model"].manifest.ref
            runs.setdefault((ref, *self.config.readers[f"rewards.{name}"]), []).append(name)
        return runs

    def _compared(self) -> list[Run]:
        if not self.compares:
            return []
        refs = dict.fromkeys(self.inputs[name].manifest.ref for name in ("model", "reference.model"))
        return [(ref, *self.config.readers["reference"]) for ref in refs]

    @contextmanager
    def _scores(self, role: Role, placement: Placement, name: str) -> Iterator[TokenScores]:
        """The ranks are started by the first batch. name: as in rl.scoring.Scores."""
        tokens = role.engine.micro_batch_tokens(placement)
        with ExitStack() as stack:

            @cache
            def started() -> tuple[WorkerGroup[FrozenWorker], bool]:
                ranks = stack.enter_context(
                    self.cluster.workers(placement, role.engine, FrozenWorker, self.temperature, self.context, [role])
                )
                return ranks, ranks.call(FrozenWorker.shares_prompts, role.name)[0]

            def scores(batch: PackedBatch) -> Tensor:
                ranks, shares_prompts = started()
                division = Division.of(
                    batch, replicas=ranks.replicas, tokens_per_micro_batch=tokens, shares_prompts=shares_prompts
                )
                return scored(ranks, division, [name])[name]

            yield scores


def totals(rewards: Mapping[str, TrajectoryReward], part: Sequence[Trajectory]) -> list[dict[str, float]]:
    """Return the rewards of each completion by name."""
    by_name = {name: reward(part).totals() for name, reward in rewards.items()}
    return [{name: values[index] for name, values in by_name.items()} for index in range(len(part))]


def reward_counts(wanted: int, judged: Mapping[str, Sequence[float]]) -> dict[str, tuple[int, int]]:
    """Return how many values of each reward there are to be, and how many there are, as `require_counts` needs it."""
    return {f"values of the reward {name}": (wanted, len(values)) for name, values in judged.items()}


def _parts(pass_name: str, sampled: Sequence[Trajectory]) -> Iterator[tuple[str, Sequence[Trajectory]]]:
    """Yield the completions that are packed together, and the name of the part that has their values.

    It includes a digest of their tokens: completions that had to be sampled again may be others.
    """
    for start in range(0, len(sampled), _TOGETHER):
        part = sampled[start : start + _TOGETHER]
        digest = hashlib.sha256()
        for trajectory in part:
            digest.update(trajectory.token_ids.numpy().tobytes() + trajectory.loss_mask.numpy().tobytes())
        yield f"{pass_name}-{start}-{digest.hexdigest()[:16]}", part
