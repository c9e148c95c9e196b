"""The recipes of real size fit the GPUs that they are named for, by the arithmetic of rlhf_core/pipeline/memory.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from deployments.cli.init import RECIPE_FILE, STARTERS, Method, filled, recipe_values
from rlhf_core.graph.graph import build_graph
from rlhf_core.pipeline.memory import Shape, memory
from rlhf_core.recipe.loading import load_recipe

GB = 1e9
LIBRARIES = 4 * GB  # of a GPU, and what the arithmetic leaves out
UNTIED: dict[str, Any] = {"tie_word_embeddings": False, "num_key_value_heads": 8, "head_dim": 128}
SHAPES: dict[str, dict[str, Any]] = {  # of their config.json
    "Qwen/Qwen2.5-1.5B-Instruct": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-8B": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "vocab_size": 151936, **UNTIED,
    },
    "Qwen/Qwen3-32B": {
        "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
        "vocab_size": 151936, **UNTIED,
    },
    "meta-llama/Llama-3.3-70B-Instruct": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "vocab_size": 128256, **UNTIED,
    },
}  # fmt: skip
# GPUs, GB of a worker and GB of each GPU of an engine, by stage.
PLANS = {
    "1.5b-on-24gb": {"sft": (1, 11.2, 0.0), "rl": (1, 11.2, 3.1), "evaluation.rl": (1, 0.0, 3.1)},
    "8b-qlora-on-24gb": {"sft": (1, 12.0, 0.0), "evaluation.sft": (1, 0.0, 16.7)},
    "8b-on-80gb": {"sft": (1, 20.1, 0.0), "rl": (1, 20.1, 16.7), "evaluation.rl": (1, 0.0, 16.7)},
    "8b-ppo-on-8x80gb": {
        "sft": (8, 24.8, 0.0), "reward_model": (8, 24.8, 0.0), "rl": (8, 57.3, 16.7), "evaluation.rl": (8, 0.0, 16.7),
    },
    "32b-on-8x80gb": {"sft": (8, 36.8, 0.0), "rl": (8, 61.3, 16.5), "evaluation.rl": (8, 0.0, 16.5)},
    "70b-on-32x80gb": {"sft": (32, 57.8, 0.0), "rl": (32, 71.1, 35.4), "evaluation.rl": (32, 0.0, 35.4)},
}  # fmt: skip


# 70 B on 2 x 8 GPUs, as docs/operate/scale.md has it: GB of a worker and of each GPU of an engine.
OF_16 = (
    *(f"{stage}.placement.workers=16" for stage in ("sft", "rl")), "rl.hybrid=true",
    *(f"{stage}.rollout={{max_length: 2048, engines: 2, gpus_per_engine: 8, tensor_parallel_size: 8}}"
      for stage in ("rl", "evaluation")),
)  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "worker"),
    [("engine.zero_stage=3", 97.5), ("lora={rank: 16}", 26.0), ("engine.offload_optimizer=true", 44.6)],
)
def test_70b_on_16_gpus(setting: str, worker: float) -> None:
    overrides = [f"base.source.revision={'f' * 40}", *OF_16, f"sft.{setting}", f"rl.{setting}"]
    graph = build_graph(load_recipe("70b-on-32x80gb", overrides), {"torch": "1"})
    shape = Shape.of(SHAPES["meta-llama/Llama-3.3-70B-Instruct"])
    assert shape is not None
    for stage in ("sft", "rl"):
        need = memory(graph[stage].config, shape)
        assert (graph[stage].config.reserves().gpus, round(need.worker / GB, 1)) == (16, worker)
    assert round(memory(graph["rl"].config, shape).engine / GB, 1) == 17.7


def test_the_memory_on_the_page_about_8_gpus(tmp_path: Path) -> None:
    """The starter with the page's settings, and the figures of the recipe with PPO, in GiB."""
    page = (Path(__file__).parents[2] / "docs/operate/eight-gpus.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    starter = filled((STARTERS / Method.grpo / RECIPE_FILE).read_text(), recipe_values("Qwen/Qwen3-8B", tmp_path))
    (tmp_path / "recipe.yaml").write_text(starter, encoding="utf-8")
    for name in ("questions.jsonl", "held_out.jsonl", "reward.py"):
        (tmp_path / name).write_text("", encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(f"extends: recipe\n{block}", encoding="utf-8")
    overrides = [f"base.source.revision={'f' * 40}", "rl.lora=null", "rl.grpo.optimizer.learning_rate=1e-6"]
    graph = build_graph(load_recipe(str(tmp_path / "mine.yaml"), overrides), {"torch": "1"})
    shape = Shape.of(SHAPES["Qwen/Qwen3-8B"])
    assert shape is not None
    need, alone = (memory(graph[name].config, shape) for name in ("rl", "evaluation.rl"))
    ppo = {name: worker * GB / 2**30 for name, (_, worker, _) in PLANS["8b-ppo-on-8x80gb"].items()}
    assert f"≈ {need.worker / 2**30:.2g} GiB            ≈ {need.engine / 2**30:.2g} GiB " in page
    assert f"≈ {alone.engine / 2**30:.2g} GiB      8 CPUs, 8 GPUs" in page
    assert f"predicts {ppo['sft']:.0f} GiB for SFT and the reward model, and {ppo['rl']:.0f} GiB for PPO" in page


@pytest.mark.parametrize("recipe", PLANS)
def test_each_stage_fits_its_gpus(recipe: str) -> None:
    """Ranks and engines that time-share GPUs have them in turn."""
    pinned = [f"base.source.revision={'f' * 40}"]  # there is no hub to ask
    graph = build_graph(load_recipe(recipe, pinned), {"torch": "1"})
    source: Any = graph["base"].config
    shape = Shape.of(SHAPES[source.source.repository])
    assert shape is not None
    needs = {name: memory(graph[name].config, shape) for name in PLANS[recipe]}
    plans = {
        name: (-(-graph[name].config.reserves().gpus // 1), round(need.worker / GB, 1), round(need.engine / GB, 1))
        for name, need in needs.items()
    }
    assert plans == PLANS[recipe]
    (device,) = re.findall(r"(\d+)gb$", recipe)
    for need in needs.values():
        assert max(need.worker, need.engine) < int(device) * GB - LIBRARIES
