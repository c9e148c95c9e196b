"""The batch script of a recipe for Slurm: its options, then slurm.sh."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from deployments.cluster.sizes import ClusterSize

_CLEANUP_SECONDS = 60  # between the end of the stages and the time limit


def slurm_script(
    name: str,
    recipe: Sequence[str],
    size: ClusterSize,
    *,
    store: str,
    time: str,
    notice: int,
    options: Sequence[tuple[str, str]] = (),
) -> str:
    """Return the script.

    recipe: arguments of `alignment run`; time: the limit, as sbatch reads it; notice: seconds before it at which stages
    write checkpoints; options: further ones of sbatch.
    """
    settings = [
        ("job-name", f"alignment-{name}"), ("nodes", str(size.nodes)), ("ntasks-per-node", "1"), ("exclusive", ""),
        ("mem", "0"), ("time", time), ("signal", f"B:USR1@{notice}"), ("requeue", ""), ("open-mode", "append"),
        ("output", f"alignment-{name}-%j.log"), *options,
    ]  # fmt: skip
    if size.gpus:
        settings.insert(4, ("gpus-per-node", str(size.gpus)))
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH --{option}{f'={value}' if value else ''}" for option, value in settings]
    lines += [
        "",
        f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH",
        f"export ALIGNMENT_STORE={shlex.quote(store)}  # credentials are taken from the shell of sbatch",
        f"export ALIGNMENT_STOP_SECONDS={notice - _CLEANUP_SECONDS}  # that a stage has for its step and a checkpoint",
        f"recipe=({shlex.join(recipe)})",
        "",
    ]
    return "\n".join(lines) + (Path(__file__).parent / "slurm.sh").read_text(encoding="utf-8")
