"""What tests/rlhf_core/training/test_two_ranks.py asks of each of two ranks.

FOLDER holds the models `dense` and `experts`; each rank leaves its answers there, as numbers and tensors by name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.config.stages.distillation import DistillationConfig
from rlhf_core.config.stages.language_models import SFTConfig
from rlhf_core.division import Division, filler
from rlhf_core.losses.load_balancing import load_balancing_loss
from rlhf_core.metrics import LossAndMetrics, Max, Sum, TokenMean
from rlhf_core.models import layouts
from rlhf_core.models.distillation import StudentModel
from rlhf_core.rl.roles import roles
from rlhf_core.rl.worker import RLWorker
from rlhf_core.supervised.distillation import DistillationWorker
from rlhf_core.supervised.examples import Shard
from rlhf_core.supervised.sft import LanguageModelWorker
from rlhf_core.training.deepspeed_engine import DeepSpeedEngine
from rlhf_core.training.distributed import join_group
from rlhf_core.training.metrics import StepMetrics, over_steps
from rlhf_core.training.routing import step_routing
from rlhf_core.types import PackedBatch
from tests.rlhf_core.laid_out import LAYOUTS, use_layout
from tests.rlhf_core.stages.context import LocalContext, local_input
from tests.rlhf_core.training.mixed_images import SPLITS, picture_and_text, trained_on_images
from tests.rlhf_core.training.ranks import Answer, write_answers
from tests.rlhf_core.training.supervised_step import METHODS, one_step
from tests.rlhf_core.training.tiny_engine import (
    GRADIENT,
    MUON,
    OPTIMIZER,
    SEQUENCES,
    TOKENS,
    batch,
    build,
    gradient,
    loss,
    weights_of,
)


def share(rank: int, tokens_per_micro_batch: int) -> list[PackedBatch]:
    return Division.of(batch(), replicas=2, tokens_per_micro_batch=tokens_per_micro_batch).split()[rank]


def metrics(rank: int, folder: Path) -> Iterator[Answer]:
    def reporting(model: nn.Module, part: PackedBatch) -> LossAndMetrics:
        value, _ = loss(model, part)
        return value, {
            "micro_batches": Sum(torch.tensor(1.0)),
            "rank": Max(torch.tensor(rank - 5.0)),
            "lucky": TokenMean((part.input_ids == 5).sum()),
        }

    engine = build(folder / "dense", zero_stage=0)
    yield "metrics", over_steps([engine.step(share(rank, 6), reporting)]), {}


def gradients(rank: int, folder: Path) -> Iterator[Answer]:
    """One share may be everything: then the other rank runs a filler."""
    alone = [batch()] if rank == 0 else [filler(batch())]
    for checkpointing, layout in [*((False, layout) for layout in LAYOUTS), ("selective", "tree")]:
        with pytest.MonkeyPatch.context() as patch:
            use_layout(patch, layout)
            engine = build(folder / "dense", optimizer=GRADIENT, zero_stage=0, gradient_checkpointing=checkpointing)
            for name, parts in {"alone": alone, "small": share(rank, 6), "large": share(rank, 1000)}.items():
                engine.step(parts, loss)
                yield f"gradient {checkpointing} {layout} {name}", {}, gradient(engine)


def skipping(rank: int, folder: Path) -> Iterator[Answer]:
    """The second step's gradient is not finite on rank 1 alone."""

    def broken(model: nn.Module, part: PackedBatch) -> LossAndMetrics:
        value, found = loss(model, part)
        return value * (float("nan") if rank == 1 else 1.0), found

    for stage in (0, 2):
        engine, undisturbed = (build(folder / "dense", zero_stage=stage) for _ in range(2))
        engine.step(share(rank, 6), loss)
        before = weights_of(engine)
        skipped = engine.step(share(rank, 6), broken)
        after = weights_of(engine)
        engine.step(share(rank, 6), loss)
        undisturbed.step(share(rank, 6), loss)
        undisturbed.counters = undisturbed.counters.after(applied=True)
        undisturbed.step(share(rank, 6), loss)
        yield (
            f"skipped {stage}",
            {
                "skipped": skipped.skipped,
                "in a row": engine.counters.skipped_updates,
                "unchanged": all(torch.equal(before[name], after[name]) for name in before),
                "goes on": _equal(weights_of(engine), weights_of(undisturbed)),
            },
            {},
        )


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def muon(rank: int, folder: Path) -> Iterator[Answer]:
    for stage in (2, 3):
        engine = build(folder / "dense", optimizer=MUON, zero_stage=stage)
        for _ in range(3):
            engine.step(share(rank, 6), loss)
        yield f"muon {stage}", {}, weights_of(engine)


def offload(rank: int, folder: Path) -> Iterator[Answer]:
    for name, settings in {
        "nothing": {"zero_stage": 0},
        "optimizer": {"zero_stage": 2, "offload_optimizer": True},
        "everything": {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True},
    }.items():
        engine = build(folder / "dense", optimizer=OPTIMIZER, **settings)
        for _ in range(2):
            found = engine.step(share(rank, 6), loss)
        yield f"offload {name}", over_steps([found]), weights_of(engine)


