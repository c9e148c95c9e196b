"""Mixture-of-experts models in vLLM: every expert of a publish is served, read back, and missed where it is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from transformers import PreTrainedModel

from rlhf_core.config.engines.rollout import VllmEngineConfig
from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.errors import WeightSyncError
from rlhf_core.models.adapters import add_lora
from rlhf_core.models.loading import load_causal_model
from rlhf_core.models.stored import stored_state
from rlhf_core.processes.child_process import ChildProcess
from rlhf_core.rollout.engine import EngineSettings, RolloutEngine
from rlhf_core.rollout.proof import Expected, Proof, verify_weights
from tests.rlhf_core.rollout.engine_process import RemoteEngine
from tests.rlhf_core.rollout.models import disturb, expected_logprobs, make_experts, publish

pytestmark = pytest.mark.endurance("architectures")

CONFIG = VllmEngineConfig(max_length=64, cpu_cache_gib=0.05, max_sequences=16)
PROBE = [[1, 5, 6, 7, 40, 41, 42], [1, 9, 11, 13, 15, 17, 19, 21, 23], [1, 3]]

Served = tuple[PreTrainedModel, RemoteEngine]


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen2_moe", "mixtral"])
def served(
    engine_process: ChildProcess, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A model as a training rank loads it, and an engine that serves it; a whole publish mends what a test spoils."""
    folder = tmp_path_factory.mktemp(request.param)
    make_experts(folder, request.param)
    model = load_causal_model(folder, dtype=torch.float32, attention="sdpa").eval()
    assert isinstance(model, PreTrainedModel)
    engine = RemoteEngine(engine_process, folder, EngineSettings(CONFIG, "float32", seed=0))
    yield model, engine
    engine.shutdown()


def published(model: PreTrainedModel, engine: RemoteEngine, version: int) -> Expected:
    digests = publish(engine, stored_state(model, model.state_dict()), version)
    return Expected(version, expected_logprobs(model, PROBE), digests)


def prove(engine: RemoteEngine, expected: Expected, before: Expected | None = None, tolerance: float = 1e-4) -> Proof:
    return verify_weights(engine.call(RolloutEngine.probe, PROBE), expected, tolerance, before)


def test_every_publish_of_all_experts_is_proven_by_each_tensor(served: Served) -> None:
    model, engine = served
    for version in (1, 2):
        disturb(model, seed=version)
        expected = published(model, engine, version)
        proof = prove(engine, expected)
        assert proof.not_read_back == ()
        assert proof.difference < 1e-5
    experts = {name for name in expected.digests if ".experts." in name}
    assert len(experts) == 2 * 4 * 3
    assert {tensor.published for tensor in engine.call_on(0, RolloutEngine.served)} == expected.digests.keys()


def leave_expert(worker: Any, expert: int) -> None:
    """In vLLM's worker: the next publishes leave one expert of the last layer with the values that it has now."""
    from rlhf_core.rollout.vllm.experts import experts_of

    (*_, (_, layer)) = experts_of(worker.model_runner.get_model())
    kept = {name: getattr(layer, name)[expert].clone() for name in ("w13_weight", "w2_weight")}
    reload = worker.worker.reload_weights

    def reload_others(weights_iterator: Any) -> None:
        reload(weights_iterator=weights_iterator)
        for name, values in kept.items():
            getattr(layer, name).data[expert].copy_(values)

    worker.worker.reload_weights = reload_others


def load_all(worker: Any) -> None:
    del worker.worker.reload_weights


def test_one_expert_that_is_not_refreshed_is_named(served: Served) -> None:
    """By a step so small that log-probs do not show it."""
    model, engine = served
    before = published(model, engine, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 2**-20)
    engine.in_worker(leave_expert, 2)
    expected = published(model, engine, 4)
    engine.in_worker(load_all)
    with pytest.raises(WeightSyncError, match="does not serve version 4 as published") as caught:
        prove(engine, expected, before, tolerance=1e9)
    stale = sorted(name for name in expected.digests if "layers.1." in name and ".experts.2." in name)
    assert len(stale) == 3
    named = str(caught.value).split("as published: ")[1].split("; its")[0].split(", ")
    assert sorted(named) == [f"{name} still has the values of version 3" for name in stale]
    prove(engine, published(model, engine, 5))


def keep_kernels(worker: Any) -> None:
    """In vLLM's worker: a publish no longer makes vLLM pack the experts again."""
    from rlhf_core.rollout.vllm import worker as vllm_worker

    worker.packed_before = vllm_worker.forget_kernels
    vllm_worker.forget_kernels = lambda model, unchanged: None


def rebuild_kernels(worker: Any) -> None:
    from rlhf_core.rollout.vllm import worker as vllm_worker

    vllm_worker.forget_kernels = worker.packed_before


def test_without_its_cure_vllm_reads_plain_experts_as_packed_ones(
    engine_process: ChildProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The trap of vLLM on CPU: after a reload the experts compute with scrambled weights, and no error tells."""
    folder = tmp_path_factory.mktemp("scrambled")
    make_experts(folder, "qwen2_moe")
    model = load_causal_model(folder, dtype=torch.float32, attention="sdpa").eval()
    assert isinstance(model, PreTrainedModel)
    engine = RemoteEngine(engine_process, folder, EngineSettings(CONFIG, "float32", seed=0))
    engine.in_worker(keep_kernels)
    expected = published(model, engine, 1)
    engine.in_worker(rebuild_kernels)
    with pytest.raises(WeightSyncError, match=r"experts.0.down_proj.weight has other values, .* and 16 more; its log-"):
        prove(engine, expected)
    prove(engine, published(model, engine, 2))
    engine.shutdown()


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_an_adapter_of_the_layers_beside_the_experts_is_served(
    engine_process: ChildProcess, tmp_path_factory: pytest.TempPathFactory, family: str
) -> None:
    folder, lora = tmp_path_factory.mktemp(family), LoraConfig(rank=4, alpha=8.0)
    model = add_lora(make_experts(folder, family), lora, "CAUSAL_LM")
    engine = RemoteEngine(engine_process, folder, EngineSettings(CONFIG, "float32", seed=0, lora=lora))
    for version in (1, 2):
        train_a_little(model, seed=version)
        digests = publish(engine, get_peft_model_state_dict(model), version, lora=lora)
        proof = prove(engine, Expected(version, expected_logprobs(model, PROBE), digests))
        assert proof.not_read_back == ()
    assert len(digests) == 2 * 2 * 4  # two factors of the attention's four layers in two blocks
    engine.shutdown()


@torch.no_grad()
def train_a_little(model: PeftModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
