"""`alignment try`, as a person calls it: SFT and RL in one process with vLLM in its child."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.artifacts.leases import LeaseRecord, lease_path
from rlhf_core.artifacts.manifest import Manifest, file_digest
from rlhf_core.config.stages.language_models import SFTConfig
from rlhf_core.contract import Input
from rlhf_core.pipeline.prepare import Prepared, prepare
from rlhf_core.stages import sft
from tests.rlhf_core.stages.supervised_runs import context_of, inline
from tests.terminals import in_terminal

pytestmark = pytest.mark.parts

ROOT = Path(__file__).parents[2]
ANSWERING = {"sampling": {"max_tokens": 4}, "rollout": {"max_length": 24, "cpu_cache_gib": 0.05, "engines": 2}}
EXACT = {"exact": {"type": "verifier", "kind": "exact"}}
RECIPE: dict[str, Any] = {
    "name": "small",
    "data": {
        name: {"format": data_format, "source": {"type": "files", "paths": [f"{name}.jsonl"]}}
        for name, data_format in (("talks", "conversations"), ("asked", "prompts"), ("held_out", "prompts"))
    }
    | {
        name: {"format": "text", "source": {"type": "function", "path": "rows.py", "function": name}}
        for name in ("slow", "broken")
    },
    "base": {
        "dtype": "float32",
        "source": {
            "type": "scratch", "hidden_size": 64, "intermediate_size": 64, "layers": 1, "heads": 2,
            "context_length": 32,
        },
    },
    "sft": {
        "dataset": "talks", "batch_size": 4, "max_length": 24, "max_steps": 2, "optimizer": {"learning_rate": 1e-2},
        "engine": {"dtype": "float32", "zero_stage": 0},
    },
    "rl": {
        "algorithm": "grpo", "dataset": "asked", "steps": 2, "prompts_per_step": 2, "hybrid": True, **ANSWERING,
        "grpo": {"rewards": EXACT, "group_size": 2, "optimizer": {"learning_rate": 1e-2}},
        "engine": {"dtype": "float32", "zero_stage": 2}, "placement": {"workers": 2, "cpus_per_worker": 0.5},
    },
    "evaluation": {
        "dataset": "held_out", "models": ["rl"], "scorers": EXACT, "samples": 2, "pass_at": [1, 2], **ANSWERING,
    },
    **{
        f"on_{name}": {
            "stage": "pretrain", "dataset": name, "model": "base", "batch_size": 4, "max_length": 24,
            "optimizer": {"learning_rate": 1e-2},
        }
        for name in ("slow", "broken")
    },
    "tracking": {"wandb": False},
}  # fmt: skip
ROWS = """
import time

def slow():
    print("at work", flush=True)
    time.sleep(600)

def broken():
    raise RuntimeError("no rows today")
"""
# The command: with a breakpoint in a method of the ranks where it comes to them, or with an engine that starts at once.
PROGRAM = """
import os, sys
if __name__ == "__main__":
    from deployments.cli.main import app

    if "QUICK_ENGINE" in os.environ:
        from rlhf_core.stages.in_process import InProcessCluster
        from tests.rlhf_core.rl.torch_engine import torch_engine

        InProcessCluster.__init__.__defaults__ = (torch_engine,)
    elif "rl" in sys.argv:
        from rlhf_core.supervised.sft import LanguageModelWorker

        train = LanguageModelWorker.train

        def stopping(self, steps):
            breakpoint()
            return train(self, steps)

        LanguageModelWorker.train = stopping
    try:
        app(sys.argv[1:])
    finally:
        print("loaded", *{"ray", "prefect", "vllm"} & sys.modules.keys())
"""
HOOK = """
import os, sys, threading

def hit():
    main = threading.current_thread() is threading.main_thread()
    print("breakpoint", os.getpid(), main, sys.stdin.readline().strip(), flush=True)
"""


GAME = """
class Environment:
    def step(self, reply):
        breakpoint()
        return {"reward": 1.0, "done": True}
