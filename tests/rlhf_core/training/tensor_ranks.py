"""The ranks of tests/rlhf_core/training/test_tensor_ranks.py, which share the weights of a model.

The folder holds the models that `write_models` writes; the test asks one rank alone the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.small_models import small_config, small_model
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.stages.language_models import SFTConfig
from rlhf_core.division import Division
from rlhf_core.errors import StageError
from rlhf_core.mesh import current_mesh
from rlhf_core.models.packed import PolicyModel
from rlhf_core.models.tensor_parallel import cut_of
from rlhf_core.rollout.digest import tensor_digest
from rlhf_core.supervised.examples import Shard
from rlhf_core.training.deepspeed_engine import DeepSpeedEngine
from rlhf_core.training.deepspeed_tensor import SharedLayers
from rlhf_core.training.distributed import join_group
from rlhf_core.types import PackedBatch
from tests.rlhf_core.rl.one_rank import rl_config, tiny_llama
from tests.rlhf_core.stages.context import LocalContext, local_input
from tests.rlhf_core.stages.supervised_runs import base_model
from tests.rlhf_core.training.mesh_ranks import equal, repeated_step
from tests.rlhf_core.training.ranks import Answer, write_answers
from tests.rlhf_core.training.sequence_ranks import Ranks, rl_step
from tests.rlhf_core.training.supervised_step import METHODS, one_step
from tests.rlhf_core.training.tiny_engine import (
    GRADIENT,
    OPTIMIZER,
    SEQUENCES,
    TOKENS,
    batch,
    build,
    loss,
    weights_of,
)

# Grouped heads; biases and a tied head; a norm of each head, and a tied head.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False}, "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True}, "starcoder2": {"residual_dropout": 0.2},
}  # fmt: skip
CLIPPED = GRADIENT.model_copy(update={"max_gradient_norm": 0.5})
STEPS: dict[str, dict[str, Any]] = {
    "zero 0": {"zero_stage": 0}, "zero 1": {"zero_stage": 1}, "zero 2": {"zero_stage": 2},
    "bfloat16": {"dtype": "bfloat16"},
    "offloaded": {"zero_stage": 2, "offload_optimizer": True, "gradient_checkpointing": True},
}  # fmt: skip
REFUSED = {
    "mixtral": {}, "gpt2": {}, "phi3": {},
    "three heads": {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3},
}  # fmt: skip


def write_models(folder: Path) -> None:
    for kind, settings in MODELS.items():
        torch.manual_seed(0)
        small_model(small_config(kind, **settings)).save_pretrained(folder / kind)
    tiny_llama(folder / "policy")
    base_model(folder / "words")
    base_model(folder / "other words", seed=1)


def share() -> list[PackedBatch]:
    mesh = current_mesh()
    return Division.of(batch(), replicas=mesh.data, tokens_per_micro_batch=6).split()[mesh.replica]


def whole_gradient(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """Of the last step, without ZeRO and with GRADIENT or CLIPPED."""
    assert engine.optimizer is not None
    found = {}
    for name, parameter in engine.module.model.named_parameters():
        moment, cut = engine.optimizer.state[parameter]["exp_avg"], cut_of(parameter)
        found[name] = moment.clone() if cut is None else cut.whole(moment)
    return found


def gradients(folder: Path) -> Iterator[Answer]:
    """Log-probs, gradients and their norms of whole models, and of preference learning and reward models."""
    for kind in MODELS:
        for optimizer, name in ((GRADIENT, kind), *([(CLIPPED, f"clipped {kind}")] if kind == "qwen3" else [])):
            engine = build(folder / kind, optimizer=optimizer, zero_stage=0)
            engine._dropout = False
            (logprobs,) = engine.forward([batch()], lambda model, part: model(part)[0])
            norm = engine.step(share(), loss).gradient_norm
            found = {"norm": norm, "size": sum(p.numel() for p in engine.module.parameters())}
            yield f"gradient {name}", found, {"logprobs": logprobs, **whole_gradient(engine)}
    mesh = current_mesh()
    for method in METHODS:
        work = folder / f"{method}{mesh.rank}"
        worker, metrics = one_step(method, folder, work, zero_stage=0, rank=mesh.replica, ranks=mesh.data)
        assert isinstance(worker.engine, DeepSpeedEngine)
        yield f"gradient {method}", {"norm": metrics.gradient_norm}, whole_gradient(worker.engine)


def steps(folder: Path) -> Iterator[Answer]:
    """Three steps and the weights after them; the first ones too, which are those of the folder, of a frozen model."""
    for name, settings in STEPS.items():
        engine = build(folder / "qwen3", optimizer=OPTIMIZER, **settings)
        norms = [engine.step(share(), loss).gradient_norm for _ in range(3)]
        weights = weights_of(engine)
        digests = {key: tensor_digest(weight) for key, weight in weights.items()}
        yield f"steps {name}", {"norms": norms, "digests": digests}, weights
    for dtype in ("float32", "bfloat16"):
        frozen = build(folder / "qwen3", optimizer=None, dtype=dtype)
        frozen.offload()
        frozen.reload()
        (logprobs,) = frozen.forward([batch()], lambda model, part: model(part)[0])
        yield f"frozen {dtype}", {"size": sum(p.numel() for p in frozen.module.parameters())}, {
            "logprobs": logprobs, **weights_of(frozen)
        }  # fmt: skip


def replacing(folder: Path) -> Iterator[Answer]:
    """Other weights for a while, as validation of a moving average, and float32 weights of bfloat16 ones."""
    engine = build(folder / "qwen2", dtype="bfloat16")
    engine.step(share(), loss)
    before, masters = weights_of(engine), {name: value.clone() for name, value in engine.master_weights()}
    layout = {name: list(tensor.shape) for name, tensor in engine.weight_layout().items()}
    with engine.replaced((name, value.flip(0)) for name, value in masters.items()):
        inside = weights_of(engine)
    expected = {name: value.flip(0).bfloat16() for name, value in masters.items()}
    found = {
        "layout": layout == {name: list(tensor.shape) for name, tensor in before.items()},
        "masters": equal({name: value.bfloat16() for name, value in masters.items()}, before),
        "inside": equal(inside, expected),
        "restored": equal(weights_of(engine), before),
    }
    yield "replacing", found, {}


def resuming(folder: Path) -> Iterator[Answer]:
    """Two steps with dropout. The second is repeated by a worker restored from what all ranks have written."""
    for zero in (0, 2):
        model = local_input(folder / "starcoder2", Kind.POLICY)
        context = LocalContext(folder / f"work{zero}", given_seed=3, artifacts={model.manifest.ref.path: model})
        config = SFTConfig.model_validate({
            "dataset": "d", "batch_size": 4, "max_length": 8, "optimizer": {"learning_rate": 0.01},
            "engine": {"dtype": "float32", "zero_stage": zero},
        })  # fmt: skip
        _, found = repeated_step(config, context, model, Shard(share(), TOKENS, len(SEQUENCES)))
        yield f"resuming {zero}", found, {}


def skipping(folder: Path) -> Iterator[Answer]:
    """A gradient that is not finite in the last rank's part of one weight alone."""
    for zero in (0, 2):
        engine = build(folder / "llama", zero_stage=zero)
        before = weights_of(engine)
        name, weight = next((n, p) for n, p in engine.module.named_parameters() if cut_of(p) is not None)
        if current_mesh().rank == current_mesh().size - 1:
            weight.register_hook(lambda gradient: gradient * float("nan"))
        skipped = engine.step(share(), loss).skipped
        yield f"skipping {zero}", {"skipped": skipped, "equal": equal(weights_of(engine), before), "of": name}, {}


