"""The critic of an RL run: its update, what is kept of it, and ranks of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol, cast

import torch.distributed as dist
from torch import nn

from rlhf_core.config.rl.critic import CriticConfig
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.contract import StageContext
from rlhf_core.losses.value import clipped_value_loss
from rlhf_core.metrics import LossAndMetrics, Sum, merged
from rlhf_core.models.adapters import is_adapted
from rlhf_core.models.folders.folder import update_json
from rlhf_core.models.merging import merge_adapter
from rlhf_core.models.packed import ScalarModel
from rlhf_core.rl.roles import CRITIC, Role
from rlhf_core.rl.scoring import FrozenWorker, Scores, state_values
from rlhf_core.training.engine import TrainingEngine
from rlhf_core.training.metrics import StepMetrics
from rlhf_core.training.saving import write_model
from rlhf_core.training.snapshots import SnapshotWorker
from rlhf_core.training.state import Stateful
from rlhf_core.types import Minibatch


class TrainsCritic(Scores, Protocol):
    """A rank that has the critic."""

    def update_critic(self, batches: Sequence[Minibatch]) -> StepMetrics:
        """Run one optimizer step of the critic. Every rank must call it."""


class CriticWorker(FrozenWorker, SnapshotWorker):
    """One rank of the critic apart from the policy, and of frozen models of its group."""

    def __init__(self, config: RLConfig, context: StageContext, roles: Sequence[Role]) -> None:
        SnapshotWorker.__init__(self, context, name=CRITIC)
        FrozenWorker.__init__(self, config.sampling.temperature, context, roles)
        settings = config.settings.critic_settings
        assert settings is not None
        self._settings = settings
        self._start = next(context.fetch(role.start).folder for role in roles if role.name == CRITIC)

    @property
    def _critic(self) -> TrainingEngine:
        return cast(TrainingEngine, self._models[CRITIC])

    def parts(self) -> Mapping[str, Stateful]:
        return {CRITIC: self._critic}

    def update_critic(self, batches: Sequence[Minibatch]) -> StepMetrics:
        """See TrainsCritic."""
        return update_critic(self._critic, self._settings, batches)

    def save(self, folder: Path) -> None:
        save_critic(self._critic, self._start, folder, self._context)


def update_critic(critic: TrainingEngine, settings: CriticConfig, batches: Sequence[Minibatch]) -> StepMetrics:
    """Run one optimizer step of the critic. Loss weights of the micro-batches span all ranks."""

    def loss(model: nn.Module, batch: Minibatch) -> LossAndMetrics:
        assert batch.values is not None
        assert batch.returns is not None
        value, metrics = clipped_value_loss(
            state_values(model, batch), batch.values, batch.returns, batch.loss_mask, batch.loss_weights,
            clip=settings.value_clip,
        )  # fmt: skip
        return value, merged(metrics, {"value_loss": Sum(value.detach())})

    return critic.step(batches, loss)


def save_critic(critic: TrainingEngine, start: Path, folder: Path, context: StageContext) -> None:
    """Write the critic as a whole model, with an adapter merged, from which another critic can start. Rank 0 writes;
    every rank must call it.

    start: the folder of its initial weights.
    """
    model = critic.module
    assert isinstance(model, ScalarModel)
    if is_adapted(model.model):
        with TemporaryDirectory(dir=context.workdir) as adapter:
            write_model(critic, Path(adapter), None)
            if dist.get_rank() == 0:
                merge_adapter(start, Path(adapter), folder)
    else:
        write_model(critic, folder, start)
    if dist.get_rank() == 0:
        # A critic or a reward that starts from it normalises its scores by these, which gives the critic's values.
        update_json(folder / "config.json", reward_mean=0.0 - model.offset, reward_std=1.0)
