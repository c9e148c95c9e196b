"""RL killed at any moment and run again ends, to the bit, where it would have ended."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.chat.encoding import encode_prompt, load_tokenizer
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.contract import Input
from rlhf_core.data.reading import read_rows
from rlhf_core.data.sampled import by_reward, comparisons
from rlhf_core.stages import rl
from rlhf_core.testing.stage import without_times
from tests.rlhf_core.rl.torch_engine import torch_engine
from tests.rlhf_core.stages.killed_runs import HeldContext, KeptCluster, finish, kill_when_held, start
from tests.rlhf_core.stages.supervised_runs import base_model, dataset

pytestmark = pytest.mark.endurance("rl-matrix")

Inputs = dict[str, Input]
OPTIMIZER = {"learning_rate": 1e-2}
COMMON = {
    "dataset": "prompts", "steps": 5, "prompts_per_step": 2, "sampling": {"max_tokens": 3},
    "rollout": {"max_length": 24, "skip_special_tokens": True}, "checkpoint": {"every_steps": 1},
    "keep": {"rollouts_every": 1, "policy_every": 2},
}  # fmt: skip
BLOCKS: dict[str, dict[str, Any]] = {
    "ppo": {
        "group_size": 2, "epochs": 2, "minibatches": 2, "critic": {"optimizer": OPTIMIZER, "warmup_steps": 1},
        "kl": {"coefficient": 0.1, "target": 0.5, "horizon": 4},
    },
    "grpo": {
        "group_size": 3, "filtering": {"low": 0.0, "high": 1.0, "max_rounds": 64}, "shaping": {"normalize": True},
        "kl": {"coefficient": 0.1, "target": 0.01, "horizon": 4},
    },
}  # fmt: skip
# Short completions are right. One call, in the middle of a step, holds.
REWARD = """
import pathlib, time
calls = 0

def reward(completions, prompts, rows):
    global calls
    calls += 1
    held = pathlib.Path(__file__).parent / "held"
    if calls == HOLDS and not held.exists():
        held.touch()
        time.sleep(60)
    right = [float(len(c) <= 1) for c in completions]
    return [{"reward": r + 0.01 * len(c), "score": r} for r, c in zip(right, completions)]
"""
MOMENTS = ("the middle of step 2", "before the manifest")


def config(algorithm: str) -> RLConfig:
    rewards = {"short": {"type": "function", "path": "reward.py"}}
    block = {"rewards": rewards, "optimizer": OPTIMIZER, **BLOCKS[algorithm]}
    hybrid = algorithm == "ppo"  # its states are wherever the last turn has left them
    engine = {"dtype": "float32", "zero_stage": 2 if hybrid else 0}
    average = {} if hybrid else {"ema_decay": 0.5}
    return RLConfig.model_validate(
        {**COMMON, "algorithm": algorithm, algorithm: block, "engine": engine, "hybrid": hybrid, **average}
    )


def run(folder: Path, inputs: Inputs, algorithm: str, moment: str, call: int = 0) -> None:
    """One attempt, in a process of its own. call: of the reward, the first is 1, that holds."""
    (folder / "reward.py").write_text(f"HOLDS = {call}\n{REWARD}")
    context = HeldContext(folder, inputs, moment)
    rl.run(config(algorithm), inputs, context, KeptCluster(folder, torch_engine))
    (folder / "logs.json").write_text(json.dumps([(step, without_times(line)) for step, line in context.logs]))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("inputs")
    prompts = [{"prompt": [{"role": "user", "content": f"say {letter}"}]} for letter in "abcdefg"]
    return {"model": base_model(folder / "base"), "dataset": dataset(folder / "data", prompts)}


def results(folder: Path) -> dict[str, bytes]:
    names = ("work/policy/model.safetensors", "shared.safetensors", "own.safetensors", "logs.json")
    kept = (path.relative_to(folder).as_posix() for path in (folder / "published").glob("*/*"))
    return {name: (folder / name).read_bytes() for name in (*names, *kept)}


def check_kept(published: Path, base: Path) -> None:
    """Rollouts of every step, as later stages read them, sampled by the policy that was kept before."""
    names = {*(f"rollouts.{step}" for step in range(1, 6)), "policy.2", "policy.4"}
    assert {path.name for path in published.iterdir()} == names
    pairs = 0
    for step in range(1, 6):
        rows = read_rows(published / f"rollouts.{step}")
        assert [row["step"] for row in rows] == [step, step]
        for row in rows:
            pairs += sum(by_reward(pair, 0.0) != "ties" for pair in comparisons(row, every=True, counts=Counter()))
            assert all(entry["rewards"]["short"] == float(len(entry["text"]) <= 1) + 0.01 * len(entry["text"])
                       for entry in row["completions"])  # fmt: skip
    assert pairs > 0
    model, tokenizer = AutoModelForCausalLM.from_pretrained(published / "policy.4"), load_tokenizer(base)
    for row in read_rows(published / "rollouts.5"):
        prompt = encode_prompt(tokenizer, row["prompt"])
        for entry in row["completions"]:
            ids = torch.tensor([prompt + entry["token_ids"]])
            with torch.no_grad():
                logprobs = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            expected = logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()
            assert entry["logprobs"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("algorithm", list(BLOCKS))
@pytest.mark.slow("a run that is killed, and one that is not")
def test_a_killed_run_ends_as_if_it_had_not_been(inputs: Inputs, algorithm: str, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    finish(start(run, whole, inputs, algorithm, ""))
    lines = json.loads((whole / "logs.json").read_text())
    assert [step for step, _ in lines] == [0, 1, 2, 3, 4]
    if algorithm == "ppo":
        check_kept(whole / "published", inputs["model"].folder)
    if algorithm == "grpo":
        assert max(line["filtering/rounds"] for _, line in lines) > 1
    assert len({line["kl_coefficient"] for _, line in lines}) > 2
    calls_before = sum(int(line.get("filtering/rounds", 1)) for _, line in lines[:2])
    for number, moment in enumerate(MOMENTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        call = calls_before + 1 if moment == MOMENTS[0] else 0
        kill_when_held(start(run, folder, inputs, algorithm, moment, call), folder)
        assert 1 <= (Checkpoints(LocalStore(folder / "store"), HeldContext.REF).newest_step() or 0) <= 2
        finish(start(run, folder, inputs, algorithm, ""))
        assert results(folder) == results(whole), moment
