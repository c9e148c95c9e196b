"""Rewarded trajectories as JSON values, for checkpoints. Numbers are kept exactly."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_core.kept_tokens import KeptTokens
from rlhf_core.rl.filtering import Group
from rlhf_core.rl.shown_files import ShownFiles
from rlhf_core.types import Branch, Prompt, SequenceImage, Stretch, Trajectory

_TENSORS = {
    "token_ids": torch.int64, "loss_mask": torch.bool, "rollout_logprobs": torch.float32,
    "step_rewards": torch.float32, "step_ends": torch.bool, "temperatures": torch.float32,
}  # fmt: skip
Values = dict[str, Any]  # of a trajectory, as JSON


class StoredGroups:
    """Converts groups of trajectories to JSON values of a checkpoint, and back."""

    def __init__(self, shown: ShownFiles | None = None) -> None:
        """shown: files of the images that episodes show; None: they show those of their rows alone."""
        self._shown = shown

    def save(self, groups: Sequence[Group]) -> list[list[Values]]:
        """Return the values of each group. The images that episodes have shown are in the store by then."""
        saved = [[stored(trajectory) for trajectory in group] for group in groups]
        if self._shown is not None:
            self._shown.put({digest for group in saved for values in group for digest in _digests(values)})
        return saved

    def load(self, groups: Sequence[tuple[Prompt, Sequence[Values]]]) -> list[Group]:
        """Restore the groups of `save`, each given with the prompt of its draw. Raises as `ShownFiles.get`."""
        folder = None
        if self._shown is not None:
            folder = self._shown.folder
            self._shown.get({
                digest
                for prompt, group in groups
                for values in group
                for digest in _digests(values) - _paths(prompt).keys()
            })  # fmt: skip
        return [[trajectory_of(values, prompt, folder) for values in group] for prompt, group in groups]


def stored(trajectory: Trajectory) -> Values:
    """Return the JSON values of a trajectory. Of its prompt, they have what an environment may have replaced."""
    prompt = trajectory.prompt
    return {
        **_values(trajectory, prompt.images + trajectory.feedback_images),
        "prompt": {"text": prompt.text, "num_tokens": len(prompt.token_ids), "num_images": len(prompt.images)},
        "stretches": [[stretch.tokens, stretch.weight_version] for stretch in trajectory.stretches],
        "branches": [_values(branch, branch.images) for branch in trajectory.branches],
    }


def trajectory_of(values: Mapping[str, Any], prompt: Prompt, shown: Path | None = None) -> Trajectory:
    """Restore a trajectory from the values of `stored`.

    prompt: of its draw. shown: folder of images that its episode has shown; None: it has the prompt's alone.
    """
    stored_prompt = values["prompt"]
    images, num_images = _images(values, prompt, shown), stored_prompt["num_images"]
    fields_by_name = {
        **_tensors(values),
        "prompt": replace(
            prompt,
            text=stored_prompt["text"],
            token_ids=tuple(values["token_ids"][: stored_prompt["num_tokens"]]),
            images=images[:num_images],
        ),
        "feedback_images": images[num_images:],
        "messages": None if values["messages"] is None else tuple(values["messages"]),
        "stretches": tuple(Stretch(tokens, version) for tokens, version in values["stretches"]),
        "branches": tuple(
            Branch(**_tensors(branch), images=_images(branch, prompt, shown)) for branch in values["branches"]
        ),
    }
    return Trajectory(**fields_by_name)


def _values(sequence: Trajectory | Branch, images: Sequence[SequenceImage]) -> Values:
    """images: of the sequence, in the order of its tokens."""
    names = [f.name for f in fields(sequence) if f.name not in ("feedback_images", "images")]
    values = {name: getattr(sequence, name) for name in names}
    kept = {} if sequence.kept is None else {"kept": [list(sequence.kept.counts), list(sequence.kept.token_ids)]}
    tensors = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in values.items()}
    placed = [[Path(image.path).name, image.start, image.length, list(image.written)] for image in images]
    return {**tensors, **kept, "images": placed}


def _digests(values: Mapping[str, Any]) -> set[str]:
    """Return the SHA-256 of each image of a stored trajectory."""
    return {digest for sequence in (values, *values["branches"]) for digest, *_ in sequence["images"]}


def _paths(prompt: Prompt) -> dict[str, str]:
    """Return the files of the prompt's images by SHA-256."""
    return {Path(image.path).name: image.path for image in prompt.images}


def _images(values: Mapping[str, Any], prompt: Prompt, shown: Path | None) -> tuple[SequenceImage, ...]:
    """Return the images of a stored sequence, which are the prompt's or in the folder `shown`."""
    paths = _paths(prompt)
    if shown is not None:
        paths = {digest: str(shown / digest) for digest, *_ in values["images"]} | paths
    return tuple(
        SequenceImage(paths[digest], start, length, tuple(written))
        for digest, start, length, written in values["images"]
    )


def _tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with tensors in place of lists, without `images`."""
    kept = values.get("kept")
    arrays = {} if kept is None else {"kept": KeptTokens(*(array("i", part) for part in kept))}
    tensors = {
        name: torch.tensor(value, dtype=_TENSORS[name]) if name in _TENSORS and value is not None else value
        for name, value in values.items()
        if name != "images"
    }
    return {**tensors, **arrays}
