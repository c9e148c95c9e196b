"""What tests/rlhf_core/training/test_sharded_loading.py asks of each of two ranks.

Each case is loaded twice, whole on every rank and sharded. FOLDER holds the models that the cases name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.division import Division
from rlhf_core.metrics import LossAndMetrics, Sum
from rlhf_core.models.loading import load_causal_model, load_scalar_model, torch_dtype
from rlhf_core.models.packed import PolicyModel, ScalarModel
from rlhf_core.models.sharded_loading import Sharding
from rlhf_core.training.build import sharding
from rlhf_core.training.deepspeed_engine import DeepSpeedEngine
from rlhf_core.training.distributed import join_group
from rlhf_core.training.saving import write_model
from rlhf_core.types import PackedBatch
from tests.rlhf_core.training.ranks import Answer, write_answers
from tests.rlhf_core.training.tiny_engine import MUON, OPTIMIZER, TOKENS, batch

LORA = LoraConfig(rank=2)
# The model, how it is loaded, and how it is run.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tied": ("tied", {}, {"optimizer": MUON}),  # whose groups depend on shapes
    "experts with an adapter": ("experts", {"lora": LORA}, {"dtype": "float32"}),
    "frozen": ("untied", {}, {"optimizer": None, "offload_parameters": True, "dtype": "float32"}),
    "head": ("scalar", {"head_factor": 2.0}, {"dtype": "float32"}),
    "fresh head with an adapter": ("tied", {"lora": LORA, "seed": 7, "head_factor": 0.5}, {}),
}


def load(folder: Path, case: str, shared_by: Sharding | None) -> nn.Module:
    name, options, _ = CASES[case]
    loads: Any = load_scalar_model if "head" in case else load_causal_model
    dtype = torch_dtype(engine_of(case).dtype)
    model: nn.Module = loads(folder / name, dtype=dtype, attention="sdpa", sharding=shared_by, **options)
    return model


def engine_of(case: str) -> EngineConfig:
    settings = {name: value for name, value in CASES[case][2].items() if name != "optimizer"}
    return EngineConfig.model_validate({"zero_stage": 3, **settings})


def started(model: nn.Module, case: str) -> DeepSpeedEngine:
    wrapped = ScalarModel(model) if "head" in case else PolicyModel(model, chunk_elements=100)
    optimizer = CASES[case][2].get("optimizer", OPTIMIZER)
    return DeepSpeedEngine(wrapped, engine=engine_of(case), optimizer=optimizer, total_steps=4)


def outputs(model: nn.Module, part: PackedBatch) -> Tensor:
    result = model(part)
    return result if isinstance(result, Tensor) else result[0]


def loss(model: nn.Module, part: PackedBatch) -> LossAndMetrics:
    value = -(outputs(model, part) * part.loss_mask).sum() / TOKENS
    return value, {"loss": Sum(value)}


@torch.no_grad()
def whole(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """All parameters, and all buffers."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name] = parameter.detach().cpu().clone()
    return found | {f"buffer {name}": buffer.cpu().clone() for name, buffer in engine.module.named_buffers()}


def run(model: nn.Module, case: str, folder: Path, rank: int) -> dict[str, Any]:
    engine = started(model, case)
    parts = Division.of(batch(), replicas=2, tokens_per_micro_batch=6).split()[rank]
    found: dict[str, Any] = {"before": whole(engine), "outputs": torch.cat(engine.forward(parts, outputs))}
    if engine.is_trained:
        steps = [engine.step(parts, loss) for _ in range(2)]
        found |= {"losses": torch.tensor([step.means["loss"] for step in steps])}
        found |= {"norms": torch.tensor([step.gradient_norm for step in steps]), "after": whole(engine)}
    write_model(engine, folder, None)
    return found


def different(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What the two runs do not have in common, to the bit."""
    assert one.keys() == other.keys()
    found = []
    for name, value in one.items():
        if isinstance(value, dict):
            found += [f"{name}: {key}" for key in different(value, other[name])]
        elif value.dtype != other[name].dtype or not torch.equal(value, other[name]):
            found.append(name)
    return found


def compared(rank: int, folder: Path) -> Iterator[Answer]:
    for case in CASES:
        runs, drawn = [], []
        for way in ("whole", "sharded"):
            torch.manual_seed(5)
            model = load(folder, case, sharding(engine_of(case)) if way == "sharded" else None)
            drawn.append(torch.rand(3))
            whole_names = [name for name, parameter in model.named_parameters() if not hasattr(parameter, "ds_id")]
            runs.append(run(model, case, folder / f"{case} {way} {rank}", rank))
        runs[0]["drawn"], runs[1]["drawn"] = drawn
        yield case, {"different": different(*runs), "whole": whole_names}, {}


def rounded(rank: int, folder: Path) -> Iterator[Answer]:
    """The buffers rounded to bfloat16, as those of a model that is built within `deepspeed.zero.Init`."""
    plain, model = load(folder, "frozen", None), load(folder, "frozen", sharding(engine_of("frozen")))
    for buffer in model.buffers():
        buffer.data = buffer.data.bfloat16()
    runs = [run(each, "frozen", folder / f"rounded {rank}", rank) for each in (plain, model)]
    yield "rounded", {"different": different(*runs)}, {}


def main(rank: int, address: str, folder: Path) -> None:
    torch.set_num_threads(1)
    join_group(rank=rank, size=2, address=address)
    scenarios = (compared, rounded)
    write_answers(rank, folder, (answer for scenario in scenarios for answer in scenario(rank, folder)))
