"""Rewarded trajectories as JSON values, for checkpoints. Numbers are kept exactly."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from rlhf_core.kept_tokens import KeptTokens
from rlhf_core.rl.filtering import Group
from rlhf_core.types import Branch, Prompt, Stretch, Trajectory

_TENSORS = {
    "token_ids": torch.int64, "loss_mask": torch.bool, "rollout_logprobs": torch.float32,
    "step_rewards": torch.float32, "step_ends": torch.bool, "temperatures": torch.float32,
}  # fmt: skip
Values = dict[str, Any]  # of a trajectory, as JSON


class StoredGroups:
    """Converts groups of trajectories to JSON values of a checkpoint, and back."""

    def save(self, groups: Sequence[Group]) -> list[list[Values]]:
        return [[stored(trajectory) for trajectory in group] for group in groups]

    def load(self, groups: Sequence[tuple[Prompt, Sequence[Values]]]) -> list[Group]:
        """Restore the groups of `save`, each given with the prompt of its draw."""
        return [[trajectory_of(values, prompt) for values in group] for prompt, group in groups]


def stored(trajectory: Trajectory) -> Values:
    """Return the JSON values of a trajectory. Of its prompt, they have what an environment may have replaced."""
    prompt = trajectory.prompt
    # Their files are not in a checkpoint; the stage accepts no such images.
    assert not trajectory.feedback_images
    assert not any(branch.images for branch in trajectory.branches)
    return {
        **_values(trajectory),
        "prompt": {"text": prompt.text, "num_tokens": len(prompt.token_ids), "has_images": bool(prompt.images)},
        "stretches": [[stretch.tokens, stretch.weight_version] for stretch in trajectory.stretches],
        "branches": [_values(branch) for branch in trajectory.branches],
    }


def trajectory_of(values: Mapping[str, Any], prompt: Prompt) -> Trajectory:
    """Restore a trajectory from the values of `stored`. prompt: of its draw, whose images it has unless an environment
    replaced the prompt."""
    stored_prompt = values["prompt"]
    fields_by_name = {
        **_tensors(values),
        "prompt": replace(
            prompt,
            text=stored_prompt["text"],
            token_ids=tuple(values["token_ids"][: stored_prompt["num_tokens"]]),
            images=prompt.images if stored_prompt["has_images"] else (),
        ),
        "messages": None if values["messages"] is None else tuple(values["messages"]),
        "stretches": tuple(Stretch(tokens, version) for tokens, version in values["stretches"]),
        "branches": tuple(Branch(**_tensors(branch)) for branch in values["branches"]),
    }
    return Trajectory(**fields_by_name)


def _values(sequence: Trajectory | Branch) -> dict[str, Any]:
    names = [f.name for f in fields(sequence) if f.name not in ("feedback_images", "images")]
    values = {name: getattr(sequence, name) for name in names}
    kept = {} if sequence.kept is None else {"kept": [list(sequence.kept.counts), list(sequence.kept.token_ids)]}
    tensors = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in values.items()}
    return {**tensors, **kept}


def _tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with tensors in place of lists."""
    kept = values.get("kept")
    arrays = {} if kept is None else {"kept": KeptTokens(*(array("i", part) for part in kept))}
    tensors = {
        name: torch.tensor(value, dtype=_TENSORS[name]) if name in _TENSORS and value is not None else value
        for name, value in values.items()
    }
    return {**tensors, **arrays}
