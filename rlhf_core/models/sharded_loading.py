"""Loading of a model whose weights are divided over the ranks as they are read, one tensor at a time.

transformers loads the model as it does otherwise: conversions, dtypes, buffers, ties and fresh weights are the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from rlhf_core.models.folders.headers import weight_files
from rlhf_core.models.tensor_parallel import cut_of

# transformers' variable: by itself it reads tensors ahead, in threads, and so all of them.
_NO_READING_AHEAD = "HF_DEACTIVATE_ASYNC_LOAD"


class Sharding(Protocol):
    """Division of parameters over the ranks. Every rank must divide the same ones, in the same order."""

    def divide(self, parameter: nn.Parameter) -> None:
        """Replace the whole `parameter`, in place, by this rank's share of it."""


def is_divided(parameter: Tensor) -> bool:
    """Return whether ranks have a share of the parameter each, which a forward of its module gathers."""
    return hasattr(parameter, "ds_id")


def full_shape(parameter: Tensor) -> torch.Size:
    """The shape of the whole parameter, whether it is divided or not."""
    cut = cut_of(parameter)
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape) if cut is None else cut.shape
    return shape


@contextmanager
def divided_as_loaded(folder: Path, sharding: Sharding) -> Iterator[dict[str, Any]]:
    """Divide each parameter that transformers loads within the context, from the state dict that is yielded.

    A head of one output stays whole: it is small, and scaled or copied after loading.
    """

    def divide(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or is_divided(parameter) or not getattr(parameter, "_is_hf_initialized", False):
            return
        if not parameter.is_meta and getattr(module, "out_features", 0) != 1:
            sharding.divide(parameter)

    with ExitStack() as stack:
        stack.enter_context(_without_reading_ahead())
        state = _stored(stack, folder)
        stack.callback(register_module_parameter_registration_hook(divide).remove)
        yield state


def _stored(stack: ExitStack, folder: Path) -> dict[str, Any]:
    """Return the tensors of `folder` by name, each of which is read when it is indexed."""
    # By default safetensors maps files into memory, where all that was read stays.
    files = [stack.enter_context(safe_open(folder / name, "pt", backend="pread")) for name in weight_files(folder)]
    return {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118 (no mapping)


@contextmanager
def _without_reading_ahead() -> Iterator[None]:
    before = os.environ.get(_NO_READING_AHEAD)
    os.environ[_NO_READING_AHEAD] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_READING_AHEAD]
        else:
            os.environ[_NO_READING_AHEAD] = before
