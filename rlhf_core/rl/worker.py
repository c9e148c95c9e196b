"""One training rank of an RL run: the models of its roles on its device. Independent of Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_core.algorithms import build_algorithm
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.contract import StageContext
from rlhf_core.losses import kl, mismatch
from rlhf_core.losses.load_balancing import load_balancing_loss
from rlhf_core.metrics import LossAndMetrics, Sum, merged
from rlhf_core.models.adapters import is_adapted
from rlhf_core.models.loading import torch_dtype
from rlhf_core.models.merging import MergedWeights, merged_layout
from rlhf_core.models.routing import experts_per_token
from rlhf_core.rl.critic import save_critic, update_critic
from rlhf_core.rl.roles import CRITIC, POLICY, REFERENCE, TEACHER, Role
from rlhf_core.rl.scoring import SharedBase, load_model, scores
from rlhf_core.rl.weights import WeightAverage, WeightSource, never_changed
from rlhf_core.rollout.publication import Digests
from rlhf_core.rollout.transport.base import Offer, Transport, WeightManifest, Weights, digested, take_all
from rlhf_core.rollout.transport.folder import Files, SharedFolder, read_files
from rlhf_core.rollout.transport.table import TRANSPORTS
from rlhf_core.system.freed_memory import return_freed_memory
from rlhf_core.training.best import KeptWeights
from rlhf_core.training.distributed import host_store, own_host
from rlhf_core.training.engine import TrainingEngine
from rlhf_core.training.group import host_memory_only
from rlhf_core.training.metrics import StepMetrics
from rlhf_core.training.randomness import seed_everything, seed_rank
from rlhf_core.training.reference import AdapterOff, FrozenModel, Reference
from rlhf_core.training.routing import step_routing
from rlhf_core.training.saving import write_model
from rlhf_core.training.snapshots import SnapshotWorker
from rlhf_core.training.state import Stateful
from rlhf_core.types import Minibatch, PackedBatch


class PolicyUpdate(NamedTuple):
    metrics: StepMetrics
    # Of each micro-batch, if it has `logged`: `old_logprobs`, of the policy before the update, and `entropies`, which
    # micro-batches without a logged sequence do not have; (n,) float32 on CPU.
    before: list[dict[str, Tensor]]


class RLWorker(SnapshotWorker):
    def __init__(self, config: RLConfig, context: StageContext, roles: Sequence[Role]) -> None:
        """Load the models of `roles`, which include the policy."""
        super().__init__(context)
        seed_everything(context.seed)
        self._config = config
        self._publishing = ExitStack()  # holds the resources of the current publish
        self._offered: Transport | None = None
        self._algorithm = build_algorithm(config)
        self._engines: dict[str, TrainingEngine] = {}  # by role, except the frozen ones below
        self._frozen: dict[str, Reference] = {}  # by role
        self._folders = {role.name: context.fetch(role.start).folder for role in roles}
        for role in roles:
            folder = self._folders[role.name]
            if role.adapter_off:
                self._frozen[role.name] = AdapterOff(self._policy)
            elif role.name in (REFERENCE, TEACHER) or role.offloaded:
                self._frozen[role.name] = FrozenModel(load_model(role, folder), offloaded=role.offloaded)
            else:
                self._engines[role.name] = load_model(role, folder, self._base if role.shares_base else None)
        if config.settings.moe_coefficient > 0:
            experts_per_token(self._causal)
        self._average = None if config.ema_decay is None else WeightAverage(self._policy, config.ema_decay)
        self._kept = KeptWeights(self._policy.weight_layout()) if config.keeps_best else None
        seed_rank(context.seed)

    @property
    def _policy(self) -> TrainingEngine:
        return self._engines[POLICY]

    @property
    def _causal(self) -> nn.Module:
        """The policy as a transformers or peft model."""
        model = self._policy.module.model
        assert isinstance(model, nn.Module)
        return model

    @property
    def _base(self) -> SharedBase:
        model = self._causal
        assert is_adapted(model)
        return SharedBase(self._folders[POLICY], model)

    def parts(self) -> Mapping[str, Stateful]:
        parts: dict[str, Stateful] = {name: engine for name, engine in self._engines.items() if engine.is_trained}
        if self._average is not None:
            parts["average"] = self._average
        if self._kept is not None:
            parts["kept"] = self._kept
        return parts

    def score(self, batches: Sequence[PackedBatch], names: Sequence[str]) -> list[dict[str, Tensor]]:
        """See scoring.Scores."""
        return scores(self._models(), batches, names, self._config.sampling.temperature)

    def shares_prompts(self, role: str) -> bool:
        """See scoring.Scores."""
        return self._models()[role].shares_prompts

    def update_policy(self, batches: Sequence[Minibatch], kl_coefficient: float) -> PolicyUpdate:
        """Run one optimizer step of the policy. Loss weights of the micro-batches span all ranks."""
        settings = self._config.settings
        before: list[dict[str, Tensor]] = []
        balance = step_routing(self._policy, batches) if settings.moe_coefficient > 0 else None

        def loss(model: nn.Module, batch: Minibatch) -> LossAndMetrics:
            logged = batch.on_host.logged
            with_entropy = settings.entropy_coefficient > 0 or (logged is not None and bool(logged.any()))
            logprobs, entropy, routing = model(
                batch, temperature=self._config.sampling.temperature, only=batch.loss_mask,
                with_entropy=with_entropy, with_routing=balance is not None,
            )  # fmt: skip
            if logged is not None:
                entropies = torch.zeros_like(logprobs) if entropy is None else entropy
                before.append({"old_logprobs": logprobs.detach(), "entropies": entropies.detach()})
            value, metrics = self._algorithm.policy_loss(logprobs, entropy, batch, kl_coefficient)
            metrics = merged(metrics, {"policy_loss": Sum(value.detach())})
            if balance is not None:
                experts = load_balancing_loss(routing, balance)
                value = value + settings.moe_coefficient * experts
                metrics = merged(metrics, {"load_balancing_loss": Sum(experts.detach())})
            if batch.old_logprobs is None:  # they equal the current ones
                metrics = merged(metrics, mismatch.measure(logprobs.detach(), batch.rollout_logprobs, batch.loss_mask))
                if batch.ref_logprobs is not None:
                    metrics = merged(metrics, kl.measure(logprobs, batch.ref_logprobs, batch.loss_mask))
            return value, metrics

        metrics = self._policy.step(batches, loss)
        if self._average is not None and not metrics.skipped:
            self._average.update()
        return PolicyUpdate(metrics, [{name: values.cpu() for name, values in each.items()} for each in before])

    def update_critic(self, batches: Sequence[Minibatch]) -> StepMetrics:
        """Run one optimizer step of the critic."""
        settings = self._config.settings.critic_settings
        assert settings is not None
        return update_critic(self._engines[CRITIC], settings, batches)

    def offer_weights(self, version: int, engines: int) -> tuple[Transport, WeightManifest] | None:
        """Return the transport of a publish to `engines` engines and its manifest; None on ranks other than 0.

        Resources of the transport are held until `withdraw_weights`.
        """
        self.withdraw_weights()
        return_freed_memory()  # of the update, since engines may share this node's memory
        if dist.get_rank() >= self._config.sending_ranks:
            return None
        layout = self._policy.weight_layout()
        if self._merges:
            layout = merged_layout(self._folders[POLICY], torch_dtype(self._config.engine.dtype), adapter=layout)
        # A hybrid engine drops all weights when it goes to sleep.
        manifest = WeightManifest.of(version, layout, frozenset() if self._config.hybrid else never_changed(layout))
        offer = Offer(
            manifest, engines, self._config.receivers_per_engine, self._config.publishes_on_gpus,
            self._config.sending_ranks, self._config.served_lora, rendezvous=partial(host_store, own_host()),
        )  # fmt: skip
        self._offered = self._publishing.enter_context(TRANSPORTS[self._config.rollout.transport](offer))
        return (self._offered, manifest) if dist.get_rank() == 0 else None

    def send_weights(self, source: WeightSource, transport: Transport, manifest: WeightManifest) -> Digests:
        """Send the weights to serve; return their digests on rank 0. Every rank must call it."""
        digests: dict[str, str] = {}
        try:
            with self._using(source):
                weights = self._served_weights()
                if dist.get_rank() == 0:
                    weights = digested(weights, digests)
                transport.send(manifest.sent(weights), manifest)
        except BaseException:
            self._publishing.close()  # engines that have not joined yet fail at once
            raise
        return digests

    def digest_weights(self) -> dict[str, str]:
        """Return the digests of the weights to serve on rank 0, without sending. Every rank must call it."""
        digests: dict[str, str] = {}
        weights = self._served_weights()
        take_all(digested(weights, digests) if dist.get_rank() == 0 else weights)
        return digests

    @property
    def _merges(self) -> bool:
        """True if engines serve the adapter merged into its base."""
        return self._config.lora is not None and self._config.served_lora is None

    def _served_weights(self) -> Weights:
        """Return the weights to serve. Every rank must consume all of them."""
        lora = self._config.lora
        if lora is None or not self._merges:
            return self._policy.weights()
        sends = dist.get_rank() < self._config.sending_ranks
        adapter = {name: tensor.detach().cpu().clone() for name, tensor in self._policy.weights() if sends}
        if not sends:
            return ()
        dtype = torch_dtype(self._config.engine.dtype)
        return MergedWeights(self._folders[POLICY], adapter, lora.scaling, dtype)

    @host_memory_only
    def read_weights(self) -> Files:
        """Return the files that were sent; empty on ranks without files."""
        return read_files(self._offered.folder) if isinstance(self._offered, SharedFolder) else {}

    @host_memory_only
    def withdraw_weights(self) -> None:
        self._offered = None
        self._publishing.close()

    def keep_weights(self, source: WeightSource) -> None:
        """Copy the policy; `save` writes the copy kept last. Every rank must call it."""
        assert self._kept is not None
        with self._using(source):
            self._kept.keep(self._policy.weights())

    def _using(self, source: WeightSource) -> AbstractContextManager[None]:
        if source == "live":
            return nullcontext()
        assert self._average is not None
        return self._average.in_place()

    def offload(self) -> None:
        """Offload all models to host memory until `reload`. Every rank must call it."""
        for model in self._models().values():
            model.offload()

    def reload(self) -> None:
        """Undo `offload`. Every rank must call it."""
        for model in self._models().values():
            model.reload()

    def _models(self) -> dict[str, TrainingEngine | Reference]:
        """Return all models by role."""
        return {**self._engines, **self._frozen}

    def probe(self, batch: PackedBatch, source: WeightSource) -> Tensor:
        """Return log-probs at temperature 1 of every token of `batch`, (N,), which engines must reproduce."""
        with self._using(source):
            logprobs: Tensor = self._policy.forward([batch], lambda model, b: model(b)[0])[0]
        return logprobs.cpu()

    def save(self, folder: Path) -> None:
        """Write the policy as a folder that transformers (with LoRA: peft) loads: the kept weights, else the average,
        else the current ones. Rank 0 writes; every rank must call it."""
        if self._kept is not None:
            write_model(self._policy, folder, self._folders[POLICY], self._kept)
        else:
            self.save_current(folder)
        critic = self._config.settings.critic_settings
        if CRITIC in self._engines and critic is not None and critic.save:
            save_critic(self._engines[CRITIC], self._folders[CRITIC], folder / "critic", self._context)

    def save_current(self, folder: Path) -> None:
        """Write the current policy (or the average) in the format of `save`. Rank 0 writes; every rank must call it."""
        with self._using("live" if self._average is None else "average"):
            write_model(self._policy, folder, self._folders[POLICY])
