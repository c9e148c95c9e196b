"""A digest is of every bit of a tensor, on whatever device it is."""

from __future__ import annotations

import math

import pytest
import torch
import xxhash
from torch import Tensor

from rlhf_core.rollout import digest, xxh3
from rlhf_core.rollout.digest import tensor_digest

pytestmark = pytest.mark.parts

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_digest_is_of_every_element_and_its_place(dtype: torch.dtype) -> None:
    tensor = torch.arange(1.0, 25).reshape(4, 6).to(dtype)

    def changed(index: tuple[int, int], value: float) -> Tensor:
        other = tensor.clone()
        other[index] = value
        return other

    exchanged = tensor.clone()
    exchanged[0, 0], exchanged[3, 5] = tensor[3, 5], tensor[0, 0]
    others = [
        changed((2, 3), 1e-30),
        exchanged,
        tensor.reshape(6, 4),
        tensor.half(),
        tensor.T,
        changed((0, 0), math.nan),
    ]
    digests = {tensor_digest(t) for t in [tensor, *others]}
    assert len(digests) == 7
    assert tensor_digest(tensor.T.contiguous().T) == tensor_digest(tensor)


def test_signs_of_zero_and_denormals_have_no_say_in_a_digest() -> None:
    zeros = torch.zeros(3)
    assert tensor_digest(torch.tensor([-0.0, 1e-40, -1e-45])) == tensor_digest(zeros)
    assert tensor_digest(torch.tensor([0.0, 2e-38, 0.0])) != tensor_digest(zeros)


def test_arithmetic_of_tensors_gives_the_hashes_of_the_library() -> None:
    torch.manual_seed(0)
    words = torch.randint(-(2**63), 2**63 - 1, (5, xxh3.LENGTH // 8))
    words[3], words[4] = 0, -1
    expected = [xxhash.xxh3_64_intdigest(row.numpy().tobytes()) for row in words]
    assert [int(number) % 2**64 for number in xxh3.hashes(words)] == expected


@DTYPES
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (576,), (4097, 5), (3, 300_001)])
def test_a_device_has_the_digest_of_the_cpu(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    tensor = torch.randn(shape).mul(100).to(dtype)
    expected = tensor_digest(tensor)
    if torch.cuda.is_available():
        assert tensor_digest(tensor.cuda()) == expected
    monkeypatch.setattr(digest, "_on_cpu", digest._on_device)
    monkeypatch.setattr(digest, "_LEAVES", 3)
    assert tensor_digest(tensor) == expected


@DTYPES
def test_of_a_large_tensor_one_element_and_two_exchanged_ones_have_a_say(dtype: torch.dtype) -> None:
    """Wherever they are: in one leaf, in two, and in the last, which is not full."""
    tensor = torch.arange(100_003).remainder(251).to(dtype)
    found = {tensor_digest(tensor)}
    places = [0, 1, 4095, 8192, 65_536, 100_002]
    for place in places:
        other = tensor.clone()
        other[place] = not other[place] if dtype == torch.bool else other[place] + 1
        found.add(tensor_digest(other))
    for place in (1, 8193, 100_001):
        other = tensor.clone()
        other[place], other[place - 1] = True, False
        again = other.clone()
        again[place], again[place - 1] = other[place - 1], other[place]
        assert tensor_digest(other) != tensor_digest(again)
    assert len(found) == 1 + len(places)


def test_a_part_of_a_larger_tensor_has_the_digest_of_its_copy() -> None:
    """Also where it begins between two words: experts are parts of a stack."""
    stack = torch.arange(30.0).bfloat16().reshape(2, 3, 5)
    for part in (stack[1], stack.flatten()[1:], stack[:, 1], stack[0].T):
        assert tensor_digest(part) == tensor_digest(part.clone(memory_format=torch.contiguous_format))
