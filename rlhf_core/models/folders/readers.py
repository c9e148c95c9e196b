"""Checks whether a model can read the tokens of the model that a stage trains, by its files. Loads no torch.

Used before a run, for every available model, and by the job.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from rlhf_core.config.rewards.rewards import ModelReward, ProcessRewardModelReward
from rlhf_core.models.folders.check import vocabulary_size
from rlhf_core.models.folders.folder import PROCESSOR_FILES, read_config
from rlhf_core.models.folders.vision_models import reads_images


@dataclass(frozen=True, slots=True)
class Scale:
    """Mean and standard deviation of a reward model's rewards for held-out completions."""

    mean: float = 0.0
    std: float = 1.0


# In the config.json of a process reward model: the separator of its steps; in token form, the text at which a step is
# read, and the tokens of its labels.
STORED_SEPARATOR, STORED_TAG, STORED_LABELS = "step_separator", "step_tag", "step_label_ids"


def stored_scale(config: Mapping[str, Any]) -> Scale | None:
    """Return the scale of rewards in the reward model's config.json; None if there is no usable one."""
    mean, std = config.get("reward_mean"), config.get("reward_std")
    return Scale(float(mean), float(std)) if _is_finite(mean) and _is_finite(std) and std > 0 else None


def scale_problem(config: Mapping[str, Any], settings: ModelReward) -> str | None:
    """Return the reason why the rewards of the model with this config.json cannot be normalised as set; None if they
    can.
    """
    if not settings.normalize or stored_scale(config) is not None:
        return None
    return (
        f"the reward model's config.json has reward_mean={config.get('reward_mean')} and "
        f"reward_std={config.get('reward_std')}, by which its rewards cannot be normalised; set normalize: false"
    )


def in_token_form(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of a process reward model that is a language model, read at tags."""
    return STORED_LABELS in config


def separator_problem(trained: str | None, settings: ModelReward) -> str | None:
    """Return the reason why the reward is placed at other tokens than in training; None if it is not.

    trained: the separator that a process reward model was trained with; None: none, or unknown.
    """
    if not isinstance(settings, ProcessRewardModelReward) or trained in (None, settings.separator):
        return None
    return (
        f"the model was trained on steps that end with {trained!r}, and is to be read where {settings.separator!r} "
        "ends them; set both separators alike"
    )


def same_tokens(folder: Path, other: Path) -> bool:
    """Return whether two model folders have the same tokenizer."""
    return (folder / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()


def images_problem(folder: Path, policy: Path) -> str | None:
    """Return the reason why the model in `folder` cannot read the images of a policy's prompts; None if it can: it gets
    the policy's tokens and pixels.
    """
    config = read_config(folder)
    if not reads_images(config):
        return "the prompts have images, and it reads text alone"
    if config["model_type"] != read_config(policy).get("model_type"):
        return "the prompts have images, and it is of another architecture than the policy, which reads them otherwise"
    different = next((name for name in PROCESSOR_FILES if _content(folder / name) != _content(policy / name)), None)
    if different is not None or not same_tokens(folder, policy):
        return f"the prompts have images, and its {different or 'tokenizer.json'} is not the policy's"
    return None


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def judge_problem(config: Mapping[str, Any], settings: ModelReward, *, reads_tokens: bool, tokens: int) -> str | None:
    """Return the reason why the reward model with this config.json cannot give a reward; None if it can.

    reads_tokens: it has the policy's tokenizer and chat template, and so reads its tokens; tokens: of a sequence.
    """
    if in_token_form(config):
        return (
            None
            if settings.gives_steps
            else ("the reward model is a process reward model in token form: set type: process_reward_model")
        )
    if reads_tokens:
        return _context_problem(config, "rollout.max_length", tokens)
    if settings.gives_steps:
        return (
            "the reward model's tokenizer differs from the policy's, so it cannot be read at the steps of the "
            "policy's tokens; train it from the same base model, or reward whole completions: type: reward_model"
        )
    return None


def reader_problem(config: Mapping[str, Any], setting: str, tokens: int, *, reads_tokens: bool) -> str | None:
    """Return the reason why a reference or critic with this config.json cannot read the policy's tokens; None if it
    can.

    setting, tokens: the limit of a sequence; reads_tokens: it has the policy's tokenizer.
    """
    if not reads_tokens:
        return "its tokenizer differs from the policy's"
    return _context_problem(config, setting, tokens)


def teacher_problem(
    config: Mapping[str, Any], student: Mapping[str, Any], *, max_length: int, reads_tokens: bool
) -> str | None:
    """Return the reason why the student with the config.json `student` cannot learn from the teacher with this one;
    None if it can.

    reads_tokens: they have the same tokenizer.
    """
    if not reads_tokens:
        return "its tokenizer differs from the student's"
    return vocabulary_problem(config, student) or _context_problem(config, "max_length", max_length)


def vocabulary_problem(config: Mapping[str, Any], student: Mapping[str, Any]) -> str | None:
    """Return the reason why the distributions of a teacher and a student cannot be compared; None if they can, or if
    unknown.
    """
    teacher_size, student_size = vocabulary_size(config), vocabulary_size(student)
    if teacher_size is None or student_size is None or teacher_size == student_size:
        return None
    return f"its distributions are over {teacher_size} tokens, and the student's over {student_size}"


def _context_problem(config: Mapping[str, Any], setting: str, tokens: int) -> str | None:
    """Return the reason why a model cannot read sequences of `tokens` tokens; None if it can, or has no known limit."""
    context = config.get("max_position_embeddings")
    if not isinstance(context, int) or context >= tokens:
        return None
    return f"its context is {context} tokens, and sequences have up to {setting}={tokens}"


def _is_finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)
