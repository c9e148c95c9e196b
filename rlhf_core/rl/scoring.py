"""Per-token log-probs, values and reward scores, by role, on the policy's ranks or ranks of a frozen model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from rlhf_core.contract import StageContext
from rlhf_core.division import Division
from rlhf_core.models.adapters import is_adapted, share_base
from rlhf_core.models.folders.folder import ADAPTER, read_config
from rlhf_core.models.folders.readers import STORED_LABELS, in_token_form
from rlhf_core.models.loading import load_causal_model, load_scalar_adapter, load_scalar_model, torch_dtype
from rlhf_core.models.packed import PolicyModel, ScalarModel
from rlhf_core.models.shift import from_before
from rlhf_core.models.step_labels import StepLabels
from rlhf_core.rl.roles import CRITIC, POLICY, REFERENCE, TEACHER, Role
from rlhf_core.training.build import build_engine, sharding
from rlhf_core.training.engine import TrainingEngine
from rlhf_core.training.group import WorkerGroup
from rlhf_core.training.randomness import seed_everything
from rlhf_core.training.reference import FrozenModel, Reference
from rlhf_core.types import LoggedBatch, PackedBatch

if TYPE_CHECKING:
    from peft import PeftModel

_ROLE_OF_SCORE = {"old_logprobs": POLICY, "ref_logprobs": REFERENCE, "teacher_logprobs": TEACHER, "values": CRITIC}


def role_of(score: str) -> str:
    """Return the role that computes a score: a field of Scored, or the role of a reward model itself."""
    return _ROLE_OF_SCORE.get(score, score)


@dataclass(frozen=True, slots=True)
class SharedBase:
    """The policy's base: the folder it was loaded from, and the PeftModel whose frozen weights others share."""

    folder: Path
    model: PeftModel


class Scores(Protocol):
    """A rank that scores tokens with its models."""

    def score(self, batches: Sequence[PackedBatch], names: Sequence[str]) -> list[dict[str, Tensor]]:
        """Return for each micro-batch the scores of its tokens by name, (n,) float32 on CPU. Every rank must call it.

        A name is a field of Scored (old_logprobs, ref_logprobs, teacher_logprobs, values: 0 where `loss_mask` is
        false), or the role of a reward model, for its raw score at every token. With the old_logprobs of a LoggedBatch
        come `entropies`: of micro-batches with a logged sequence, and 0 in the others.
        """

    def shares_prompts(self, role: str) -> bool:
        """Return whether the model of `role` computes a prefix shared by sequences of a micro-batch once."""


S = TypeVar("S", bound=Scores)
B = TypeVar("B", bound=PackedBatch)


class FrozenWorker:
    """One rank of frozen models apart from the policy. It has no state for checkpoints."""

    def __init__(self, temperature: float, context: StageContext, roles: Sequence[Role]) -> None:
        """Load the models. In the process of an RLWorker, it must be built first: both seed the random generators."""
        seed_everything(context.seed)
        self._temperature = temperature
        self._models: dict[str, TrainingEngine | Reference] = {}
        for role in roles:
            model = load_model(role, context.fetch(role.start).folder)
            self._models[role.name] = FrozenModel(model, offloaded=True) if role.offloaded else model

    def score(self, batches: Sequence[PackedBatch], names: Sequence[str]) -> list[dict[str, Tensor]]:
        """See Scores."""
        return scores(self._models, batches, names, self._temperature)

    def shares_prompts(self, role: str) -> bool:
        """See Scores."""
        return self._models[role].shares_prompts


def scored(
    ranks: WorkerGroup[S],
    division: Division[PackedBatch],
    names: Sequence[str],
    shards: Sequence[list[PackedBatch]] | None = None,
) -> dict[str, Tensor]:
    """Return Scores.score of a whole batch, (N,) float32 in the batch's order.

    shards: of the division, if they were sent before.
    """
    return joined(division, ranks.scatter(Scores.score, shards or division.split(), names))


