"""FlexAttention's backward pass on a CPU, where torch has one for debugging, of all scores at once, and refuses it."""

from __future__ import annotations

import torch
from torch.nn.attention import flex_attention


def allow_backward_on_cpu() -> None:
    """Take the refusal out, in this process, if there is no GPU."""
    if not torch.cuda.is_available():
        flex_attention._validate_device = lambda query, key, value: None
