"""One training rank of an RL run: policy, reference, critic and reward models on its device. Knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from rlhf_core.algorithms import build_algorithm
from rlhf_core.config.rl import RLConfig
from rlhf_core.contract import StageContext
from rlhf_core.losses.load_balancing import load_balancing_loss
from rlhf_core.losses.mismatch import measure
from rlhf_core.losses.value import clipped_value_loss
from rlhf_core.metrics import LossAndMetrics, Sum, merged
from rlhf_core.models.loading import load_causal_model, load_scalar_model, save_model, stored_state, torch_dtype
from rlhf_core.models.packed import PolicyModel, ScalarModel
from rlhf_core.models.routing import experts_per_token
from rlhf_core.rl.roles import CRITIC, POLICY, REFERENCE, Role
from rlhf_core.rl.weights import WeightAverage, WeightSource
from rlhf_core.rollout.publication import Files, Publication, publication
from rlhf_core.training.best import KeptWeights
from rlhf_core.training.deepspeed_engine import DeepSpeedEngine
from rlhf_core.training.group import host_memory_only
from rlhf_core.training.metrics import StepMetrics
from rlhf_core.training.randomness import seed_everything, seed_rank
from rlhf_core.training.reference import AdapterOff, FrozenCopy, Reference
from rlhf_core.training.routing import step_routing
from rlhf_core.training.snapshots import SnapshotWorker
from rlhf_core.training.state import EngineState, Stateful
from rlhf_core.types import Experience, PackedBatch


class RLWorker(SnapshotWorker):
    def __init__(self, config: RLConfig, context: StageContext, roles: Sequence[Role]) -> None:
        """Loads the models of `roles`, among them the policy, and nothing else."""
        super().__init__(context)
        seed_everything(context.seed)
        self._config = config
        self._publishing = ExitStack()  # holds the folder of a publish
        self._written: Publication | None = None
        self._algorithm = build_algorithm(config)
        self._engines: dict[str, DeepSpeedEngine] = {}  # by role; the reference is apart
        self._reference: Reference | None = None
        folders = {role.name: context.fetch(role.start).folder for role in roles}
        self._policy_folder = folders[POLICY]
        for role in roles:
            folder = folders[role.name]
            if role.name != REFERENCE:
                self._engines[role.name] = _load(role, folder)
            elif role.adapter_off:
                self._reference = AdapterOff(self._policy)
            else:
                self._reference = FrozenCopy(folder, role.engine, offloaded=role.offloaded)
        if config.settings.moe_coefficient > 0:
            experts_per_token(self._causal)
        self._average = None if config.ema_decay is None else WeightAverage(self._policy, config.ema_decay)
        self._kept = KeptWeights()
        seed_rank(context.seed)

    @property
    def _policy(self) -> DeepSpeedEngine:
        return self._engines[POLICY]

    @property
    def _causal(self) -> nn.Module:
        """The policy as transformers or peft know it."""
        model = self._policy.module.model
        assert isinstance(model, nn.Module)
        return model

    def parts(self) -> Mapping[str, Stateful]:
        trained = {name: engine for name, engine in self._engines.items() if engine.optimizer is not None}
        parts: dict[str, Stateful] = {name: EngineState(engine) for name, engine in trained.items()}
        if self._average is not None:
            parts["average"] = self._average
        if self._config.keeps_best:
            parts["kept"] = self._kept
        return parts

    def score(self, batches: Sequence[PackedBatch], names: Sequence[str]) -> list[dict[str, Tensor]]:
        """For each micro-batch, (n,) float32 on CPU for each of `names`: what the models say of its tokens.

        A name is a field of Experience (old_logprobs, ref_logprobs, values: 0 where `loss_mask` is false), or the role
        of a reward model, whose raw score this is at every token.
        """
        scored: list[dict[str, Tensor]] = [{} for _ in batches]
        for name in names:
            for result, values in zip(scored, self._scores(name, batches), strict=True):
                result[name] = values.cpu()
        return scored

    def _scores(self, name: str, batches: Sequence[PackedBatch]) -> list[Tensor]:
        match name:
            case "old_logprobs":
                return self._policy.forward(batches, self._logprobs)
            case "ref_logprobs":
                assert self._reference is not None
                return self._reference.forward(batches, self._logprobs)
            case "values":
                return self._engines[CRITIC].forward(batches, state_values)
            case _:
                return self._engines[name].forward(batches, lambda model, batch: model(batch))

    def _logprobs(self, model: nn.Module, batch: PackedBatch) -> Tensor:
        logprobs: Tensor = model(batch, temperature=self._config.sampling.temperature, only=batch.loss_mask)[0]
        return logprobs * batch.loss_mask

    def update_policy(self, batches: Sequence[Experience], kl_coefficient: float) -> StepMetrics:
        """One optimizer step of the policy; the micro-batches' loss weights are those of all ranks' together."""
        settings = self._config.settings
        balance = step_routing(self._policy, batches) if settings.moe_coefficient > 0 else None

        def loss(model: nn.Module, batch: Experience) -> LossAndMetrics:
            logprobs, entropy, routing = model(
                batch, temperature=self._config.sampling.temperature, only=batch.loss_mask,
                with_entropy=settings.entropy_coefficient > 0, with_routing=balance is not None,
            )  # fmt: skip
            value, metrics = self._algorithm.policy_loss(logprobs, entropy, batch, kl_coefficient)
            metrics = merged(metrics, {"policy_loss": Sum(value.detach())})
            if balance is not None:
                experts = load_balancing_loss(routing, balance)
                value = value + settings.moe_coefficient * experts
                metrics = merged(metrics, {"load_balancing_loss": Sum(experts.detach())})
            if batch.old_logprobs is None:  # they are the log-probs now
                assert batch.rollout_logprobs is not None
                metrics = merged(metrics, measure(logprobs.detach(), batch.rollout_logprobs, batch.loss_mask))
            return value, metrics

        metrics = self._policy.step(batches, loss)
        if self._average is not None and not metrics.skipped:
            self._average.update()
        return metrics

    def update_critic(self, batches: Sequence[Experience]) -> StepMetrics:
        """One optimizer step of the critic."""
        settings = self._config.settings.critic_settings
        assert settings is not None

        def loss(model: nn.Module, batch: Experience) -> LossAndMetrics:
            assert batch.values is not None
            assert batch.returns is not None
            assert batch.loss_weights is not None
            value, metrics = clipped_value_loss(
                state_values(model, batch), batch.values, batch.returns, batch.loss_mask, batch.loss_weights,
                clip=settings.value_clip,
            )  # fmt: skip
            return value, merged(metrics, {"value_loss": Sum(value.detach())})

        return self._engines[CRITIC].step(batches, loss)

    def write_weights(self, source: WeightSource) -> tuple[Path, Mapping[str, str]] | None:
        """The policy's weights (with LoRA: the adapter's) as a folder of this node, and their digests; on rank 0 only.

        The folder stays until `remove_weights`. Every rank must call it.
        """
        self.remove_weights()
        with self._with(source):
            state = self._policy.full_state_dict()
        if state is None:
            return None
        stored = stored_state(self._causal, state)
        self._written = self._publishing.enter_context(publication(stored, lora=self._config.lora))
        return self._written.folder, self._written.digests

    @host_memory_only
    def read_weights(self) -> Files | None:
        """What `write_weights` has written; on rank 0 only."""
        return self._written.files() if self._written is not None else None

    @host_memory_only
    def remove_weights(self) -> None:
        self._written = None
        self._publishing.close()

    def keep_weights(self, source: WeightSource) -> None:
        """Copy the policy as it is: unless others are kept later, it is what `save` writes. Every rank must call it."""
        with self._with(source):
            self._kept.keep(self._policy.full_state_dict())

    def _with(self, source: WeightSource) -> AbstractContextManager[None]:
        if source == "live":
            return nullcontext()
        assert self._average is not None
        return self._average.in_place()

    def offload(self) -> None:
        """Lend the device to others, until `reload`. Every rank must call it."""
        for model in self._models():
            model.offload()

    def reload(self) -> None:
        """Take the device back. Every rank must call it."""
        for model in self._models():
            model.reload()

    def _models(self) -> list[DeepSpeedEngine | Reference]:
        return [*self._engines.values(), *([self._reference] if self._reference is not None else [])]

    def probe(self, batch: PackedBatch, source: WeightSource) -> Tensor:
        """(N,) log-probs at temperature 1 of every token of `batch`: what an engine must agree with."""
        with self._with(source):
            logprobs: Tensor = self._policy.forward([batch], lambda model, b: model(b)[0])[0]
        return logprobs.cpu()

    def save(self, folder: Path) -> None:
        """The policy as a folder that transformers (with LoRA: peft) loads: what was kept, or else the average, or else
        the weights as they are. Rank 0 writes; every rank must call it."""
        if not self._config.keeps_best:
            self.keep_weights("live" if self._average is None else "average")
        state = self._kept.state_dict
        if state is not None:
            save_model(self._causal, state, folder, self._policy_folder)
        critic = self._config.settings.critic_settings
        if critic is not None and critic.save:
            model, weights = self._engines[CRITIC].module.model, self._engines[CRITIC].full_state_dict()
            assert isinstance(model, nn.Module)
            if weights is not None:
                save_model(model, weights, folder / "critic", self._policy_folder)


def _load(role: Role, folder: Path) -> DeepSpeedEngine:
    engine, trained = role.engine, role.optimizer is not None
    dtype, checkpointing = torch_dtype(engine.dtype), engine.gradient_checkpointing and trained
    model: nn.Module
    if role.head == "causal":
        model = PolicyModel(
            load_causal_model(
                folder, dtype=dtype, attention=engine.attention, lora=role.lora, gradient_checkpointing=checkpointing
            )
        )
    else:
        model = ScalarModel(
            load_scalar_model(
                folder, dtype=dtype, attention=engine.attention, lora=role.lora, gradient_checkpointing=checkpointing
            )
        )
    return DeepSpeedEngine(model, engine=engine, optimizer=role.optimizer, total_steps=role.total_steps)


def state_values(model: nn.Module, batch: PackedBatch) -> Tensor:
    """(N,): the value of the state in which token t was chosen is read where the model has seen tokens < t."""
    scores: Tensor = model(batch)
    before: Tensor = torch.cat([scores.new_zeros(1), scores[:-1]])
    return before * batch.loss_mask