def joined(division: Division[B], results: Sequence[Sequence[Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """Return the values of a whole batch by name, (N,). results: [replica][micro-batch] values (n,) by name."""
    return {name: division.join([[part[name] for part in replica] for replica in results]) for name in results[0][0]}


def load_model(role: Role, folder: Path, base: SharedBase | None = None) -> TrainingEngine:
    """Load the model of `role` from `folder`. base: the model whose weights it shares."""
    model = _load(role, folder, base)
    if base is not None:
        assert is_adapted(model)
        share_base(model, base.model)
    return build_engine(
        _wrapped(model, role, folder),
        engine=role.engine,
        optimizer=role.optimizer,
        total_steps=role.total_steps,
        dropout=role.dropout,
    )


def _wrapped(model: nn.Module, role: Role, folder: Path) -> nn.Module:
    if role.head == "causal":
        return PolicyModel(model)
    labels = read_config(folder).get(STORED_LABELS)
    return StepLabels(model, labels) if labels else ScalarModel(model, offset=role.value_scale.offset)


def _load(role: Role, folder: Path, base: SharedBase | None) -> nn.Module:
    engine, trained = role.engine, role.optimizer is not None
    dtype = torch_dtype(engine.dtype)
    if base is not None and not trained:
        return load_scalar_adapter(base.folder, folder / ADAPTER, dtype=dtype, attention=engine.attention)
    options: dict[str, Any] = {
        "dtype": dtype, "attention": engine.attention, "lora": role.lora,
        "gradient_checkpointing": engine.gradient_checkpointing and trained, "sharding": sharding(engine),
        "freeze_vision": engine.freeze_vision and trained,
    }  # fmt: skip
    if role.head == "causal" or (role.name != CRITIC and in_token_form(read_config(folder))):
        return load_causal_model(folder, **options)
    return load_scalar_model(folder, head_factor=role.value_scale.factor, **options)


def scores(
    models: Mapping[str, TrainingEngine | Reference],
    batches: Sequence[PackedBatch],
    names: Sequence[str],
    temperature: float,
) -> list[dict[str, Tensor]]:
    """Compute Scores.score with `models` by role. temperature: of log-probs."""

    def logprobs(model: nn.Module, batch: PackedBatch) -> Tensor:
        outputs: Tensor = model(batch, temperature=temperature, only=batch.loss_mask)[0]
        return outputs * batch.loss_mask

    def with_entropies(model: nn.Module, batch: LoggedBatch) -> tuple[Tensor, Tensor]:
        logged = batch.on_host.logged
        outputs, entropies, _ = model(
            batch, temperature=temperature, only=batch.loss_mask, with_entropy=logged is not None and bool(logged.any())
        )
        return outputs * batch.loss_mask, torch.zeros_like(outputs) if entropies is None else entropies

    def raw(model: nn.Module, batch: PackedBatch) -> Tensor:
        outputs: Tensor = model(batch)
        return outputs

    functions = {POLICY: logprobs, REFERENCE: logprobs, TEACHER: logprobs, CRITIC: state_values}
    scored: list[dict[str, Tensor]] = [{} for _ in batches]
    logged = [batch for batch in batches if isinstance(batch, LoggedBatch)]  # all or none
    for name in names:
        role = role_of(name)
        if name == "old_logprobs" and logged:
            for result, (values, entropies) in zip(scored, models[role].forward(logged, with_entropies), strict=True):
                result |= {name: values.cpu(), "entropies": entropies.cpu()}
            continue
        outputs = models[role].forward(batches, functions.get(role, raw))
        for result, values in zip(scored, outputs, strict=True):
            result[name] = values.cpu()
    return scored


def state_values(model: nn.Module, batch: PackedBatch) -> Tensor:
    """Return values, (N,): that of the state in which token t was chosen is the model's output after tokens < t."""
    scores: Tensor = model(batch)
    return from_before(scores) * batch.loss_mask
