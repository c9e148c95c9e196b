"""One training rank of an RL run: policy, reference, critic and reward model on its device. Knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor, nn

from rlhf_core.algorithms import build_algorithm
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.config.algorithms import PPOConfig
from rlhf_core.config.rl import RLConfig
from rlhf_core.contract import StageContext
from rlhf_core.losses.load_balancing import load_balancing_loss
from rlhf_core.losses.mismatch import measure
from rlhf_core.losses.value import clipped_value_loss
from rlhf_core.metrics import LossAndMetrics, Sum, merged
from rlhf_core.models.loading import load_causal_model, load_scalar_model, save_model, stored_state, torch_dtype
from rlhf_core.models.packed import PolicyModel, ScalarModel
from rlhf_core.models.routing import experts_per_token
from rlhf_core.rl.weights import KeptWeights, WeightAverage, WeightSource
from rlhf_core.rollout.publication import Files, Publication, publication
from rlhf_core.training.deepspeed_engine import DeepSpeedEngine
from rlhf_core.training.group import host_memory_only
from rlhf_core.training.metrics import StepMetrics
from rlhf_core.training.randomness import seed_everything, seed_rank
from rlhf_core.training.routing import step_routing
from rlhf_core.training.snapshots import SnapshotWorker
from rlhf_core.training.state import EngineState, Stateful
from rlhf_core.types import Experience, PackedBatch


class RLWorker(SnapshotWorker):
    def __init__(
        self, config: RLConfig, context: StageContext, model: ArtifactRef, reward_model: ArtifactRef | None
    ) -> None:
        """Loads what the algorithm needs and nothing else: coefficient 0 loads no reference, GRPO no critic."""
        super().__init__(context)
        seed_everything(context.seed)
        self._config = config
        self._publishing = ExitStack()  # holds the folder of a publish
        self._written: Publication | None = None
        self._algorithm = build_algorithm(config)
        self._folder = context.fetch(model).folder
        self._reward_folder = context.fetch(reward_model).folder if reward_model else None
        settings = config.settings
        updates = config.steps * settings.epochs * settings.minibatches
        frozen = getattr(settings, "critic_warmup_steps", 0) * settings.epochs * settings.minibatches
        self._causal = self._load_causal(lora=True)
        if settings.moe_coefficient > 0:
            experts_per_token(self._causal)
        self._policy = DeepSpeedEngine(
            PolicyModel(self._causal), engine=config.engine, optimizer=settings.optimizer, total_steps=updates - frozen
        )
        self._average = None if config.ema_decay is None else WeightAverage(self._policy, config.ema_decay)
        self._kept = KeptWeights()
        self._reference = self._load_reference() if self._algorithm.uses_reference else None
        self._critic = self._load_critic(settings, updates) if isinstance(settings, PPOConfig) else None
        self._reward_model = self._load_reward_model() if settings.model_rewards else None
        seed_rank(context.seed)

    def _load_causal(self, *, lora: bool) -> nn.Module:
        engine = self._config.engine
        return load_causal_model(
            self._folder, dtype=torch_dtype(engine.dtype), attention=engine.attention,
            lora=self._config.lora if lora else None, gradient_checkpointing=engine.gradient_checkpointing and lora,
        )  # fmt: skip

    def _load_reference(self) -> DeepSpeedEngine:
        if self._config.lora is not None:
            return self._policy  # the base with its adapter off: one copy in memory
        model = PolicyModel(self._load_causal(lora=False))
        return DeepSpeedEngine(model, engine=self._config.engine, optimizer=None, total_steps=0)

    def _load_critic(self, settings: PPOConfig, updates: int) -> DeepSpeedEngine:
        starts_from_reward_model = settings.critic_start == "reward_model"
        folder = self._reward_folder if starts_from_reward_model else self._folder
        assert folder is not None
        return DeepSpeedEngine(
            self._load_scalar(folder, trained=True),
            engine=self._config.engine,
            optimizer=settings.critic_optimizer,
            total_steps=updates,
        )

    def _load_reward_model(self) -> DeepSpeedEngine:
        assert self._reward_folder is not None
        return DeepSpeedEngine(
            self._load_scalar(self._reward_folder, trained=False),
            engine=self._config.engine,
            optimizer=None,
            total_steps=0,
        )

    def _load_scalar(self, folder: Path, *, trained: bool) -> ScalarModel:
        engine = self._config.engine
        model = load_scalar_model(
            folder, dtype=torch_dtype(engine.dtype), attention=engine.attention,
            gradient_checkpointing=engine.gradient_checkpointing and trained,
        )  # fmt: skip
        return ScalarModel(model)

    def parts(self) -> Mapping[str, Stateful]:
        engines = {"policy": self._policy, "critic": self._critic}
        parts: dict[str, Stateful] = {name: EngineState(e) for name, e in engines.items() if e is not None}
        if self._average is not None:
            parts["average"] = self._average
        if self._config.keeps_best:
            parts["kept"] = self._kept
        return parts

    def score(self, batches: Sequence[PackedBatch], wanted: Sequence[str]) -> list[dict[str, Tensor]]:
        """For each micro-batch, (n,) float32 on CPU for each name wanted: what the models say of its tokens.

        `reward` is the reward model's raw score at each token; the others are 0 where `loss_mask` is false.
        """
        scorers = {
            "old_logprobs": self._old_logprobs,
            "ref_logprobs": self._ref_logprobs,
            "values": self._values,
            "reward": self._reward,
        }
        scored: list[dict[str, Tensor]] = [{} for _ in batches]
        for name in wanted:
            for result, values in zip(scored, scorers[name](batches), strict=True):
                result[name] = values.cpu()
        return scored

    def _old_logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        return self._policy.forward(batches, self._logprobs)

    def _ref_logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        assert self._reference is not None
        with self._adapter_off():
            return self._reference.forward(batches, self._logprobs)

    def _values(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        assert self._critic is not None
        return self._critic.forward(batches, state_values)

    def _reward(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        assert self._reward_model is not None
        return self._reward_model.forward(batches, lambda model, batch: model(batch))

    def _logprobs(self, model: nn.Module, batch: PackedBatch) -> Tensor:
        logprobs: Tensor = model(batch, temperature=self._config.sampling.temperature, only=batch.loss_mask)[0]
        return logprobs * batch.loss_mask

    @contextmanager
    def _adapter_off(self) -> Iterator[None]:
        if self._config.lora is None:
            yield
            return
        assert isinstance(self._causal, PeftModel)
        with self._causal.disable_adapter():
            yield

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
        assert self._critic is not None
        settings = self._config.settings
        assert isinstance(settings, PPOConfig)

        def loss(model: nn.Module, batch: Experience) -> LossAndMetrics:
            assert batch.values is not None
            assert batch.returns is not None
            assert batch.loss_weights is not None
            value, metrics = clipped_value_loss(
                state_values(model, batch), batch.values, batch.returns, batch.loss_mask, batch.loss_weights,
                clip=settings.value_clip,
            )  # fmt: skip
            return value, merged(metrics, {"value_loss": Sum(value.detach())})

        return self._critic.step(batches, loss)

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
        for engine in self._engines():
            engine.offload()

    def reload(self) -> None:
        """Take the device back. Every rank must call it."""
        for engine in self._engines():
            engine.reload()

    def _engines(self) -> list[DeepSpeedEngine]:
        """Each once: with LoRA, policy and reference are one."""
        engines = (self._policy, self._reference, self._critic, self._reward_model)
        return list({id(engine): engine for engine in engines if engine is not None}.values())

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
            save_model(self._causal, state, folder, self._folder)
        if self._critic is not None and getattr(self._config.settings, "save_critic", False):
            model, critic = self._critic.module.model, self._critic.full_state_dict()
            assert isinstance(model, nn.Module)
            if critic is not None:
                save_model(model, critic, folder / "critic", self._folder)


def state_values(model: nn.Module, batch: PackedBatch) -> Tensor:
    """(N,): the value of the state in which token t was chosen is read where the model has seen tokens < t."""
    scores: Tensor = model(batch)
    before: Tensor = torch.cat([scores.new_zeros(1), scores[:-1]])
    return before * batch.loss_mask
