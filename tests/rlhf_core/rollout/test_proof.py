"""The proof's judgement, without an engine of weights."""

from __future__ import annotations

import math

import pytest

from rlhf_core.errors import WeightSyncError
from rlhf_core.rollout.engine import ProbeAnswer, ServedTensor
from rlhf_core.rollout.proof import Expected, Proof, default_tolerance, verify_weights

pytestmark = pytest.mark.parts

LOGPROBS = [[0.0, -1.0, -2.0], [0.0, -3.0]]  # of two sequences


def verify(*answers: ProbeAnswer, tolerance: float = 0.1, **expected: object) -> Proof:
    wanted = Expected(**{"version": 3, "logprobs": LOGPROBS, **expected})  # type: ignore[arg-type]
    return verify_weights(answers, wanted, tolerance)


def test_the_differences_of_the_worst_engine_are_given_back() -> None:
    answers = (
        ProbeAnswer(3, [[0.0, -1.0, -2.25], [0.0, -3.0]]),
        ProbeAnswer(3, [[9.0, -1.0, -2.0], [0.0, -3.5]]),  # the first of a sequence says nothing
    )
    # Engine 0 is off by 0.25 at one of three tokens, engine 1 by 0.5: one unlikely token alone is no wrong weight.
    proof = verify(*answers, tolerance=0.2)
    assert (proof.difference, proof.max_difference) == (pytest.approx(0.5 / 3), 0.5)


def test_what_is_off_is_named() -> None:
    good = ProbeAnswer(3, LOGPROBS)
    off = ProbeAnswer(3, [[0.0, -1.0, -2.0], [0.0, -3.5]])
    with pytest.raises(
        WeightSyncError, match=r"engine 1 does not serve version 3 .* 0.167 on average \(tolerance 0.1\)"
    ):
        verify(good, off)
    with pytest.raises(WeightSyncError, match="engine 0 serves version 3, but version 4 was published"):
        verify(good, version=4)


def test_nan_never_passes() -> None:
    with pytest.raises(WeightSyncError, match="off by nan on average"):
        verify(ProbeAnswer(3, [[0.0, math.nan, -2.0], [0.0, -3.0]]), tolerance=1e9)


def test_every_tensor_that_is_wrong_is_named_with_where_its_values_come_from() -> None:
    served = (
        ServedTensor("a", "a", "1"), ServedTensor("b", "b", "3"), ServedTensor("c", "c", "old"),
        ServedTensor("d", "d", "9"), ServedTensor("head", "a", "old"), ServedTensor("more", "more", "0"),
    )  # fmt: skip
    expected = Expected(3, LOGPROBS, {"a": "1", "b": "2", "c": "3", "d": "4", "e": "5"})
    before = Expected(2, LOGPROBS, {"a": "old", "c": "old"})
    with pytest.raises(WeightSyncError) as caught:
        verify_weights([ProbeAnswer(3, LOGPROBS, served)], expected, 1.0, before)
    assert str(caught.value) == (
        "engine 0 does not serve version 3 as published: b has the values of c, c still has the values of version 2, "
        "d has other values, head (tied to a) still has the values of version 2, more was not published, "
        "e is not served at all; its log-probs of the probe are off by 0 on average (tolerance 1)"
    )


def test_of_many_tensors_the_first_are_named() -> None:
    served = tuple(ServedTensor(f"t{i}", f"t{i}", "x") for i in range(10))
    with pytest.raises(WeightSyncError, match=r"t7 has other values and 2 more; its log-probs"):
        verify(ProbeAnswer(3, LOGPROBS, served), digests={f"t{i}": "y" for i in range(10)})


def test_what_cannot_be_read_back_is_told() -> None:
    answer = ProbeAnswer(3, LOGPROBS, (ServedTensor("a", "a", "1", False), ServedTensor("b", "b", "2")))
    proof = verify_weights([answer], Expected(3, LOGPROBS, {"a": "1", "b": "2"}), 0.0)
    assert proof.not_read_back == ("a",)


def test_tolerances_grow_with_rounding() -> None:
    assert default_tolerance("float32") == 1e-4 < default_tolerance("bfloat16")
