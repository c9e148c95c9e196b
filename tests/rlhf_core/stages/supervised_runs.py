"""What the tests of supervised stages share: a small base model, datasets, and one rank in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.stages.base_model import BaseModelConfig, ScratchModel
from rlhf_core.config.stages.trained import OptimizerConfig
from rlhf_core.contract import Input
from rlhf_core.data.reading import write_dataset
from rlhf_core.models.folders.folder import copy_tokenizer
from rlhf_core.stages import base
from rlhf_core.stages.in_process import InProcessCluster
from tests.rlhf_core.stages.context import LocalContext, local_input

ENGINE = EngineConfig(dtype="float32", zero_stage=0, tokens_per_micro_batch=64)
OPTIMIZER = OptimizerConfig(learning_rate=5e-3)
inline = InProcessCluster()


class NoCluster:
    """For stages that must fail before they start anything."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the stage has started {name}")


no_cluster: Any = NoCluster()


def base_model(folder: Path, *, tied: bool = True, heads: int = 2, seed: int = 0, hidden: int = 32) -> Input:
    """A Llama of 2 layers, with the word-level tokenizer."""
    source = ScratchModel(
        type="scratch", words=(), hidden_size=hidden, intermediate_size=64, layers=2, heads=heads, context_length=64,
        tie_word_embeddings=tied,
    )  # fmt: skip
    output = base.run(BaseModelConfig(source=source, dtype="float32"), {}, LocalContext(folder, given_seed=seed))
    return local_input(output.folder, Kind.BASE_MODEL)


def reward_model(folder: Path, base: Input, seed: int, mean: float, std: float) -> Input:
    torch.manual_seed(seed)
    classifier = AutoModelForSequenceClassification.from_pretrained(base.folder, num_labels=1)
    classifier.config.update({"reward_mean": mean, "reward_std": std})
    classifier.save_pretrained(folder)
    copy_tokenizer(base.folder, folder)
    return local_input(folder, Kind.REWARD_MODEL)


def dataset(
    folder: Path, rows: Sequence[Mapping[str, Any]], on_long_row: str = "error", on_bad_row: str = "error"
) -> Input:
    rows = [{"id": f"row{index}", **row} for index, row in enumerate(rows)]
    write_dataset(folder, rows, {"on_long_row": on_long_row, "on_bad_row": on_bad_row})
    return local_input(folder, Kind.DATASET)


def context_of(workdir: Path, inputs: Mapping[str, Input], seed: int | None = 0) -> LocalContext:
    return LocalContext(workdir, given_seed=seed, artifacts={i.manifest.ref.path: i for i in inputs.values()})


def conversations(count: int) -> list[dict[str, Any]]:
    """`ab` is answered `ba`; every third conversation has a second round."""
    rows = []
    for index in range(count):
        letters = chr(97 + index % 20) + chr(97 + (index * 7 + 3) % 20)
        messages = _round(letters) if index % 3 else _round(letters) + _round(letters + "x")
        rows.append({"messages": messages})
    return rows


def _round(letters: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": letters}, {"role": "assistant", "content": letters[::-1]}]


def pairs(count: int) -> list[dict[str, Any]]:
    """A completion without `z` is preferred to the same with one."""
    return [
        {
            "prompt": [{"role": "user", "content": f"say {index}"}],
            "chosen": "ok " + "abc"[index % 3],
            "rejected": "zz " + "abc"[index % 3],
            "margin": 0.5 if index % 2 else None,
        }
        for index in range(count)
    ]


def stored_config(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content