def communication(rank: int, folder: Path) -> Iterator[Answer]:
    engines = {
        name: build(folder / "dense", dtype="bfloat16", **settings)
        for name, settings in {
            "plain 2": {"zero_stage": 2},
            "overlapping 2": {"zero_stage": 2, "overlap_comm": True},
            "plain 3": {"zero_stage": 3},
            "overlapping 3": {"zero_stage": 3, "overlap_comm": True},
            "partitioned 3": {"zero_stage": 3, "hpz_partition_size": 2},
            "resumed 3": {"zero_stage": 3, "hpz_partition_size": 2},
        }.items()
    }
    resumed = engines.pop("resumed 3")
    resumed.forward(share(rank, 6), lambda model, part: model(part)[0])  # makes copies of weights that will be old
    for name, engine in engines.items():
        engine.step(share(rank, 6), loss)
        if name == "partitioned 3":
            resumed.load_state(copy.deepcopy(engine.state()))
    for name, engine in {**engines, "resumed 3": resumed}.items():
        last = engine.step(share(rank, 6), loss)
        other = {key: 1.5 * weight for key, weight in engine.master_weights()}
        with engine.replaced(other.items()):
            (replaced,) = engine.forward([batch()], lambda model, part: model(part)[0].sum())
        zero = engine._engine._config.zero_config
        numbers = {"loss": last.means["loss"], "replaced": float(replaced)}
        reached = {"overlap_comm": zero.overlap_comm, "hpz": zero.zero_hpz_partition_size}
        yield f"communication {name}", {"computed": numbers, "reached": reached}, weights_of(engine)


def experts(rank: int, folder: Path) -> Iterator[Answer]:
    engine = build(folder / "experts", optimizer=OPTIMIZER, zero_stage=3)
    for _ in range(2):
        found = balanced_step(engine, share(rank, 6))
    yield "experts", over_steps([found]), weights_of(engine)


def rows(rank: int, folder: Path) -> Iterator[Answer]:
    """A model that packing leaks in; the ranks need different numbers of forwards for their rows."""
    small, layouts._SMALL = layouts._SMALL, 0
    padding, layouts._MOST_PADDING = layouts._MOST_PADDING, 1.0
    for stage in (0, 3):
        engine = build(folder / "leaky", zero_stage=stage)
        parts = [batch()] if rank == 0 else [filler(batch())]
        forwards: list[int] = []
        engine.module.model.model.layers[0].register_forward_hook(
            lambda layer, inputs, output, to=forwards: to.append(1)
        )
        norm = engine.step(parts, loss).gradient_norm
        yield f"rows {stage}", {"layouts": str(engine.module.layouts), "forwards": len(forwards), "norm": norm}, {}
    layouts._SMALL, layouts._MOST_PADDING = small, padding


