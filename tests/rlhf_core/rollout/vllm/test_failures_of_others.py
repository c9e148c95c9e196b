"""Ways in which engines of other systems sampled with wrong weights, planted in ours: the proof finds each.

docs/design/proof.md lists the reports.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from transformers import LlamaForCausalLM

from rlhf_core.config.engines.rollout import VllmEngineConfig
from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.errors import WeightSyncError
from rlhf_core.processes.child_process import ChildProcess
from rlhf_core.rollout.engine import EngineSettings, RolloutEngine
from rlhf_core.rollout.proof import Expected, verify_weights
from rlhf_core.rollout.publication import publication_of
from rlhf_core.rollout.transport.folder import SharedFolder
from tests.rlhf_core.rollout.engine_process import RemoteEngine
from tests.rlhf_core.rollout.models import disturb, expected_logprobs, make_model, publish

pytestmark = pytest.mark.parts

CONFIG = VllmEngineConfig(max_length=64, cpu_cache_gib=0.05, max_sequences=16)
LORA = LoraConfig(rank=4, alpha=8.0)
PROBE = [[1, 5, 6, 7, 40, 41, 42], [1, 9, 11, 13, 15, 17, 19, 21, 23]]
AS_PUBLISHED = "it serves each tensor as it was published; its log-probs of the probe are off"


@contextmanager
def serving(process: ChildProcess, folder: Path, lora: LoraConfig | None = None) -> Iterator[RemoteEngine]:
    engine = RemoteEngine(process, folder, EngineSettings(CONFIG, "float32", seed=0, lora=lora))
    yield engine
    engine.shutdown()


@pytest.fixture
def full(
    engine_process: ChildProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LlamaForCausalLM, RemoteEngine]]:
    folder = tmp_path_factory.mktemp("full")
    model = make_model(folder, tied=False)
    with serving(engine_process, folder) as engine:
        yield model, engine


@pytest.fixture
def adapted(
    engine_process: ChildProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[PeftModel, RemoteEngine]]:
    folder = tmp_path_factory.mktemp("adapted")
    base = make_model(folder, tied=True)
    model = adapted_model(base)
    with serving(engine_process, folder, LORA) as engine:
        yield model, engine


def adapted_model(base: LlamaForCausalLM) -> PeftModel:
    settings = PeftConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(base, settings)


def prove(engine: RemoteEngine, expected: Expected, before: Expected | None = None) -> None:
    verify_weights(engine.call(RolloutEngine.probe, PROBE), expected, 1e-4, before)


def published(model: LlamaForCausalLM, engine: RemoteEngine, version: int) -> Expected:
    disturb(model, seed=version)
    digests = publish(engine, model.state_dict(), version)
    return Expected(version, expected_logprobs(model, PROBE), digests)


def train_and_publish(model: PeftModel, engine: RemoteEngine, version: int) -> Expected:
    disturb(model, seed=version, only="lora_")
    digests = publish(engine, get_peft_model_state_dict(model), version, lora=LORA)
    return Expected(version, expected_logprobs(model, PROBE), digests)


def keep(worker: Any) -> None:
    """Copy all that the engine computes with."""
    model = worker.model_runner.get_model()
    worker.kept = {name: value.detach().clone() for name, value in tensors_of(model)}


def restore(worker: Any) -> None:
    for name, value in tensors_of(worker.model_runner.get_model()):
        value.data.copy_(worker.kept[name])


def tensors_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and the factors of adapters, which vLLM keeps in plain attributes."""
    yield from model.named_parameters()
    for name, module in model.named_modules():
        for factors in ("lora_a_stacked", "lora_b_stacked"):
            for part, value in enumerate(getattr(module, factors, ())):
                yield f"{name}.{factors}.{part}", value


def test_a_wake_that_brings_the_weights_of_before_the_publish(full: tuple[LlamaForCausalLM, RemoteEngine]) -> None:
    """TRL #5312: with sleep mode the engine kept its old weights."""
    model, engine = full
    before = published(model, engine, 1)
    engine.in_worker(keep)
    expected = published(model, engine, 2)
    prove(engine, expected, before)
    engine.call(RolloutEngine.sleep, keep_weights=True)
    engine.call(RolloutEngine.wake)
    engine.in_worker(restore)
    with pytest.raises(WeightSyncError, match="still has the values of version 1"):
        prove(engine, expected, before)


def test_an_adapter_that_never_reaches_the_engine(adapted: tuple[PeftModel, RemoteEngine]) -> None:
    """verl #7495 and #3821: the engine sampled with an earlier adapter, which looks like staleness."""
    model, engine = adapted
    before = train_and_publish(model, engine, 1)
    prove(engine, before)
    engine.in_worker(keep)
    expected = train_and_publish(model, engine, 2)
    prove(engine, expected, before)
    engine.in_worker(restore)
    with pytest.raises(WeightSyncError, match="still has the values of version 1"):
        prove(engine, expected, before)


def forget_positions(worker: Any) -> None:
    """In place of what a sleep frees and a wake does not fill: buffers, which no publish brings."""
    tables = [
        module.cos_sin_cache
        for module in worker.model_runner.get_model().modules()
        if hasattr(module, "cos_sin_cache")
    ]  # fmt: skip
    assert tables
    for table in tables:
        table.zero_()


def test_buffers_that_are_gone_after_a_sleep(full: tuple[LlamaForCausalLM, RemoteEngine]) -> None:
    """verl #7904: soup of tokens after a sleep, with every weight right."""
    model, engine = full
    expected = published(model, engine, 1)
    engine.call(RolloutEngine.sleep, keep_weights=True)
    engine.call(RolloutEngine.wake)
    engine.in_worker(forget_positions)
    with pytest.raises(WeightSyncError, match=AS_PUBLISHED):
        prove(engine, expected)


def test_an_adapter_that_counts_twice(engine_process: ChildProcess, tmp_path_factory: pytest.TempPathFactory) -> None:
    """ms-swift #8233: after a resume the engine's base had the adapter in it, and the adapter was applied on top."""
    model = adapted_model(make_model(tmp_path_factory.mktemp("base"), tied=True))
    disturb(model, seed=1, only="lora_")
    merged = copy.deepcopy(model).merge_and_unload()
    merged.save_pretrained(folder := tmp_path_factory.mktemp("merged"))
    with serving(engine_process, folder, LORA) as engine:
        digests = publish(engine, get_peft_model_state_dict(model), 1, lora=LORA)
        expected = Expected(1, expected_logprobs(model, PROBE), digests)
        with pytest.raises(WeightSyncError, match=AS_PUBLISHED):
            prove(engine, expected)


def test_a_bit_that_changes_on_the_way(full: tuple[LlamaForCausalLM, RemoteEngine]) -> None:
    """verl #6813: corrupted weights in the buffer that the engine receives from."""
    model, engine = full
    before = published(model, engine, 1)
    disturb(model, seed=2)
    digests: Mapping[str, str]
    with publication_of(model.state_dict(), 2) as weights:
        assert isinstance(weights.transport, SharedFolder)
        (file,) = weights.transport.folder.glob("*.safetensors")
        data = bytearray(file.read_bytes())
        data[-8] ^= 1  # the lowest bit of the last tensor's last element but one
        file.write_bytes(data)
        engine.call(RolloutEngine.load_weights, weights.transport, weights.manifest)
        digests = weights.manifest.digests
    with pytest.raises(WeightSyncError, match=r"as published: model\.norm\.weight has other values"):
        prove(engine, Expected(2, expected_logprobs(model, PROBE), digests), before)
