"""What is said of engines before they start is what vLLM itself takes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rlhf_core.config.engines.passed import VLLM
from rlhf_core.config.engines.rollout import VllmEngineConfig
from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.errors import StageError
from rlhf_core.processes.child_process import ChildProcess
from rlhf_core.rollout import child_engine
from rlhf_core.rollout.child_engine import ChildEngine
from rlhf_core.rollout.engine import EngineSettings, RolloutEngine, SamplingParameters
from rlhf_core.rollout.vllm.checks import (
    CPU_HEAD_SIZES,
    VOCABULARY_PADDING,
    cpu_cache_bytes,
    problems_on_cpu,
    require_image_libraries,
    split_problems,
)
from rlhf_core.rollout.vllm.passed import problems
from tests.rlhf_core.rollout.models import make_model, requests

pytestmark = pytest.mark.parts

BLOCK = 128 * 2 * 2 * 32 * 4  # bytes: 128 tokens, 2 layers, keys and values, one head of 32 float32 numbers


def vllms_head_sizes() -> list[int]:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes: list[int] = CPUAttentionBackend.get_supported_head_sizes()
    return sizes


def vllms_ranks() -> tuple[int, ...]:
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    return get_args(MaxLoRARanks)


def vllms_vocabulary_padding() -> int:
    from vllm.model_executor.layers.vocab_parallel_embedding import DEFAULT_VOCAB_PADDING_SIZE

    padding: int = DEFAULT_VOCAB_PADDING_SIZE
    return padding


def number_of_blocks(number: int) -> int:
    """Of an engine's cache. In its process."""
    return int(child_engine._engines[number]._llm.llm_engine.vllm_config.cache_config.num_gpu_blocks)


def vllms_arguments() -> list[str]:
    from vllm.engine.arg_utils import EngineArgs

    return list(EngineArgs.__dataclass_fields__)


def our_arguments(folder: str, settings: EngineSettings) -> list[str]:
    from rlhf_core.rollout.vllm.settings import engine_arguments

    return list(engine_arguments(Path(folder), json.loads((Path(folder) / "config.json").read_text()), settings))


def in_effect(number: int) -> tuple[int, int]:
    """Of an engine: tokens of a block of its cache, and of a forward. In its process."""
    config = child_engine._engines[number]._llm.llm_engine.vllm_config
    return config.cache_config.block_size, config.scheduler_config.max_num_batched_tokens


def test_what_is_known_of_vllm_is_vllms(engine_process: ChildProcess) -> None:
    from rlhf_core.rollout.vllm.settings import LORA_RANKS

    assert tuple(engine_process.call(vllms_head_sizes)) == CPU_HEAD_SIZES
    assert engine_process.call(vllms_ranks) == LORA_RANKS
    assert engine_process.call(vllms_vocabulary_padding) == VOCABULARY_PADDING


def test_the_least_cache_is_what_vllm_starts_with(engine_process: ChildProcess, tmp_path: Path) -> None:
    """One byte less, and vLLM refuses too: 0.32.0 wants room for a sequence, and a block that it keeps empty."""
    make_model(tmp_path, tied=True)
    model = json.loads((tmp_path / "config.json").read_text())
    least = VllmEngineConfig(max_length=64, cpu_cache_gib=2 * BLOCK / 2**30)
    assert list(problems_on_cpu(model, least, "float32")) == []
    ChildEngine(engine_process, tmp_path, EngineSettings(least, "float32", seed=0)).shutdown()
    less = VllmEngineConfig(max_length=64, cpu_cache_gib=(2 * BLOCK - 1) / 2**30)
    with pytest.raises(ValueError, match="has no room for one sequence"):
        ChildEngine(engine_process, tmp_path, EngineSettings(less, "float32", seed=0))
    assert list(problems_on_cpu(model, least.model_copy(update={"max_length": 127}), "float32")) == []
    assert len(list(problems_on_cpu(model, least.model_copy(update={"max_length": 128}), "float32"))) == 1
    assert list(problems_on_cpu({**model, "sliding_window": 8}, less, "float32")) == []


def test_the_cache_is_no_larger_than_all_sequences_fill(engine_process: ChildProcess, tmp_path: Path) -> None:
    make_model(tmp_path, tied=True, context=256)
    model = json.loads((tmp_path / "config.json").read_text())
    config = VllmEngineConfig(max_length=200, max_sequences=3)  # two blocks each, and the one that stays empty
    assert cpu_cache_bytes(model, config, "float32") == 7 * BLOCK
    assert (
        cpu_cache_bytes(model, config.model_copy(update={"cpu_cache_gib": 3 * BLOCK / 2**30}), "float32") == 3 * BLOCK
    )
    assert cpu_cache_bytes({**model, "layer_types": ["full_attention"] * 2}, config, "float32") == 7 * BLOCK
    for other in ({"sliding_window": 8}, {"layer_types": ["full_attention", "sliding_attention"]}):
        assert cpu_cache_bytes({**model, **other}, config, "float32") == 2**30
    engine = ChildEngine(engine_process, tmp_path, EngineSettings(config, "float32", seed=0))
    blocks = engine_process.call(number_of_blocks, engine._number)
    longest = SamplingParameters(temperature=1.0, top_p=1.0, max_tokens=196, stop_token_ids=())
    completions = engine.share(RolloutEngine.generate, requests([[1, 5, 6, 7]] * 6, longest))
    engine.shutdown()
    assert blocks == 7
    assert max(len(completion.token_ids) for completion in completions) == 196


