from __future__ import annotations

import os

import pytest

from rlhf_core.errors import StageError
from rlhf_core.processes.in_order import in_order

pytestmark = pytest.mark.parts


def test_results_come_in_the_order_of_the_batches_and_so_do_errors() -> None:
    results = in_order(bytes.fromhex, [*(f"{n:02x}" for n in range(40)), "no hex", *["00"] * 40], 2)
    for n in range(40):
        assert next(results) == bytes([n])
    with pytest.raises(ValueError, match="non-hexadecimal"):
        next(results)


def test_a_process_that_dies_is_an_error() -> None:
    with pytest.raises(StageError, match="one of the `processes` died"):
        list(in_order(os._exit, [1, 1, 1], 2))
