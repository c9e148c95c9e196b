"""XXH3 (64 bits, without a seed) of many inputs of equal length, by tensor arithmetic on any device.

As specified in github.com/Cyan4973/xxHash, doc/xxhash_spec.md, for inputs of more than 240 bytes: eight lanes
accumulate stripes of 64 bytes, and are scrambled after each block of 16. int64 is used as uint64: sums and products
wrap alike.
"""

from __future__ import annotations

from functools import lru_cache

import numpy
import torch
from torch import Tensor

LENGTH = 16384  # bytes of an input: sixteen blocks
_BLOCKS, _STRIPES, _LANES = LENGTH // 1024, 16, 8
_HALF = 0xFFFFFFFF
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_START = (_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0])
_AVALANCHE = 0x165667919E3779F9


def hashes(words: Tensor) -> Tensor:
    """Return the hashes, (inputs,) int64, of words, (inputs, LENGTH / 8) int64."""
    secrets, scrambling, merging, start = _constants(words.device)
    stripes = words.view(-1, _BLOCKS, _STRIPES, _LANES)
    keyed = stripes ^ secrets
    accumulated = ((keyed & _HALF) * _shifted(keyed, 32)).sum(2)
    accumulated += stripes.sum(2).view(-1, _BLOCKS, _LANES // 2, 2).flip(-1).flatten(2)  # of the adjacent lane
    lanes = start.expand(len(stripes), _LANES)
    for block in accumulated.unbind(1)[:-1]:
        lanes = lanes + block
        lanes = (lanes ^ _shifted(lanes, 47) ^ scrambling) * _PRIME32[0]
    lanes = (lanes + accumulated[:, -1]) ^ merging
    merged = _folded_product(lanes[:, ::2], lanes[:, 1::2]).sum(1) + _signed(LENGTH * _PRIME64[0])
    merged = (merged ^ _shifted(merged, 37)) * _signed(_AVALANCHE)
    return merged ^ _shifted(merged, 32)


def _folded_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the lower 64 bits of the 128-bit products, xor the upper ones."""
    a_low, a_high, b_low, b_high = a & _HALF, _shifted(a, 32), b & _HALF, _shifted(b, 32)
    high_low = a_high * b_low
    cross = _shifted(a_low * b_low, 32) + (high_low & _HALF) + a_low * b_high
    return (a * b) ^ (a_high * b_high + _shifted(high_low, 32) + _shifted(cross, 32))


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shift to the right, filling with zeros."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    number %= 1 << 64
    return number - (1 << 64) if number >> 63 else number


@lru_cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return secrets of stripes (blocks, stripes, lanes), scrambling and merging, and initial lanes: (lanes,) each."""
    secrets = torch.stack([_secret(8 * stripe) for stripe in range(_STRIPES)]).repeat(_BLOCKS, 1, 1)
    secrets[-1, -1] = _secret(len(_SECRET) - 64 - 7)
    start = torch.tensor([_signed(number) for number in _START])
    constants = secrets, _secret(len(_SECRET) - 64), _secret(11), start
    return tuple(each.to(device) for each in constants)  # type: ignore[return-value]


def _secret(start: int) -> Tensor:
    """Return 64 bytes of the secret, (lanes,) int64."""
    return torch.from_numpy(numpy.frombuffer(_SECRET[start : start + 64], dtype="<i8").copy())
