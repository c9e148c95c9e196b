"""A recipe that is right, its files, and ways to break them. Import it as tests.rlhf_core.recipes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
from safetensors.numpy import save_file

from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.chat.tokenizers import word_level_tokenizer
from rlhf_core.graph.graph import build_graph
from rlhf_core.pipeline.plan import PlannedNode, plan
from rlhf_core.recipe.loading import LoadedRecipe
from rlhf_core.stages.key import computing_libraries

QUESTION = "What is two and two?"  # 20 characters; as a prompt 20 + <bos> <user> <assistant>
OPTIMIZER = {"learning_rate": 1e-3}
RECIPE: dict[str, Any] = {
    "name": "check",
    "data": {
        "text": {"format": "text", "source": {"type": "files", "paths": ["text.jsonl"]}},
        "talks": {
            "format": "conversations",
            "source": {"type": "files", "paths": ["talks.jsonl"]},
            "on_overlap": "allow",
        },
        "pairs": {
            "format": "preferences",
            "source": {"type": "files", "paths": ["pairs.jsonl"]},
            "on_overlap": "allow",
        },
        "prompts": {
            "format": "prompts",
            "source": {"type": "files", "paths": ["prompts.jsonl"]},
            "on_overlap": "allow",
        },
        "unused": {"format": "text", "source": {"type": "files", "paths": ["nowhere.jsonl"]}},
    },
    "base": {"source": {"type": "scratch", "context_length": 64}},
    "pretrain": {"dataset": "text", "batch_size": 1, "max_length": 64, "optimizer": OPTIMIZER},
    "sft": {"dataset": "talks", "batch_size": 1, "max_length": 64, "optimizer": OPTIMIZER},
    "reward_model": {"dataset": "pairs", "batch_size": 1, "max_length": 64, "optimizer": OPTIMIZER},
    "rl": {
        "algorithm": "ppo",
        "dataset": "prompts",
        "steps": 1,
        "prompts_per_step": 1,
        "sampling": {"max_tokens": 8},
        "rollout": {"max_length": 64},
        "ppo": {
            "rewards": {"own": {"type": "function", "path": "rewards.py"}, "preference": {"type": "reward_model"}},
            "optimizer": OPTIMIZER,
            "critic": {"optimizer": OPTIMIZER, "start": "reward_model"},
        },
    },
    "evaluation": {
        "dataset": "prompts",
        "scorers": {"exact": {"type": "verifier"}},
        "sampling": {"max_tokens": 8},
        "rollout": {"max_length": 64},
    },
}
FILES = {
    "text.jsonl": [{"text": "x" * 500}],
    "talks.jsonl": [{"prompt": QUESTION, "completion": "four"}],
    "held_out.jsonl": [{"prompt": "What is one and one?", "completion": "two"}],
    "pairs.jsonl": [
        {"prompt": QUESTION, "chosen": "four", "rejected": "five"},
        {"prompt": "What is one and one?", "chosen": "zero", "rejected": "nine"},
    ],
    "judged.jsonl": [
        {"prompt": "Is it?", "completion": "yes", "label": True},
        {"prompt": "Is it not?", "completion": "no", "label": False},
    ],
    "steps.jsonl": [
        {"prompt": "Is it?", "steps": ["so", "yes"], "labels": [True, False]},
        {"prompt": "Is it not?", "steps": ["no"], "labels": [0.5]},
    ],
    "held-out.jsonl": [{"prompt": "Is it still?", "steps": ["no", "yes"], "labels": [0, 1]}],
    "rewarded.jsonl": [
        {"prompt": "Is it?", "completion": "yes", "reward": 1},
        {"prompt": "Is it not?", "completion": "no", "reward": 2},
        {"prompt": "Is it now?", "completion": "no", "reward": 1},
    ],
    "prompts.jsonl": [{"prompt": QUESTION, "answer": "four"}],
}

LAYER = {
    "input_layernorm": (64,), "post_attention_layernorm": (64,),
    "self_attn.q_proj": (64, 64), "self_attn.k_proj": (64, 64), "self_attn.v_proj": (64, 64),
    "self_attn.o_proj": (64, 64), "mlp.gate_proj": (12, 64), "mlp.up_proj": (12, 64), "mlp.down_proj": (64, 12),
}  # fmt: skip

Change = Callable[[dict[str, Any], Path], None]  # of the recipe, and of the files in its folder
Problems = Callable[[Change | None], list[str]]


def write(folder: Path, change: Change | None = None) -> str:
    """The path of the recipe in `folder`, with its files, after `change`."""
    for name, rows in FILES.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text("def reward(completions, prompts, rows):\n    return [0.0] * len(prompts)\n")
    recipe = copy.deepcopy(RECIPE)
    if change is not None:
        change(recipe, folder)
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))  # which is YAML too, with its keys in this order
    return str(path)


def validation(**settings: Any) -> dict[str, Any]:
    """A `rl.validation` section that is right, but for `settings`."""
    return {"dataset": "prompts", "every_steps": 1, "scorers": {"exact": {"type": "verifier"}}, **settings}


def both(*changes: Change) -> Change:
    def change(recipe: dict[str, Any], root: Path) -> None:
        for one in changes:
            one(recipe, root)

    return change


def put(*keys: str, value: Any) -> Change:
    """Sets recipe[key][key]... to `value`."""

    def change(recipe: dict[str, Any], root: Path) -> None:
        for key in keys[:-1]:
            recipe = recipe[key]
        recipe[keys[-1]] = copy.deepcopy(value)  # a later change may change it

    return change


def file(name: str, content: str) -> Change:
    def change(recipe: dict[str, Any], root: Path) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)

    return change


def gym(**source: Any) -> Change:
    settings = {"type": "reasoning_gym", "size": 5, "seed": 1, "tasks": {"spell_backward": {}}} | source
    return put("data", "prompts", "source", value=settings)


def model_folder(root: Path, context: int = 64, special_tokens: tuple[str, ...] = ()) -> None:
    folder = root / "model"
    tokenizer = word_level_tokenizer((), context)
    tokenizer.add_tokens([*special_tokens], special_tokens=True)
    tokenizer.save_pretrained(folder)
    rows = len(tokenizer)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": rows, "hidden_size": 64,
        "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": context, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (rows, 64), "model.norm.weight": (64,)}
    for layer in range(2):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in LAYER.items()}
    weights = {name: numpy.ones(shape, dtype=numpy.float32) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def planned(loaded: LoadedRecipe, repository: ArtifactRepository | None) -> list[PlannedNode]:
    libraries = computing_libraries()
    return plan(build_graph(loaded, libraries), repository)
