"""Threads that torch computes with."""

from __future__ import annotations

import os

import pytest
import torch

from rlhf_core.errors import StageError
from rlhf_core.system.threads import use_threads

pytestmark = pytest.mark.parts


def test_so_many_threads_that_they_would_crash_are_refused() -> None:
    before = torch.get_num_threads()
    with pytest.raises(StageError, match=rf"^\d+ threads were asked for.* ask for {os.cpu_count()} at most$"):
        use_threads(65 * (os.cpu_count() or 1))
    use_threads(1)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)
