"""What an engine on CPU holds no longer than it needs it."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaForCausalLM

from rlhf_core.config.engines.rollout import VllmEngineConfig
from rlhf_core.processes.child_process import ChildProcess
from rlhf_core.rollout.engine import EngineSettings, RolloutEngine, SamplingParameters
from tests.rlhf_core.rollout.engine_process import RemoteEngine
from tests.rlhf_core.rollout.models import VOCABULARY, expected_logprobs, make_model, publish, requests

pytestmark = pytest.mark.parts

CONFIG = VllmEngineConfig(max_length=64, cpu_cache_gib=0.05, max_sequences=16)
ASKED = requests([[1, 5, 6, 7], [1, 9]], SamplingParameters(temperature=0.7, top_p=1, max_tokens=12, stop_token_ids=()))


def cache_in_memory(worker: Any) -> float:
    """In vLLM's worker: the share of the key-value cache's whole pages that are in memory."""
    storage = worker.model_runner.kv_caches[0].untyped_storage()
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = (storage.data_ptr() + storage.nbytes() - first) // mmap.PAGESIZE
    flags = (ctypes.c_ubyte * pages)()
    failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * mmap.PAGESIZE), flags)
    assert not failed
    return sum(flag & 1 for flag in flags) / pages


def packed_embeddings(worker: Any) -> list[str]:
    """In vLLM's worker: embeddings that have a packed copy of their weight."""
    import torch
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    return [
        name
        for name, layer in worker.model_runner.get_model().named_modules()
        if isinstance(layer, VocabParallelEmbedding)
        and not isinstance(layer, ParallelLMHead)
        and layer.cpu_linear is not torch.nn.functional.linear
    ]


@pytest.fixture(scope="module", params=["tied", "untied"])
def served(
    engine_process: ChildProcess, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LlamaForCausalLM, RemoteEngine]]:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(folder, tied=request.param == "tied")
    engine = RemoteEngine(engine_process, folder, EngineSettings(CONFIG, "float32", seed=0))
    yield model, engine
    engine.shutdown()


def test_the_cache_is_in_memory_only_as_far_as_it_is_filled(served: tuple[LlamaForCausalLM, RemoteEngine]) -> None:
    model, engine = served
    assert engine.in_worker(cache_in_memory) == 0, "vLLM has written all of it at its start"
    sampled = engine.share(RolloutEngine.generate, ASKED)
    assert 0 < engine.in_worker(cache_in_memory) < 0.7
    engine.call(RolloutEngine.forget)
    assert engine.in_worker(cache_in_memory) == 0
    assert engine.share(RolloutEngine.generate, ASKED) == sampled
    publish(engine, model.state_dict(), 1)
    assert engine.in_worker(cache_in_memory) == 0
    again = engine.share(RolloutEngine.generate, ASKED)
    assert [completion.token_ids for completion in again] == [completion.token_ids for completion in sampled]
    engine.call(RolloutEngine.sleep, keep_weights=True)
    assert engine.in_worker(cache_in_memory) == 0
    engine.call(RolloutEngine.wake)


def test_an_embedding_has_no_packed_copy(served: tuple[LlamaForCausalLM, RemoteEngine]) -> None:
    model, engine = served
    assert engine.in_worker(packed_embeddings) == []
    publish(engine, model.state_dict(), 2)
    assert engine.in_worker(packed_embeddings) == []


@pytest.mark.endurance("architectures")
def test_an_embedding_that_is_the_head_keeps_it(engine_process: ChildProcess, tmp_path: Path) -> None:
    """vLLM's Gemma 2 has no other head."""
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, max_position_embeddings=64, initializer_range=0.15,
        )
    ).eval()  # fmt: skip
    model.save_pretrained(tmp_path)
    engine = RemoteEngine(engine_process, tmp_path, EngineSettings(CONFIG, "float32", seed=0))
    assert engine.in_worker(packed_embeddings) == ["model.embed_tokens"]
    (found,), (expected,) = (
        engine.share(RolloutEngine.logprobs, [[1, 5, 6, 7, 40]]),
        expected_logprobs(model, [[1, 5, 6, 7, 40]]),
    )
    assert found == pytest.approx(expected, abs=1e-4)
    engine.shutdown()
