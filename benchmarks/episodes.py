"""Episodes in rounds, which are reproducible, and concurrent ones, which are not: `python -m benchmarks.episodes`.

One engine on CPU with a model of 25M plays 48 episodes of 1 to 8 turns, whose replies have 24 tokens on average; the
environment delays each turn by an exponentially distributed time. Sides: in rounds without prefixes
of earlier turns, in rounds, and concurrently; a repeat runs each once.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import store_figures
from benchmarks.word_models import SHAPES, make_model, word_ids
from rlhf_core.chat.encoding import Tokenizer, load_tokenizer
from rlhf_core.config.engines.rollout import SamplingConfig, VllmEngineConfig
from rlhf_core.data.prompts import to_prompts
from rlhf_core.environments import Environment, EnvironmentHost, Feedback, Reply
from rlhf_core.episodes.rollouter import Rollouter, Start
from rlhf_core.rollout.child_engine import ChildEngine, engine_in_child
from rlhf_core.rollout.engine import EngineSettings
from rlhf_core.rollout.engines import Engines, OneEngine
from rlhf_core.training.randomness import derived_seed

_SHAPE = SHAPES["25m"]
_EPISODES, _PROMPT, _FEEDBACK, _REPLY, _LONGEST_REPLY, _TURNS, _MAX_LENGTH = 48, 64, 16, 24, 128, 8, 1536
_SIDES = ("rounds, no prefixes", "rounds", "concurrent")
# Turns of an episode at most, and mean seconds that the environment thinks.
_CASES: Mapping[str, tuple[int, float]] = {
    "one turn": (1, 0.0), "1 to 8 turns": (_TURNS, 0.0), "1 to 8 turns, slow environment": (_TURNS, 0.5),
}  # fmt: skip


class Thinking(Environment):
    """At most `turns` turns, each with a delay of `seconds` on average."""

    def __init__(self, turns: int, seconds: float) -> None:
        self._most, self._seconds = turns, seconds

    async def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        self._random = random.Random(seed)
        self._left = self._random.randint(1, self._most)
        return row["prompt"]

    async def step(self, reply: Reply) -> Feedback:
        self._left -= 1
        if self._seconds:
            await asyncio.sleep(self._random.expovariate(1 / self._seconds))
        return Feedback([{"role": "user", "content": words(self._random, _FEEDBACK)}], done=not self._left)


class ThinkingHost(EnvironmentHost):
    name, max_turns = "thinking", _TURNS

    def __init__(self, turns: int, seconds: float) -> None:
        self._turns, self._seconds = turns, seconds

    def new(self) -> Thinking:
        return Thinking(self._turns, self._seconds)


class WithoutPrefixes(OneEngine):
    def __init__(self, engine: ChildEngine) -> None:
        super().__init__()
        self._engine = engine

    def _run(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        kept = {name: value for name, value in kwargs.items() if name != "keep_prefixes"}
        return self._engine._run(method, args, kept)


def words(source: random.Random, count: int) -> str:
    return " ".join(f"w{source.choice(word_ids(_SHAPE.vocabulary))}" for _ in range(count))


def played(engines: Engines, tokenizer: Tokenizer, side: str, environments: EnvironmentHost) -> tuple[float, int]:
    """Return the seconds, and the sampled tokens."""
    config = VllmEngineConfig(max_length=_MAX_LENGTH, repeatable=side != "concurrent")
    source = random.Random(0)
    rows = [{"id": str(i), "prompt": [{"role": "user", "content": words(source, _PROMPT)}]} for i in range(_EPISODES)]
    starts = [
        Start(prompt, partial(_seed, prompt.id), _seed(prompt.id, -1))
        for prompt in to_prompts(rows, tokenizer, max_tokens=_MAX_LENGTH)
    ]
    began = time.perf_counter()
    trajectories = Rollouter(engines, tokenizer, config, environments).play(
        starts, SamplingConfig(max_tokens=_LONGEST_REPLY)
    )
    return time.perf_counter() - began, sum(int(each.loss_mask.sum()) for each in trajectories)


def _seed(episode: str, turn: int) -> int:
    return derived_seed(0, f"{episode}, turn {turn}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args(arguments).repeats
    shown = Table(title=f"{_EPISODES} episodes, medians of {repeats}")
    for column in ("episodes", "side", "tokens", "s", "tokens a second", "to rounds"):
        shown.add_column(column)
    with tempfile.TemporaryDirectory() as folder:
        make_model(_SHAPE, Path(folder), ends_after=_REPLY)
        tokenizer = load_tokenizer(Path(folder))
        config = VllmEngineConfig(max_length=_MAX_LENGTH, threads=2, max_sequences=_EPISODES)
        with engine_in_child(Path(folder), EngineSettings(config, "float32", seed=0)) as engine:
            of_side: dict[str, Engines] = {_SIDES[0]: WithoutPrefixes(engine)}
            figures: dict[str, dict[str, dict[str, float]]] = {}
            for case, (turns, seconds) in _CASES.items():
                speeds: dict[str, list[tuple[float, float, int]]] = {side: [] for side in _SIDES}
                for repeat in range(repeats + 1):
                    for side in _SIDES:
                        engines = of_side.get(side, engine)
                        took, tokens = played(engines, tokenizer, side, ThinkingHost(turns, seconds))
                        if repeat:  # the first warms up
                            speeds[side].append((tokens / took, took, tokens))
                medians = {side: statistics.median(speed for speed, _, _ in each) for side, each in speeds.items()}
                for side, each in speeds.items():
                    _, took, tokens = sorted(each)[len(each) // 2]
                    ratio = medians[side] / medians["rounds"]
                    shown.add_row(case, side, str(tokens), f"{took:.2f}", f"{medians[side]:.0f}", f"{ratio:.2f}")
                    figures.setdefault(case, {})[side] = {"tokens": tokens, "seconds": took, "speed": ratio}
    Console().print(shown)
    store_figures(figures)


if __name__ == "__main__":
    main()
