"""Pass rates of prompts: read from earlier artifacts, updated by a run, and stored beside its policy.

A rate belongs to a prompt, by the content hash of its messages and tools, and to a reward, by the content hash of the
settings and files that its scores depend on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import ValidationError

from rlhf_core.artifacts.manifest import Manifest, file_digest
from rlhf_core.config.base import configs_below, result_settings
from rlhf_core.config.rewards.rewards import RewardConfig
from rlhf_core.config.rl.difficulty_checks import scored_reward
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.contract import Input, StageContext
from rlhf_core.data.reading import iterate_rows
from rlhf_core.errors import StageError

RATES_FILE = "pass_rates.jsonl"  # in the folder of a policy
_NOT_OF_THE_SCORE = ("weight", "tolerated_failures")


@dataclass(frozen=True, slots=True)
class PassRate:
    """The mean score of a prompt's newest completions."""

    rate: float  # 0-1
    samples: int
    step: int  # of the run that observed it, counted from 1; 0: known before


class PassRates:
    """The newest rate of each prompt, for one reward."""

    def __init__(self, reward: str, known: Mapping[str, PassRate]) -> None:
        """reward: its content hash. known: rates from before the run, by the content hashes of their prompts."""
        self.reward = reward
        self._by_prompt = dict(known)

    def __len__(self) -> int:
        return len(self._by_prompt)

    def get(self, prompt: str) -> PassRate | None:
        return self._by_prompt.get(prompt)

    def observe(self, prompt: str, scores: Sequence[float], step: int) -> None:
        """Replace the prompt's rate by that of `scores`, of completions sampled in `step`, counted from 1."""
        self._by_prompt[prompt] = PassRate(fmean(scores), len(scores), step)

    def write(self, folder: Path) -> None:
        """Write all rates to `folder`, a line for each prompt."""
        with (folder / RATES_FILE).open("w", encoding="utf-8", newline="\n") as file:
            for prompt, known in sorted(self._by_prompt.items()):
                line = {"prompt": prompt, "reward": self.reward, "rate": known.rate, "samples": known.samples}
                file.write(json.dumps({**line, "step": known.step}) + "\n")

    def state_dict(self) -> dict[str, list[float]]:
        """Return the rates that this run observed; the others are read again."""
        return {p: [r.rate, r.samples, r.step] for p, r in self._by_prompt.items() if r.step}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        self._by_prompt |= {p: PassRate(rate, int(samples), int(step)) for p, (rate, samples, step) in state.items()}


def read_pass_rates(config: RLConfig, inputs: Mapping[str, Input], context: StageContext) -> PassRates | None:
    """Return the rates in the artifacts of `select.rates`; None if prompts are not selected.

    A prompt in several of them has the rate of all its completions together. Raises StageError for an artifact without
    rates of the reward whose scores count.
    """
    if config.select is None:
        return None
    name = scored_reward(config, "select")
    reward = config.settings.rewards[name]
    files = {path: context.user_file(path) for _, each in configs_below(reward) for path in each.named_files()}
    identity = reward_identity(reward, {path: file_digest(file) for path, file in files.items()})
    passed: dict[str, float] = {}
    samples: dict[str, int] = {}
    for source_name in config.select.rates:
        source = inputs[f"select.rates.{source_name}"]
        of_policy = source.folder / RATES_FILE
        found = _written(of_policy, identity) if of_policy.is_file() else _of_completions(source, reward, identity)
        count = 0
        for prompt, rate, number in found:
            passed[prompt] = passed.get(prompt, 0.0) + rate * number
            samples[prompt] = samples.get(prompt, 0) + number
            count += 1
        if not count:
            raise StageError(
                f"select.rates: {source.manifest.ref} has no pass rates of the reward `{name}`, with the same settings "
                "and files: score its completions by a stage `score`, or remove it"
            )
    return PassRates(identity, {p: PassRate(passed[p] / samples[p], samples[p], 0) for p in passed})


def prompt_identity(row: Mapping[str, Any]) -> str:
    """Return the content hash of what a row asks: its messages and tools, without its answer."""
    asked = json.dumps([row["prompt"], row.get("tools")], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(asked.encode()).hexdigest()[:32]


def reward_identity(reward: RewardConfig, files: Mapping[str, str]) -> str:
    """Return the content hash of the settings of a reward that its scores depend on.

    files: digests of user files, which replace their paths.
    """

    def by_content(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: by_content(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [by_content(each) for each in value]
        return files.get(value, value) if isinstance(value, str) else value

    scored = {key: by_content(value) for key, value in result_settings(reward).items() if key not in _NOT_OF_THE_SCORE}
    return hashlib.sha256(json.dumps(scored, sort_keys=True).encode()).hexdigest()[:32]


def _written(file: Path, identity: str) -> Iterator[tuple[str, float, int]]:
    """Yield prompt, rate and number of completions of the lines of a policy's file that are of this reward."""
    with file.open(encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            if line["reward"] == identity:
                yield line["prompt"], float(line["rate"]), int(line["samples"])


def _of_completions(source: Input, reward: RewardConfig, identity: str) -> Iterator[tuple[str, float, int]]:
    """Yield the same of a dataset of completions. Raises StageError for a reward that is not from 0 to 1."""
    files = source.manifest.user_files
    names: list[str] = []
    for name, settings in _rewards_of(source.manifest).items():
        with suppress(ValidationError):  # it has another type
            theirs = type(reward).model_validate_json(json.dumps(settings))
            names += [name] if reward_identity(theirs, files) == identity else []
    if not names:
        return
    for row in iterate_rows(source.folder):
        values = [float(entry["rewards"][names[0]]) for entry in row["completions"]]
        if not all(0 <= value <= 1 for value in values):
            raise StageError(
                f"{source.manifest.ref}, row {row['id']}: the reward `{names[0]}` is not from 0 to 1, so its mean "
                "is not a pass rate"
            )
        yield prompt_identity(row), fmean(values), len(values)


def _rewards_of(manifest: Manifest) -> Mapping[str, Any]:
    """Return the settings of the rewards of a dataset's completions, by name; of kept rollouts those that trained."""
    config = manifest.config
    blocks: list[Mapping[str, Any]] = [config, *(block for block in config.values() if isinstance(block, Mapping))]
    rewards: Mapping[str, Any] = next((block["rewards"] for block in blocks if block.get("rewards")), {})
    return rewards
