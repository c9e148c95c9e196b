"""Times of a first-time visitor's steps: `python -m benchmarks.first_visit`.

A clone and a wheel of this commit, each in a folder and with a home of its own: set-up, the recipe `tiny`, then a model
of the visitor's own; a script of TRL; the scripts for a cluster; and common mistakes with what the commands say.
It installs all packages twice. No stack may run on the default ports.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.record import store_figures
from deployments.setup import UNWANTED_ON_CPU

ROOT = Path(__file__).parents[1]
_NOT_THEIRS = ("ALIGNMENT_", "AWS_", "PREFECT_", "PYTHON", "RAY_", "VIRTUAL_ENV", "XDG_", "MAKE", "MFLAGS")
_LONGEST = 160  # characters of a line that is shown

# Rows as people have them: alpaca columns, and conversations of ShareGPT.
ALPACA = [{"instruction": f"Say {word}.", "output": word} for word in ("yes", "no", "maybe")]
SHAREGPT = [
    {"conversations": [{"from": "human", "value": f"What is {n} + 1?"}, {"from": "gpt", "value": str(n + 1)}]}
    for n in range(200)
]
OF_TRL = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
trainer = GRPOTrainer(model="Qwen/Qwen2-0.5B-Instruct", reward_funcs=accuracy_reward, train_dataset=dataset)
trainer.train()
"""
OWN = "data.conversations.source={type: files, paths: [" + "{folder}/conversations.jsonl]}"

MISTAKES: dict[str, tuple[str, ...]] = {
    "a recipe's name": ("plan", "tinny"),
    "a setting's name": ("plan", "tiny", "sft.learning_rate=1e-4"),
    "TRL's name": ("plan", "tiny", "sft.per_device_train_batch_size=4"),
    "an algorithm's name": ("plan", "tiny", "rl.algorithm=gpro"),
    "DPO as an algorithm of RL": ("plan", "tiny", "rl.algorithm=dpo"),
    "a hub's name as a folder": ("plan", "tiny", "base.source={type: folder, path: Qwen/Qwen2.5-0.5B}"),
    "a folder that is not there": ("plan", "tiny", "base.source={type: folder, path: ./no-model}"),
    "alpaca columns": (
        "plan", "tiny", "data.conversations.source={type: files, paths: [{folder}/alpaca.jsonl]}",
    ),
    "a reward's function": (
        "plan", "tiny",
        "rl.grpo.rewards={mine: {type: function, path: {folder}/rewards.py, function: rewrad}}",
    ),
    "too long for the context": ("plan", "tiny", "sft.max_length=100000"),
    "more GPUs than there are": ("plan", "tiny", "sft.placement.gpus_per_worker=1"),
    "a store without credentials": ("artifacts", "--stage", "sft"),
    "a run that is not there": ("report", "123"),
    "a stage that is not there": ("artifacts", "--stage", "nope"),
}  # fmt: skip
_WITHOUT_A_STACK = {"a store without credentials"}


