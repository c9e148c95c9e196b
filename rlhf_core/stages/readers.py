"""Models that read completions one after the other, each on ranks of its own that end after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.config.engines.placement import Placement
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.stages.sampled import RewardedConfig
from rlhf_core.contract import Input, StageContext
from rlhf_core.division import Division
from rlhf_core.models.vision import ImageProcessor, with_images
from rlhf_core.packing import pack
from rlhf_core.rewards.model import RewardReader, TokenScores
from rlhf_core.rl.roles import REFERENCE, Role, reward_role
from rlhf_core.rl.scoring import FrozenWorker, scored
from rlhf_core.stages.cluster import Cluster
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
        for (ref, engine, placement), names in self._reward_models().items():
            role = Role(reward_role(names[0]), ref, "scalar", engine)
            with self._scores(role, placement, role.name) as scores:
                rewards = {name: self.rewards[name].reward(scores) for name in names}
                for part in _parts(read(names[0])):
                    for name, reward in rewards.items():
                        judged.setdefault(name, []).extend(reward(part).totals())
                    progress(len(part))
        return judged

    def compare(self, sampled: Sequence[Trajectory], progress: Progress) -> tuple[list[float], list[float]]:
        """Return each completion's log-prob by the model, and by the reference.

        Both are computed on ranks: an engine's different rounding would be added to the KL.
        """
        logprobs_by_model: dict[ArtifactRef, list[float]] = {}
        for ref, engine, placement in self._compared():
            logprobs_by_model[ref] = []
            role = Role(REFERENCE, ref, "causal", engine)
            with self._scores(role, placement, "ref_logprobs") as scores:
                for part in _parts(sampled):
                    batch = pack([t.token_ids for t in part], [t.loss_mask for t in part])
                    batch = with_images(batch, [t.prompt.images for t in part], self.processor)
                    each = scores(batch).double().split(batch.sequence_lengths.tolist())
                    logprobs_by_model[ref] += [float(logprobs.sum()) for logprobs in each]
                    progress(len(part))
        return logprobs_by_model[self.inputs["model"].manifest.ref], logprobs_by_model[
            self.inputs["reference.model"].manifest.ref
        ]

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
        """name: as in rl.scoring.Scores."""
        with self.cluster.workers(
            placement, role.engine, FrozenWorker, self.temperature, self.context, [role]
        ) as ranks:
            shares_prompts = ranks.call(FrozenWorker.shares_prompts, role.name)[0]
            tokens = role.engine.micro_batch_tokens(placement)

            def scores(batch: PackedBatch) -> Tensor:
                division = Division.of(
                    batch, replicas=ranks.replicas, tokens_per_micro_batch=tokens, shares_prompts=shares_prompts
                )
                return scored(ranks, division, [name])[name]

            yield scores


def _parts(sampled: Sequence[Trajectory]) -> Iterator[Sequence[Trajectory]]:
    return (sampled[start : start + _TOGETHER] for start in range(0, len(sampled), _TOGETHER))