@pytest.mark.parametrize(
    ("settings", "ranks", "part"),
    [
        ({"num_attention_heads": 4}, 3, "4 attention heads"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 3, "4 key-value heads"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, 6, "4 key-value heads"),
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, 4, None),  # each of two is on two GPUs
        ({"num_attention_heads": 6, "num_key_value_heads": 4, "kv_lora_rank": 16}, 6, None),
        ({"num_attention_heads": 4, "intermediate_size": 10}, 4, "intermediate_size of 10"),
        ({"num_attention_heads": 4, "intermediate_size": 10, "num_experts_per_tok": 2}, 4, None),
        ({"num_attention_heads": 3, "vocab_size": 100}, 3, "vocabulary, padded to 128 tokens"),
        ({"text_config": {"num_attention_heads": 4}}, 3, "4 attention heads"),
        ({}, 3, None),
    ],
)
def test_every_gpu_of_an_engine_has_an_equal_part(settings: dict[str, object], ranks: int, part: str | None) -> None:
    config = VllmEngineConfig(max_length=64, tensor_parallel_size=ranks, gpus_per_engine=ranks)
    said = [problem.partition(", of which")[0] for problem in split_problems(settings, config)]
    assert said == (
        [] if part is None else [f"rollout.tensor_parallel_size={ranks} does not divide the model's {part}"]
    )


def test_vllm_knows_each_refused_name_and_all_of_ours_are_refused(engine_process: ChildProcess, tmp_path: Path) -> None:
    assert set(VLLM.refused) - set(engine_process.call(vllms_arguments)) == set()
    make_model(tmp_path, tied=True)
    ours: set[str] = set()
    for lora in (None, LoraConfig(rank=2)):
        settings = EngineSettings(VllmEngineConfig(max_length=64), "float32", seed=0, lora=lora)
        ours |= set(engine_process.call(our_arguments, str(tmp_path), settings))
    assert ours - set(VLLM.refused) == {"max_num_batched_tokens"}


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"block_size": 16, "attention_config": {"flash_attn_version": 2}, "scheduling_policy": "priority"}, {}),
        ({"block_sise": 16}, {"block_sise": "vLLM has no such setting (did you mean `block_size`?)"}),
        ({"_api_process_count": 2}, {"_api_process_count": "vLLM has no such setting"}),
        ({"block_size": "16", "watermark": "low"}, {"block_size": "a valid integer", "watermark": "a valid number"}),
        ({"scheduling_policy": "lifo"}, {"scheduling_policy": "Input should be 'fcfs' or 'priority'"}),
        ({"compilation_config": {"moode": 3}}, {"compilation_config.moode": "vLLM has no such setting"}),
    ],
)
def test_vllm_says_what_it_does_not_know(
    engine_process: ChildProcess, settings: dict[str, object], wrong: dict[str, str]
) -> None:
    found = dict(engine_process.call(problems, settings))
    assert found.keys() == wrong.keys()
    for name, problem in wrong.items():
        assert problem in found[name]


def test_passed_settings_reach_the_engine_and_a_wrong_one_ends_its_start(
    engine_process: ChildProcess, tmp_path: Path
) -> None:
    make_model(tmp_path, tied=True)
    config = VllmEngineConfig(max_length=64, vllm={"block_size": 64, "max_num_batched_tokens": 512})
    engine = ChildEngine(engine_process, tmp_path, EngineSettings(config, "float32", seed=0))
    assert engine_process.call(in_effect, engine._number) == (64, 512)
    engine.shutdown()
    wrong = VllmEngineConfig(max_length=64, vllm={"block_sise": 64})
    with pytest.raises(ValueError, match=r"rollout\.vllm\.block_sise: vLLM has no such setting"):
        ChildEngine(engine_process, tmp_path, EngineSettings(wrong, "float32", seed=0))


def test_a_library_that_vllm_lacks_for_images_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)  # its import fails
    require_image_libraries({"model_type": "idefics3"})
    with pytest.raises(StageError, match=r"vLLM needs torchvision to serve a qwen2_5_vl, and it cannot be imported"):
        require_image_libraries({"model_type": "qwen2_5_vl"})


def test_attention_to_whole_images_is_not_served_on_cpu() -> None:
    """Log-probs of a small Gemma 3 were 0.01 to 0.04 off the trainer's."""
    config = VllmEngineConfig(max_length=64)
    (problem,) = problems_on_cpu({"model_type": "gemma3"}, config, "float32")
    assert problem.startswith("on CPU vLLM lets a token of an image see those before it alone, and this model all of")
    assert list(problems_on_cpu({"model_type": "qwen3_vl"}, config, "float32")) == []
