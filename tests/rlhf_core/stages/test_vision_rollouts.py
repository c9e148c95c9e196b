"""Rollouts with images beside a run: kept as datasets, with a scripted engine and one rank."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.chat.image_messages import images_of
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.config.stages.sampled import BestOfNConfig
from rlhf_core.contract import Input
from rlhf_core.data.reading import dataset_info, read_rows
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.scripted import ScriptedEngine
from rlhf_core.stages import rl, sampled
from rlhf_core.stages.in_process import InProcessCluster
from tests.rlhf_core.pictures import vision_model
from tests.rlhf_core.stages.context import LocalContext, local_input
from tests.rlhf_core.stages.supervised_runs import context_of
from tests.rlhf_core.stages.vision_runs import RL, ROLLOUT, made, rows, valid

pytestmark = pytest.mark.parts

# Asks about a picture of its own where the row has none, and shows one of the other colour in each later turn.
SHOWS = """
from PIL import Image


class Shows:
    def reset(self, row):
        self.other = "blue" if row["answer"] == "red" else "red"
        return row["prompt"] if "images" in row["prompt"][0] else [self.asks()]

    def step(self, reply):
        return {"messages": [self.asks()], "reward": 0.5}

    def asks(self):
        return {"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (40, 30), self.other)}]}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Input:
    return vision_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Input:
    output = made(tmp_path_factory.mktemp("prompts") / "d", "prompts", rows(5))  # the last has no picture
    return local_input(output.folder, Kind.DATASET)


def run(folder: Path, inputs: dict[str, Input], **settings: Any) -> LocalContext:
    """Two completions of each prompt, `red` or `blue` by their seeds."""
    folder.mkdir(exist_ok=True)
    (folder / "shows.py").write_text(SHOWS)
    tokenizer = load_tokenizer(inputs["model"].folder)

    def script(prompt: Sequence[int], seed: int | None) -> Sequence[int]:
        return [tokenizer.convert_tokens_to_ids(("red", "blue")[(seed or 0) % 2]), tokenizer.eos_token_id]

    context = replace(context_of(folder / "work", inputs), user_files_root=folder)
    shows = {"type": "function", "path": "shows.py", "function": "Shows", "max_turns": 1}
    config = {
        **RL, "steps": 1, "prompts_per_step": 5, "environment": shows, "rollout": {**ROLLOUT, "max_images": 2},
        "probe_tolerance": 100.0, "grpo": {**RL["grpo"], "group_size": 2, "mismatch": None}, **settings,
    }  # fmt: skip
    engine = ScriptedEngine(script, max_length=64)
    rl.run(valid(RLConfig, config), inputs, context, InProcessCluster(lambda *_: nullcontext(InlineEngines(engine))))
    return context


def test_kept_rollouts_have_the_images_of_rows_and_of_the_environment(
    model: Input, prompts: Input, tmp_path: Path
) -> None:
    run(tmp_path, {"model": model, "dataset": prompts}, keep={"rollouts_every": 1})
    folder = tmp_path / "published" / "rollouts.1"
    asked = {digest for row in read_rows(folder) for digest in images_of(row["prompt"])}
    of_rows = {digest for row in read_rows(prompts.folder) for digest in images_of(row["prompt"])}
    assert (len(asked), len(of_rows), of_rows < asked) == (5, 4, True)
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (folder / "images").iterdir()}
    assert files == {digest: digest for digest in asked}
    assert dataset_info(folder)["images"] == 5
    best = sampled.best_of_n(
        BestOfNConfig(dataset="d"), {"dataset": local_input(folder, Kind.DATASET)}, LocalContext(tmp_path / "best")
    )
    assert {digest for row in read_rows(best.folder) for digest in images_of(row["messages"])} == asked
    assert {path.name for path in (best.folder / "images").iterdir()} == asked
