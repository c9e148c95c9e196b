"""Rollouts with images that outlive their step: kept as datasets, and waiting in the checkpoints of asynchronous RL.

With a scripted engine and one rank.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.artifacts.checkpoints import Checkpoint
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.chat.image_messages import images_of
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.config.stages.evaluation import EvaluationConfig
from rlhf_core.config.stages.sampled import BestOfNConfig
from rlhf_core.contract import Input
from rlhf_core.data.reading import dataset_info, read_rows
from rlhf_core.rl import loop
from rlhf_core.rl.async_collector import AsyncCollector
from rlhf_core.rl.loop import Loop
from rlhf_core.rl.stored import stored
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.scripted import ScriptedEngine
from rlhf_core.stages import evaluation, rl, sampled
from rlhf_core.stages.in_process import InProcessCluster
from rlhf_core.tracking.protocol import read_jsonl
from rlhf_core.training.checkpointing import DRIVER
from rlhf_core.types import Trajectory
from tests.rlhf_core.pictures import vision_model
from tests.rlhf_core.stages.context import LocalContext, local_input, wait_for_checkpoint
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


def run(folder: Path, inputs: dict[str, Input], turns: int = 1, **settings: Any) -> LocalContext:
    """Two completions of each prompt, `red` or `blue` by their seeds."""
    folder.mkdir(exist_ok=True)
    (folder / "shows.py").write_text(SHOWS)
    tokenizer = load_tokenizer(inputs["model"].folder)

    def script(prompt: Sequence[int], seed: int | None) -> Sequence[int]:
        return [tokenizer.convert_tokens_to_ids(("red", "blue")[(seed or 0) % 2]), tokenizer.eos_token_id]

    context = replace(context_of(folder / "work", inputs), user_files_root=folder)
    shows = {"type": "function", "path": "shows.py", "function": "Shows", "max_turns": turns}
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


def test_an_evaluation_has_the_images_of_its_prompts(model: Input, prompts: Input, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model.folder)
    engine = ScriptedEngine(lambda *_: [tokenizer.convert_tokens_to_ids("red"), tokenizer.eos_token_id])
    settings = valid(EvaluationConfig, {
        "dataset": "d", "scorers": {"exact": {"type": "verifier"}}, "samples": 0, "pass_at": [1], "rollout": ROLLOUT,
        "sampling": {"max_tokens": 4},
    })  # fmt: skip
    inputs = {"model": model, "dataset": prompts}
    cluster = InProcessCluster(lambda *_: nullcontext(InlineEngines(engine)))
    output = evaluation.run(settings, inputs, context_of(tmp_path, inputs), cluster)
    samples = {row["id"]: row.get("images", []) for row in read_jsonl(output.folder / "samples.jsonl")}
    assert samples == {row["id"]: images_of(row["prompt"]) for row in read_rows(prompts.folder)}
    named = {digest for images in samples.values() for digest in images}
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (output.folder / "images").iterdir()}
    assert len(files) == 4
    assert files == {digest: digest for digest in named}


def test_images_that_wait_in_a_checkpoint_are_trained_on_by_another_node(
    model: Input, prompts: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed while episodes of two turns wait, whose second one shows an image."""
    step, describe, trained = Loop._step, loop.describe, list[list[Trajectory]]()

    def killed(ours: Loop, number: int) -> dict[str, float]:
        if number == 1 and not resumed:
            raise KeyboardInterrupt
        metrics = step(ours, number)
        assert isinstance(ours.collector, AsyncCollector)
        while not resumed and len(ours.collector._ready) < 2:
            time.sleep(0.05)
        return metrics

    def seen(trajectories: Sequence[Trajectory], experience: Any) -> dict[str, float]:
        trained.append(list(trajectories))
        return describe(trajectories, experience)

    monkeypatch.setattr(Loop, "_step", killed)
    monkeypatch.setattr(loop, "describe", seen)
    settings = {
        "turns": 2, "steps": 2, "prompts_per_step": 2, "asynchronous": {"max_lag": 2}, "checkpoint": {"every_steps": 1},
        "rollout": {**ROLLOUT, "max_images": 2, "repeatable": False},
    }  # fmt: skip
    inputs, resumed = {"model": model, "dataset": prompts}, False
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, inputs, **settings)
    wait_for_checkpoint()
    checkpoints = LocalContext(tmp_path / "work").checkpoints
    newest = next(iter(checkpoints.newest()))
    assert isinstance(newest, Checkpoint)
    waiting = json.loads(checkpoints.read(newest, DRIVER))["collector"]["ready"]
    shutil.rmtree(tmp_path / "work" / "shown_images")
    resumed = True
    run(tmp_path, inputs, **settings)
    restored = [values for _, _, group in waiting[:2] for values in group]
    assert [json.loads(json.dumps(stored(trajectory))) for trajectory in trained[1]] == restored
    assert {len(trajectory.feedback_images) for trajectory in trained[1]} == {1}
    for trajectory in trained[1]:
        (shown,) = trajectory.feedback_images
        assert hashlib.sha256(Path(shown.path).read_bytes()).hexdigest() == Path(shown.path).name