def dropout(rank: int, folder: Path) -> Iterator[Answer]:
    """Of each kind of worker: the weights that it starts with, and the same forward in train mode."""
    model = local_input(folder / "dense", Kind.POLICY)
    context = LocalContext(folder / f"work{rank}", given_seed=3, artifacts={model.manifest.ref.path: model})
    shared = {"dataset": "d", "lora": {"rank": 2, "dropout": 0.5}, "engine": {"dtype": "float32", "zero_stage": 0}}
    optimizer = {"learning_rate": 0.01}
    sft = SFTConfig.model_validate({**shared, "batch_size": 4, "max_length": 8, "optimizer": optimizer})
    grpo = {"rewards": {"exact": {"type": "verifier"}}, "group_size": 2, "optimizer": optimizer}
    rl = RLConfig.model_validate({
        **shared, "dropout": True, "algorithm": "grpo", "grpo": grpo, "steps": 4, "prompts_per_step": 2,
        "sampling": {"max_tokens": 4},
        "rollout": {"max_length": 8},
    })  # fmt: skip
    for name, worker in {
        "sft": LanguageModelWorker(sft, context, model.manifest.ref, 4),
        "rl": RLWorker(rl, context, roles(rl, {"model": model})),
    }.items():
        state = worker.parts()["model" if name == "sft" else "policy"].state().shared
        start = [float(tensor.double().sum()) for tensor in state.values()]
        engine = worker.engine if isinstance(worker, LanguageModelWorker) else worker._policy
        trained = {key: p for key, p in engine.module.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for key, parameter in trained.items():
                if "lora_B" in key:  # zeros at the start, which would hide the dropout
                    parameter.fill_(0.1)
            logprobs = engine.module.train()(batch())[0]
        yield f"dropout {name}", {"start": start, "logprobs": logprobs.tolist()}, {}


def validation(rank: int, folder: Path) -> Iterator[Answer]:
    """Of a new model; and two steps, of which the first is validated or not."""
    model = local_input(folder / "dense", Kind.POLICY)
    context = LocalContext(folder / f"work{rank}", given_seed=3, artifacts={model.manifest.ref.path: model})
    settings = {
        "dataset": "d", "batch_size": 4, "max_length": 8, "optimizer": {"learning_rate": 0.01},
        "lora": {"rank": 2, "dropout": 0.5}, "validation": {"dataset": "v", "every_steps": 1},
    }  # fmt: skip
    shard = Shard(share(rank, 6), TOKENS, len(SEQUENCES))
    config = SFTConfig.model_validate({**settings, "engine": {"dtype": "float32", "zero_stage": 3}})
    worker, other = (LanguageModelWorker(config, context, model.manifest.ref, 2) for _ in range(2))
    measured = worker.validate(shard)
    random = torch.get_rng_state()
    worker.train([shard])
    worker.validate(shard)
    worker.keep_weights()
    assert worker._kept is not None
    kept, at_that_step = {name: tensor.clone() for name, tensor in worker._kept.weights()}, weights_of(worker.engine)
    worker.train([shard])
    torch.set_rng_state(random)
    other.train([shard, shard])
    found = {
        "measured": measured,
        "kept": _equal(at_that_step, kept),
        "own": sum(tensor.numel() for tensor in worker._kept.state().own.values()),
        "all": sum(tensor.numel() for tensor in kept.values()),
        "unchanged": _equal(weights_of(worker.engine), weights_of(other.engine)),
    }
    yield "validation", found, {}


def distillation(rank: int, folder: Path) -> Iterator[Answer]:
    """One step; the ranks have different numbers of chunks, of which each gathers the weights of sharded heads."""
    for name, (student, teacher) in {"plain": (0, 0), "sharded": (3, 3)}.items():
        worker = distillation_worker(folder, folder / f"work{rank}", student, teacher)
        shard = Shard([batch()] if rank == 0 else [filler(batch())], TOKENS, len(SEQUENCES))
        (found,) = worker.train([shard])
        yield f"distillation {name}", {**found.means, "norm": found.gradient_norm}, weights_of(worker.engine)


def distillation_worker(folder: Path, work: Path, student: int, teacher: int) -> DistillationWorker:
    """student, teacher: the ZeRO stage of each."""
    models = [local_input(folder / name, Kind.POLICY) for name in ("dense", "teacher")]
    context = LocalContext(work, given_seed=3, artifacts={model.manifest.ref.path: model for model in models})
    config = DistillationConfig.model_validate({
        "dataset": "d", "batch_size": 4, "max_length": 8, "optimizer": OPTIMIZER, "temperature": 2.0,
        "engine": {"dtype": "float32", "zero_stage": student}, "divergence": "reverse_kl",
        "teacher": {"model": "t", "engine": {"dtype": "float32", "zero_stage": teacher}},
    })  # fmt: skip
    refs = [model.manifest.ref for model in models]
    worker = DistillationWorker(config, context, refs[0], 4, refs[1], config.temperature)
    assert isinstance(worker.engine.module, StudentModel)
    worker.engine.module._chunk_elements = 100
    return worker


def supervised(rank: int, folder: Path) -> Iterator[Answer]:
    """A step of each method whose loss reads more than one token, its sequences divided as in training."""
    for method, stage in [*((method, 0) for method in METHODS), ("preference", 3), ("reward_model", 3)]:
        worker, found = one_step(method, folder, folder / f"work{rank}", zero_stage=stage, rank=rank, ranks=2)
        numbers = {**found.means, "norm": found.gradient_norm}
        yield f"{method} {stage}", numbers, {} if stage else gradient(worker.engine)


def images(rank: int, folder: Path) -> Iterator[Answer]:
    """One rank has a picture, and the other text alone; and SFT of many sequences, in small buckets."""
    for stage in (0, 2):
        engine = build(folder / "vision" / "model", optimizer=GRADIENT, zero_stage=stage)
        norm = engine.step([picture_and_text(folder)[rank]], loss).gradient_norm
        yield f"images {stage}", {"norm": norm}, {} if stage else gradient(engine)
    for name, (settings, tokens) in SPLITS.items():
        trained = trained_on_images(folder, folder / f"work{rank}", settings, rank=rank, ranks=2, tokens=tokens)
        yield f"images {name}", {"losses": trained.losses, "pictures": trained.pictures}, weights_of(trained.engine)


def balanced_step(engine: DeepSpeedEngine, parts: list[PackedBatch]) -> StepMetrics:
    routing = step_routing(engine, parts)

    def balanced(model: nn.Module, part: PackedBatch) -> LossAndMetrics:
        logprobs, _, sums = model(part, only=part.loss_mask, with_routing=True)
        balance = load_balancing_loss(sums, routing)
        return balance - (logprobs * part.loss_mask).sum() / TOKENS, {"balance": Sum(balance)}

    return engine.step(parts, balanced)


SCENARIOS = {
    "essential": (metrics, gradients, skipping, muon, communication, experts, dropout, validation),
    "further": (offload, rows, distillation, supervised, images),
}


def main(rank: int, address: str, folder: Path, scenarios: str) -> None:
    torch.set_num_threads(1)
    join_group(rank=rank, size=2, address=address)
    write_answers(rank, folder, (answer for scenario in SCENARIOS[scenarios] for answer in scenario(rank, folder)))
