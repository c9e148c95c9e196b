"""Rollouts and policies of single steps, published as artifacts during a run."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.rendering import Tokenizer
from rlhf_core.chat.sampled_tokens import tokenizer_digest
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.contract import Output, StageContext
from rlhf_core.data.formats import Row
from rlhf_core.data.reading import write_dataset
from rlhf_core.rl.rows import completion_entry, completions_row
from rlhf_core.types import Trajectory


class Keeper:
    """Publishes artifacts of single steps, counted from 1.

    They are published before the step's checkpoint, so a resumed run has no gap; publishing again is a no-op.
    """

    def __init__(
        self,
        config: RLConfig,
        context: StageContext,
        save: Callable[[Path], None],
        tokenizer: Tokenizer,
        image_folders: Sequence[Path],
    ) -> None:
        """save: writes the current policy to a folder in this job's working folder. tokenizer: the policy's.
        image_folders: with the files of images in prompts and of those that environments show.
        """
        self._config = config
        self._tokenizer = tokenizer
        self._context = context
        self._save = save
        self._image_folders = image_folders

    def rollouts(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Publish the trajectories of a step, if due. trajectories: grouped by prompt."""
        if not _due(step, self._config.keep.rollouts_every):
            return
        names, digest = list(self._config.settings.rewards), tokenizer_digest(self._tokenizer)
        rows = list(rollout_rows(trajectories, names, step, tokenizer=digest))
        reward = math.fsum(entry["reward"] for row in rows for entry in row["completions"]) / len(trajectories)
        folder = self._context.workdir / f"rollouts-{step}"
        images = write_dataset(folder, rows, {"format": "completions"}, images_from=self._image_folders)
        self._publish("rollouts", step, Output(Kind.DATASET, folder, {"rows": len(rows), "reward": reward, **images}))

    def policy(self, step: int) -> None:
        """Publish the policy after a step, if due. The last one is the stage's own result."""
        if not _due(step, self._config.keep.policy_every) or step == self._config.steps:
            return
        folder = self._context.workdir / f"policy-{step}"
        self._save(folder)
        self._publish("policy", step, Output(Kind.POLICY if self._config.lora is None else Kind.ADAPTER, folder))

    def _publish(self, what: str, step: int, output: Output) -> None:
        self._context.publish(what, step, output)
        shutil.rmtree(output.folder)


def rollout_rows(
    trajectories: Sequence[Trajectory], rewards: Sequence[str], step: int, *, tokenizer: str
) -> Iterator[Row]:
    """Yield a row for each prompt, with the tokens of its completions.

    A completion's `reward` is its total reward, step rewards included; its `rewards` are those named by `rewards`
    that apply to it, before weights and shaping. tokenizer: its digest.
    """
    for _, group in groupby(trajectories, key=lambda t: (t.prompt.id, t.messages)):
        completions = list(group)
        first = completions[0]
        entries = [
            {
                **completion_entry(t, logprobs=True),
                "reward": t.total_reward,
                "rewards": {name: t.extra[name] for name in rewards if name in t.extra},
            }
            for t in completions
        ]
        messages = first.messages or first.prompt.row["prompt"]
        yield completions_row(messages, first.prompt.row, entries, step=step, tokenizer=tokenizer)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
