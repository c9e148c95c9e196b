"""Number of threads of torch, in the process of each worker and engine."""

from __future__ import annotations

import os

from rlhf_core.errors import StageError

_MOST_OF_A_CORE = 64  # thousands more crash OpenMP


def use_threads(number: int) -> None:
    """Set the number of threads of this process. Raises StageError if this machine could not start so many."""
    import torch

    cores = os.cpu_count() or 1
    if number > _MOST_OF_A_CORE * cores:
        raise StageError(
            f"{number} threads were asked for, by `threads` or the reserved CPUs, on a machine with {cores} cores: ask "
            f"for {cores} at most"
        )
    torch.set_num_threads(number)
