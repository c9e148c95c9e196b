"""Engines whose workers share one model: each shard is served as published, read back, and missed where it is not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model, get_peft_model_state_dict
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.config.engines.rollout import VllmEngineConfig
from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.errors import WeightSyncError
from rlhf_core.models.stored import stored_state
from rlhf_core.processes.child_process import ChildProcess
from rlhf_core.rollout.child_engine import ChildEngine
from rlhf_core.rollout.digest import tensor_digest
from rlhf_core.rollout.engine import EngineSettings, Request, RolloutEngine, SamplingParameters
from rlhf_core.rollout.proof import Expected, Proof, verify_weights
from rlhf_core.rollout.publication import published_tensors
from tests.rlhf_core.rollout.engine_process import RemoteEngine
from tests.rlhf_core.rollout.models import (
    EOS,
    disturb,
    expected_logprobs,
    make_experts,
    make_model,
    publish,
    publish_by_handle,
)

pytestmark = [
    pytest.mark.endurance("architectures"),
    pytest.mark.slow("starts engines of several workers"),
    pytest.mark.timeout(600),
]

LIMITS: dict[str, Any] = {"max_length": 64, "cpu_cache_gib": 0.05, "max_sequences": 16}
ONE_DEVICE = VllmEngineConfig(**LIMITS)
PARALLEL = {
    "tensor": VllmEngineConfig(**LIMITS, tensor_parallel_size=2, cpus_per_engine=2),
    "pipeline": VllmEngineConfig(**LIMITS, pipeline_parallel_size=2, cpus_per_engine=2),
}
PROBE = [[1, 5, 6, 7, 40, 41, 42], [1, 9, 11, 13, 15, 17, 19, 21, 23], [1, 3]]
SAMPLED = SamplingParameters(temperature=1.0, top_p=1.0, max_tokens=20, stop_token_ids=(EOS,))
REQUESTS = [Request([1, 5, 6 + i], SAMPLED, seed=i) for i in range(6)]


@dataclass(frozen=True)
class Served:
    parallel: str
    model: PreTrainedModel
    engine: RemoteEngine
    folder: Path

    def published(self, version: int) -> Expected:
        return self.expected(version, publish(self.engine, stored(self.model), version))

    def expected(self, version: int, digests: Any) -> Expected:
        return Expected(version, expected_logprobs(self.model, PROBE), digests)

    def prove(self, expected: Expected, before: Expected | None = None, tolerance: float = 1e-4) -> Proof:
        return verify_weights(self.engine.call(RolloutEngine.probe, PROBE), expected, tolerance, before)


def stored(model: PreTrainedModel) -> dict[str, Tensor]:
    return dict(stored_state(model, model.state_dict()))


@pytest.fixture(scope="module", params=["tensor", "pipeline"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A stage of a pipeline has the embedding of a tied head alone, and with two workers both have the one key head."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(folder, tied=request.param == "pipeline")
    with ChildProcess("the engine's process") as process:
        engine = RemoteEngine(process, folder, EngineSettings(PARALLEL[request.param], "float32", seed=0))
        yield Served(request.param, model, engine, folder)
        engine.shutdown()


def test_initial_and_published_weights_are_read_back_from_every_worker(served: Served) -> None:
    initial = {name: tensor_digest(tensor) for name, tensor in published_tensors(served.model.state_dict()).items()}
    assert served.prove(served.expected(0, initial)).not_read_back == ()
    for version in (1, 8):  # by columns, and whole
        disturb(served.model, seed=version)
        assert served.prove(served.published(version)).not_read_back == ()
    disturb(served.model, seed=9)
    digests = publish_by_handle(served.engine, stored(served.model), 9, workers=2)
    assert served.prove(served.expected(9, digests)).not_read_back == ()


def test_samples_are_those_of_one_device(served: Served, engine_process: ChildProcess) -> None:
    served.published(9)
    one = ChildEngine(engine_process, served.folder, EngineSettings(ONE_DEVICE, "float32", seed=0))
    publish(one, stored(served.model), 9)
    expected, found = (e.call(RolloutEngine.generate, REQUESTS)[0] for e in (one, served.engine))
    one.shutdown()
    assert [list(each.token_ids) for each in found] == [list(each.token_ids) for each in expected]
    pairs = [pair for x, y in zip(found, expected, strict=True) for pair in zip(x.logprobs, y.logprobs, strict=True)]
    largest = max(abs(x - y) for x, y in pairs)
    assert largest <= (1e-5 if served.parallel == "tensor" else 0.0)


def keep_on_last_rank(worker: Any, module: str) -> None:
    """In vLLM's workers: remember what a layer computes with."""
    if worker.rank == 1:
        layer = worker.model_runner.get_model().get_submodule(module)
        weight = layer.quant_method.apply(layer, torch.eye(layer.input_size_per_partition), None).T.contiguous()
        worker.kept = lambda x, _, bias: nn.functional.linear(x, weight, bias)