"""
JUDGE = """
def reward(completions, prompts, rows):
    breakpoint()
    return [float(len(c)) for c in completions]
"""


@dataclass(frozen=True)
class Workplace:
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{self.folder}", "PYTHONBREAKPOINT": "hook.hit",
            "ALIGNMENT_CACHE": str(self.folder / "cache"), "ALIGNMENT_WORKDIR": str(self.folder / "work"),
            "ALIGNMENT_STACK_DIR": str(self.folder / "no stack"), "ALIGNMENT_STORE": "s3://nowhere/at-all",
        }  # fmt: skip

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(self.folder / "program.py"), "try", "small.yaml", *arguments], cwd=self.folder,
            env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    @property
    def prepared(self) -> Prepared:
        return prepare(str(self.folder / "small.yaml"), [], store=str(self.folder / "outputs" / "try"))

    def manifest(self, name: str) -> Manifest:
        prepared = self.prepared
        manifest = prepared.repository.manifest(prepared.node(name).ref)
        assert manifest is not None, name
        return manifest

    def fetched(self, name: str) -> Input:
        manifest = self.manifest(name)
        return Input(manifest, self.prepared.repository.fetch(manifest.ref, self.folder / "cache"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    folder = tmp_path_factory.mktemp("place")
    rows = {
        "talks": [{"prompt": f"t{i}", "completion": f"{i}"} for i in range(8)],
        "asked": [{"prompt": f"a{i}", "answer": f"{i}"} for i in range(4)],
        "held_out": [{"prompt": f"h{i}", "answer": f"{i}"} for i in range(4)],
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    for name, text in (("small.yaml", json.dumps(RECIPE)), ("rows.py", ROWS), ("program.py", PROGRAM)):
        (folder / name).write_text(text)
    (folder / "hook.py").write_text(HOOK)
    return Workplace(folder)


@pytest.fixture(scope="module")
def tried(place: Workplace) -> tuple[int, str]:
    """Process and output of `alignment try small.yaml rl`."""
    with place.start("rl") as process:
        output, _ = process.communicate("continue\n" * 9)
    assert process.returncode == 0, output
    return process.pid, output


@pytest.mark.endurance("two-nodes")
@pytest.mark.slow("runs stages with vLLM, as `alignment try` does")
def test_sft_and_rl_without_ray_prefect_or_a_server(place: Workplace, tried: tuple[int, str]) -> None:
    output = tried[1]
    computed = [line.partition(":")[0] for line in output.splitlines() if ": computed in " in line]
    assert set(computed) > {"data.talks", "overlap.talks", "base", "sft"}
    assert computed[-1] == "rl"
    assert computed.index("overlap.talks") < computed.index("sft")
    assert "placement.workers is 2: here one rank does it all" in output
    assert "rollout.engines is 2: here one engine does it all" in output
    assert output.splitlines()[-1] == "loaded"
    assert place.manifest("rl").metrics["weight_difference"] < 1e-4  # type: ignore[operator]
    assert "metrics  reward" in output
    assert re.search(
        r"^artifact rl/[0-9a-f]{12}, for other commands with ALIGNMENT_STORE=\S+/outputs/try$", output, re.M
    )
    assert not (place.folder / "work").exists() or list((place.folder / "work").iterdir()) == []


# Of a stage, of the command, and of the ranks.
OURS = re.compile(
    r"(base|data|overlap|sft|rl|evaluation)[\w.]*: |(artifact|result|metrics) |note: |\S+ keeps |rollout\.|Llama\w+: "
)


@pytest.mark.endurance("two-nodes")
@pytest.mark.slow("runs stages with vLLM, as `alignment try` does")
@pytest.mark.parametrize("node", ["sft", "evaluation.rl"])
def test_libraries_print_nothing_beside_the_lines_of_the_command(
    place: Workplace, tried: tuple[int, str], node: str
) -> None:
    command = [sys.executable, "-m", "deployments.cli.main", "try", "small.yaml", node]
    done = subprocess.run(command, cwd=place.folder, env=place.environment, capture_output=True, text=True, check=True)
    lines = (done.stdout + done.stderr).splitlines()
    assert [line for line in lines if not OURS.match(line)] == []


@pytest.mark.endurance("two-nodes")
def test_a_breakpoint_in_a_rank_stops_this_process(tried: tuple[int, str]) -> None:
    pid, output = tried
    assert f"breakpoint {pid} True continue" in output


@pytest.mark.endurance("two-nodes")
@pytest.mark.slow("runs stages with vLLM, as `alignment try` does")
def test_a_breakpoint_in_the_users_own_code_opens_a_prompt(place: Workplace, tried: tuple[int, str]) -> None:
    """Of two episodes that run side by side, and of their reward: processes of their own, one prompt at a time."""
    (place.folder / "game.py").write_text(GAME)
    (place.folder / "judge.py").write_text(JUDGE)
    rewards = "{own: {type: function, path: judge.py}, played: {type: environment}}"
    overrides = ("rl.steps=1", "rl.prompts_per_step=1", f"rl.grpo.rewards={rewards}", "rl.grpo.filtering=null",
                 "rl.environment={type: function, path: game.py, max_turns: 1, timeout_seconds: 1}")  # fmt: skip
    answers = itertools.cycle(["p 'seen', 6 * 7", "import time; time.sleep(1.5)", "c"])
    environment = {name: value for name, value in place.environment.items() if name != "PYTHONBREAKPOINT"}
    environment["QUICK_ENGINE"] = "1"
    status, shown = in_terminal(
        [sys.executable, str(place.folder / "program.py"), "try", "small.yaml", "rl", *overrides],
        place.folder, environment, answers,
    )  # fmt: skip
    assert status == 0, shown
    assert shown.count("('seen', 42)") == 3, shown
    assert shown.count('-> return {"reward": 1.0, "done": True}') == 2
    assert shown.count("-> return [float(len(c)) for c in completions]") == 1


@pytest.mark.endurance("two-nodes")
def test_sft_has_the_weights_that_the_stage_computes_elsewhere(
    place: Workplace, tried: tuple[int, str], tmp_path: Path
) -> None:
    manifest = place.manifest("sft")
    inputs = {"model": place.fetched("base"), "dataset": place.fetched("data.talks")}
    config = SFTConfig.model_validate_json(json.dumps(manifest.config))
    output = sft.run(config, inputs, context_of(tmp_path, inputs), inline)
    stored = {file.path: file.sha256 for file in manifest.files}
    assert file_digest(output.folder / "model.safetensors") == stored["model.safetensors"]


def test_what_a_stage_raises_has_its_traceback(place: Workplace) -> None:
    with place.start("data.broken") as process:
        output, _ = process.communicate()
    assert process.returncode == 1
    assert "Traceback (most recent call last):" in output
    assert 'raise RuntimeError("no rows today")' in output
    assert "rlhf_core.errors.StageError: " in output


def test_a_mistake_in_the_command_is_one_sentence(place: Workplace) -> None:
    with place.start("evaluation.lr") as process:
        output, _ = process.communicate()
    assert process.returncode == 1
    assert "error: the recipe small has no node `evaluation.lr` (did you mean `evaluation.rl`?); it has " in output
    assert "Traceback" not in output


@pytest.mark.endurance("two-nodes")
def test_ctrl_c_leaves_no_lease_and_no_result(place: Workplace) -> None:
    with place.start("data.slow") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "at work" in line:
                break
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)  # of the 600 s that the stage would take
    assert process.returncode != 0
    prepared = place.prepared
    ref = prepared.node("data.slow").ref
    lease = prepared.store.get(lease_path(ref))
    assert lease is not None
    assert LeaseRecord.model_validate_json(lease).released
    assert prepared.repository.manifest(ref) is None
