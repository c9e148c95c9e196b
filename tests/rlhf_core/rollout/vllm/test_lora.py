"""Adapters served by vLLM against peft."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer

from rlhf_core.config.engines.rollout import VllmEngineConfig
from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.errors import WeightSyncError
from rlhf_core.processes.child_process import ChildProcess
from rlhf_core.rollout.engine import EngineSettings, Request, RolloutEngine, SamplingParameters
from rlhf_core.rollout.proof import Expected, verify_weights
from tests.rlhf_core.rollout.engine_process import RemoteEngine
from tests.rlhf_core.rollout.models import (
    EOS,
    expected_logprobs,
    make_model,
    publish,
    publish_by_broadcast,
    publish_by_handle,
)

pytestmark = pytest.mark.parts

CONFIG = VllmEngineConfig(max_length=64, cpu_cache_gib=0.05, max_sequences=16)
LORA = LoraConfig(rank=3, alpha=6.0)  # vLLM has no kernel of rank 3: it pads to 8
PROBE = [[1, 5, 6, 7, 40, 41, 42], [1, 9, 11, 13, 15, 17, 19, 21, 23]]
SAMPLED = SamplingParameters(temperature=1.0, top_p=1.0, max_tokens=8, stop_token_ids=(EOS,))

Served = tuple[PeftModel, RemoteEngine]


@pytest.fixture(scope="module")
def served(engine_process: ChildProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("lora")
    base = make_model(folder, tied=True)
    settings = PeftConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, settings)
    engine = RemoteEngine(engine_process, folder, EngineSettings(CONFIG, "float32", seed=0, lora=LORA))
    yield model, engine
    engine.shutdown()


def train_a_little(model: PeftModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def test_before_the_first_publish_the_base_model_is_served(served: Served) -> None:
    model, engine = served
    expected = Expected(0, expected_logprobs(model, PROBE))
    assert verify_weights(engine.call(RolloutEngine.probe, PROBE), expected, 1e-4).difference < 1e-4


def test_each_published_adapter_is_served_as_peft_computes_it(served: Served) -> None:
    model, engine = served
    for version in (1, 2, 3):
        before = expected_logprobs(model, PROBE)
        train_a_little(model, seed=version)
        expected = expected_logprobs(model, PROBE)
        assert max(abs(a - b) for a, b in zip(before[0], expected[0], strict=True)) > 0.01
        digests = publish(engine, get_peft_model_state_dict(model), version, lora=LORA)
        proof = verify_weights(engine.call(RolloutEngine.probe, PROBE), Expected(version, expected, digests), 1e-4)
        assert proof.difference < 1e-4
        assert proof.not_read_back == ()
    assert (
        len(digests) == len(engine.call_on(0, RolloutEngine.served)) == 2 * 2 * 7
    )  # two factors of seven layers in two blocks
    prompt = [1, 5, 6]
    completion = engine.share(RolloutEngine.generate, [Request(prompt, SAMPLED, seed=11)])[0]
    expected = expected_logprobs(model, [[*prompt, *completion.token_ids]])
    assert completion.logprobs == pytest.approx(expected[0][len(prompt) :], abs=1e-4)
    assert completion.weight_version == 3


def test_a_rank_stabilised_adapter_is_served_at_its_scale(served: Served) -> None:
    model, engine = served
    stabilised = LORA.model_copy(update={"rank_stabilised": True})
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    for layer in layers:
        layer.scaling["default"] = stabilised.scaling
    expected = expected_logprobs(model, PROBE)
    digests = publish(engine, get_peft_model_state_dict(model), 3, lora=stabilised)
    proof = verify_weights(engine.call(RolloutEngine.probe, PROBE), Expected(3, expected, digests), 1e-4)
    assert proof.difference < 1e-4
    assert proof.not_read_back == ()
    for layer in layers:
        layer.scaling["default"] = LORA.scaling


def test_an_adapter_that_was_not_published_is_caught(served: Served) -> None:
    model, engine = served
    digests = publish(engine, get_peft_model_state_dict(model), 4, lora=LORA)
    train_a_little(model, seed=4)
    with pytest.raises(WeightSyncError, match="engine 0 does not serve version 4 as published: it serves each tensor"):
        verify_weights(
            engine.call(RolloutEngine.probe, PROBE), Expected(4, expected_logprobs(model, PROBE), digests), 1e-4
        )


@pytest.mark.parametrize(("send", "version"), [(publish_by_handle, 15), (publish_by_broadcast, 16)])
def test_an_adapter_arrives_over_every_transport(served: Served, send: Any, version: int) -> None:
    model, engine = served
    train_a_little(model, seed=version)
    digests = send(engine, get_peft_model_state_dict(model), version)
    expected = Expected(version, expected_logprobs(model, PROBE), digests)
    assert verify_weights(engine.call(RolloutEngine.probe, PROBE), expected, 1e-4).not_read_back == ()


def spoil(worker: Any, module: str, part: int) -> None:
    manager = worker.model_runner.lora_manager._adapter_manager
    manager.modules[module].lora_b_stacked[part][0, 0, 5, 2] += 1e-6


def test_one_element_of_an_adapter_is_named(served: Served) -> None:
    model, engine = served
    digests = publish(engine, get_peft_model_state_dict(model), 5, lora=LORA)
    expected = Expected(5, expected_logprobs(model, PROBE), digests)
    verify_weights(engine.call(RolloutEngine.probe, PROBE), expected, 1e-4)
    engine.in_worker(spoil, "model.layers.1.self_attn.qkv_proj", 2)
    named = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight has other values; its"
    with pytest.raises(WeightSyncError, match=f"version 5 as published: {named}"):
        verify_weights(engine.call(RolloutEngine.probe, PROBE), expected, 1e9)


def test_an_adapter_engine_sleeps_with_its_base_weights(served: Served) -> None:
    _, engine = served
    with pytest.raises(ValueError, match="must keep its base weights"):
        engine.call(RolloutEngine.sleep, keep_weights=False)
    before = engine.share(RolloutEngine.logprobs, PROBE)
    engine.call(RolloutEngine.sleep, keep_weights=True)
    engine.call(RolloutEngine.wake)
    assert engine.share(RolloutEngine.logprobs, PROBE) == before


def test_full_weights_are_refused_by_an_engine_of_adapters(served: Served) -> None:
    _, engine = served
    with pytest.raises(WeightSyncError, match="version 6 is not an adapter"):
        publish(engine, {"model.norm.weight": torch.ones(64)}, 6)