def restore_on_last_rank(worker: Any, module: str) -> None:
    if worker.rank == 1:
        worker.model_runner.get_model().get_submodule(module).cpu_linear = worker.kept


@pytest.mark.parametrize("leaf", ["mlp.down_proj", "mlp.gate_up_proj", "self_attn.qkv_proj"])
@pytest.mark.parametrize("version", [11, 16])
def test_a_stale_shard_of_one_worker_is_named(served: Served, leaf: str, version: int) -> None:
    """Whether columns are read back, as for version 11, or all: version 16."""
    module = f"model.layers.1.{leaf}"
    before = served.published(version - 1)
    served.engine.in_worker(keep_on_last_rank, module)
    disturb(served.model, seed=version)
    expected = served.published(version)
    served.engine.in_worker(restore_on_last_rank, module)
    name = {"mlp.gate_up_proj": "mlp.up_proj", "self_attn.qkv_proj": "self_attn.q_proj"}.get(leaf, leaf)
    rank = " on rank 1" if served.parallel == "tensor" else ""
    with pytest.raises(WeightSyncError) as error:
        served.prove(expected, before)
    assert f"model.layers.1.{name}.weight{rank} still has the values of version {version - 1}" in str(error.value)
    assert "layers.0" not in str(error.value)
    assert "rank 0" not in str(error.value)
    assert served.prove(served.published(version + 1)).not_read_back == ()


def spoil_norm(worker: Any) -> None:
    if worker.rank == 1:
        worker.model_runner.get_model().model.norm.weight.data[-1] += 1e-6


def test_one_element_of_a_tensor_that_all_workers_have(served: Served) -> None:
    expected = served.published(20)
    served.engine.in_worker(spoil_norm)
    rank = " on rank 1" if served.parallel == "tensor" else ""
    with pytest.raises(WeightSyncError, match=rf"model\.norm\.weight{rank} has other values"):
        served.prove(expected, tolerance=1e9)


def drop_buffer(worker: Any) -> None:
    worker.model_runner.intermediate_tensors = None


def test_a_later_stage_without_its_buffer_is_an_error(served: Served) -> None:
    if served.parallel != "pipeline":
        pytest.skip("has no later stage")
    served.engine.in_worker(drop_buffer)
    with pytest.raises(KeyError):
        served.engine.call(RolloutEngine.generate, REQUESTS)


def test_experts_are_read_back_from_every_worker(tmp_path: Path) -> None:
    model = make_experts(tmp_path, "qwen3_moe")
    with ChildProcess("the engine's process") as process:
        engine = RemoteEngine(process, tmp_path, EngineSettings(PARALLEL["tensor"], "float32", seed=0))
        served = Served("tensor", model, engine, tmp_path)
        for version in (1, 8):
            disturb(model, seed=version)
            assert served.prove(served.published(version)).not_read_back == ()
        engine.shutdown()


def spoil_adapter(worker: Any) -> None:
    if worker.rank == 1:
        layers = worker.model_runner.lora_manager._adapter_manager.modules
        layers["model.layers.1.mlp.down_proj"].lora_a_stacked[0][0, 0, 0, 0] += 1e-6


@pytest.mark.parametrize("parallel", PARALLEL)
def test_adapters_are_read_back_from_every_worker(parallel: str, tmp_path: Path) -> None:
    lora = LoraConfig(rank=8, alpha=16.0)
    peft = PeftConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(make_model(tmp_path, tied=True), peft)
    disturb(model, seed=1, only="lora_")
    with ChildProcess("the engine's process") as process:
        engine = RemoteEngine(process, tmp_path, EngineSettings(PARALLEL[parallel], "float32", seed=0, lora=lora))
        digests = publish(engine, get_peft_model_state_dict(model), 1, lora=lora)
        expected = Expected(1, expected_logprobs(model, PROBE), digests)
        assert verify_weights(engine.call(RolloutEngine.probe, PROBE), expected, 1e-4).not_read_back == ()
        engine.in_worker(spoil_adapter)
        rank = " on rank 1" if parallel == "tensor" else ""
        with pytest.raises(WeightSyncError, match=rf"layers\.1\.mlp\.down_proj\.lora_A\.weight{rank} has other values"):
            verify_weights(engine.call(RolloutEngine.probe, PROBE), expected, 1e9)
        engine.shutdown()