@dataclass
class Visitor:
    """A person with a folder and a home of their own."""

    name: str
    folder: Path
    environment: dict[str, str]
    alignment: str
    rows: list[tuple[str, str, float]] = field(default_factory=list)

    def does(self, *command: str, folder: Path | None = None) -> str:
        """Run a command, print its time, and return its output. Raises RuntimeError if it fails."""
        began = time.monotonic()
        done = subprocess.run(
            command, cwd=folder or self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, check=False,
        )  # fmt: skip
        seconds = time.monotonic() - began
        shown = " ".join(Path(word).name if word.startswith("/") else word for word in command)[:_LONGEST]
        print(f"{self.name:8} {seconds:7.1f} s  {shown}", flush=True)
        if done.returncode != 0:
            raise RuntimeError(f"{shown} ended with {done.returncode}:\n{done.stdout[-3000:]}")
        self.rows.append((self.name, shown, seconds))
        return done.stdout

    def asks(self, *arguments: str) -> str:
        return self.does(self.alignment, *arguments)

    def trains_its_own(self) -> None:
        """Continue the model that `tiny` has trained, on rows of the visitor's own."""
        (self.folder / "conversations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SHAREGPT))
        made = json.loads(self.asks("artifacts", "--stage", "rl", "--json"))["artifacts"][0]["artifact"]
        self.asks("pull", made, "start")
        self.asks("init", "sft", "mine", "--model", "start")
        self.asks("run", "mine/recipe.yaml", OWN.replace("{folder}", str(self.folder)), "sft.max_length=96")


def visitor(name: str, root: Path) -> Visitor:
    folder, home = root / name, root / f"home-{name}"
    folder.mkdir()
    home.mkdir()
    variables = {key: value for key, value in os.environ.items() if not key.startswith(_NOT_THEIRS)}
    return Visitor(name, folder, variables | {"HOME": str(home), "HF_HUB_OFFLINE": "1"}, "alignment")


def from_a_clone(person: Visitor) -> None:
    person.does("git", "clone", "-q", str(ROOT), "checkout")
    checkout = person.folder / "checkout"
    person.does("make", "setup", folder=checkout)
    person.alignment = str(checkout / ".venv/bin/alignment")
    person.asks("up")
    person.asks("run", "tiny")
    person.trains_its_own()
    mistakes(person, stack=True)
    (person.folder / "train.py").write_text(OF_TRL)
    person.asks("init", "--from", "trl", "train.py", "of-trl")
    person.asks("cluster", "slurm", "tiny")
    person.asks("cluster", "kuberay", "tiny")


def from_the_wheel(person: Visitor) -> None:
    checkout = person.folder.parent / "built"  # by us, so its time is not the visitor's
    subprocess.run(["git", "clone", "-q", str(ROOT), str(checkout)], check=True)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    subprocess.run(build, cwd=checkout, check=True)
    (wheel,) = (checkout / "dist").glob("*.whl")
    person.does(sys.executable, "-m", "venv", "environment")
    python = str(person.folder / "environment/bin/python")
    person.alignment = str(person.folder / "environment/bin/alignment")
    person.does(python, "-m", "pip", "install", "-q", f"{wheel}[cpu]")
    person.does(python, "-m", "pip", "uninstall", "-q", "-y", *UNWANTED_ON_CPU)
    person.asks("up")
    person.asks("run", "tiny")
    person.trains_its_own()


def mistakes(person: Visitor, *, stack: bool) -> None:
    """Make each mistake that needs a stack, or none, and print the sentence that it meets."""
    (person.folder / "alpaca.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ALPACA))
    (person.folder / "rewards.py").write_text("def reward(completions, prompts, rows):\n    return [0.0] * len(rows)\n")
    for mistake, command in MISTAKES.items():
        if (mistake not in _WITHOUT_A_STACK) == stack:
            words = [word.replace("{folder}", str(person.folder)) for word in command]
            done = subprocess.run(
                [person.alignment, *words], cwd=person.folder, env=person.environment, capture_output=True, text=True,
                check=False,
            )  # fmt: skip
            said = done.stderr.strip() or done.stdout.strip()
            print(f"  {mistake}: exit {done.returncode}: {said.splitlines()[-1] if said else ''}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("clone", "wheel"), help="one of the two installations")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, install in {"clone": from_a_clone, "wheel": from_the_wheel}.items():
            if arguments.only in (None, name):
                person = visitor(name, Path(scratch))
                try:
                    install(person)
                finally:
                    person.asks("down")
                mistakes(person, stack=False)
                figures |= total(person)
    store_figures(figures)


def total(person: Visitor) -> dict[str, float]:
    """Return the seconds from nothing to a model of one's own."""
    until = next(i for i, (_, command, _) in enumerate(person.rows) if "run mine/" in command)
    return {f"{person.name}, to a model of one's own": sum(seconds for *_, seconds in person.rows[: until + 1])}


if __name__ == "__main__":
    main()
