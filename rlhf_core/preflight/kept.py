"""Answers of child processes to questions before a run, kept on this node by a digest of all that they depend on."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from rlhf_core.stages.job_context import node_cache


def kept(folder: str, digest: str, ask: Callable[[], str]) -> str:
    """Return the answer kept under `digest` in `folder` of the node's cache, or else that of `ask`, and keep it."""
    path = node_cache() / folder / f"{digest}.json"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    answer = ask()
    with suppress(OSError):  # without write access, or space, the next call asks again
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(f".{os.getpid()}")
        written.write_text(answer, encoding="utf-8")
        written.replace(path)
    return answer
