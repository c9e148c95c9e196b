"""Dataclasses of tensors that pickle as arrays: without a copy in this process, and shared by processes of a node."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class PickledAsArrays:
    """Base of a dataclass. Its tensors are in host memory whenever it is pickled."""

    def __getstate__(self) -> dict[str, Any]:
        # torch pickles a tensor by copying it into a file in memory; an array is a buffer of pickle's protocol 5.
        return {name: value.numpy() if isinstance(value, Tensor) else value for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy, since the arrays that processes share are read-only.
        vars(self).update({n: torch.tensor(v) if isinstance(v, np.ndarray) else v for n, v in state.items()})