def refused(folder: Path) -> Iterator[Answer]:
    for kind, settings in REFUSED.items():
        model = small_model(small_config("llama" if kind == "three heads" else kind, **settings))
        with pytest.raises(StageError) as error:
            engine_of(model)
        yield f"refused {kind}", {"reason": str(error.value)}, {}


def planted(folder: Path) -> Iterator[Answer]:
    """Logits of a part of the vocabulary, as DeepSpeed makes them of a tied head; and layers that are left whole."""

    def local_logits(layers: SharedLayers) -> dict[str, Any]:
        head = layers.model.model.get_output_embeddings()
        head.register_forward_hook(lambda module, inputs, logits: logits.chunk(2, -1)[current_mesh().shard])
        return settings(layers)

    def without_rows(layers: SharedLayers) -> dict[str, Any]:
        given = settings(layers)
        specs = [spec for spec in given["partition_config"]["layer_specs"] if spec["partition_type"] != "row"]
        return {**given, "partition_config": {"use_default_specs": False, "layer_specs": specs}}

    settings = SharedLayers.settings
    for fault in (local_logits, without_rows):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SharedLayers, "settings", fault)
            with pytest.raises(StageError) as error:
                engine_of(small_model(small_config("qwen2", tie_word_embeddings=True)))
        yield f"planted {fault.__name__}", {"reason": str(error.value)}, {}


def engine_of(model: Any) -> DeepSpeedEngine:
    config = EngineConfig(dtype="float32", zero_stage=0)
    return DeepSpeedEngine(PolicyModel(model), engine=config, optimizer=GRADIENT, total_steps=1)


def reinforcement(folder: Path) -> Iterator[Answer]:
    """What a driver asks of the ranks: policy, reference and critic. Each replica has a driver, which asks it alone."""
    if current_mesh().data > 1:
        return
    model = local_input(folder / "policy", Kind.POLICY)
    yield "rl", rl_step(ppo(current_mesh().tensor), model, folder / f"rl{current_mesh().rank}", Ranks), {}


def ppo(ranks: int) -> Any:
    engine = {"dtype": "float32", "zero_stage": 2, "tokens_per_micro_batch": 12, "tensor_parallel": ranks}
    kl = {"coefficient": 0.1, "place": "reward"}
    return rl_config("ppo", kl=kl, engine=engine, placement={"workers": ranks})


Scenarios = Mapping[str, Any]
ASKED_OF_ONE: Scenarios = {scenario.__name__: scenario for scenario in (gradients, steps, resuming)}
ALL: Scenarios = {**ASKED_OF_ONE, **{s.__name__: s for s in (replacing, skipping, refused, planted, reinforcement)}}


def main(rank: int, address: str, folder: Path, *sizes: str) -> None:
    """sizes: ranks, and of the mesh the sequence and the tensor axis."""
    torch.set_num_threads(1)
    size, sequence, tensor = map(int, sizes)
    join_group(rank=rank, size=size, address=address, sequence=sequence, tensor=tensor)
    asked = {"gradients": gradients} if sequence > 1 else ALL
    write_answers(rank, folder, chain.from_iterable(scenario(folder) for scenario in asked.values()))
