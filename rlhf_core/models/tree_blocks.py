"""Masks of FlexAttention for the tokens of a tree: which blocks of 128 queries see which blocks of 128 keys.

A token sees the tokens before it in its sequences: those of its own segment, and of the segments that its sequences
pass through before. Segments are numbered so that those behind a segment have consecutive numbers, as in a walk that
goes down first: then whether a token sees another is a comparison of numbers, in the kernel. A block without visible
pairs is left out, and one of visible pairs alone is computed without comparisons. No value is read back from the
device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from rlhf_core.models.token_tree import Segment

BLOCK = 128  # tokens; the least that kernels of FlexAttention take well
_SIZES = 4  # between a power of two and the next

# (sequence, head, query, key), all numbers: True if the query sees the key.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def padded_size(tokens: int) -> int:
    """Return the size to which attention pads a row of `tokens`, so that few sizes are compiled.

    A multiple of a block and of a quarter of the power of two below: at most four sizes from one power of two to the
    next, and above 512 tokens at most a quarter of padding.
    """
    step = max(BLOCK, (1 << (tokens - 1).bit_length()) // (2 * _SIZES))
    return -(-tokens // step) * step


class TreeBlocks:
    """The segments of a row of n tokens as masks of FlexAttention, of `size` queries and keys.

    Padding is a further segment behind them, which no token of the row sees.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        """segments: consecutive; each stands behind those that its sequences pass through before."""
        self.length = segments[-1].start + segments[-1].length
        self.size = padded_size(self.length)
        if padding := self.size - self.length:
            segments = [*segments, Segment(self.length, padding, torch.empty(0, dtype=torch.int64))]
        numbers = [
            (segment.start, segment.length, segment.before.numel(), *number)
            for segment, number in zip(segments, _numbers(segments), strict=True)
        ]
        self._starts, self._lengths, depths, self._first, self._end = (
            torch.tensor(numbers, dtype=torch.int32).t().contiguous().to(device)
        )
        places = torch.arange(self.size, dtype=torch.int32, device=device)
        each = torch.arange(len(segments), device=device).repeat_interleave(self._lengths, output_size=self.size)
        # (size,) int32: each token's place in its sequences, its segment's number, and the end of those behind that.
        self._depths = (depths - self._starts)[each] + places
        self._first_of_each, self._end_of_each = self._first[each], self._end[each]
        self._masks: dict[int | None, BlockMask] = {}

    def mask(self, window: int | None) -> BlockMask:
        """Return the mask of all layers with this sliding window, the number of last keys that a query sees."""
        if window is not None and window >= self.size:
            window = None
        if window not in self._masks:
            seen, whole = self._blocks(window)
            self._masks[window] = BlockMask.from_kv_blocks(
                *_ordered(seen & ~whole), *_ordered(whole), BLOCK, self._sees(window), (self.size, self.size)
            )
        return self._masks[window]

    def _sees(self, window: int | None) -> MaskFunction:
        first, end, depths = self._first_of_each, self._end_of_each, self._depths

        def sees(_sequence: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            seen: Tensor = (key <= query) & (first[key] <= first[query]) & (first[query] < end[key])
            return seen if window is None else seen & (depths[query] - depths[key] < window)

        return sees

    def _blocks(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Return, of each block of queries and each of keys, whether any pair is visible, and whether all are.

        A window may hide all pairs of a block that counts as visible.
        """
        count = self.size // BLOCK
        edges = torch.arange(0, self.size, BLOCK, dtype=torch.int32, device=self._starts.device).unsqueeze(1)
        overlaps = (self._starts + self._lengths).minimum(edges + BLOCK) - self._starts.maximum(edges)
        tokens = overlaps.clamp(min=0).float()  # (blocks, segments)
        behind = (self._first <= self._first.unsqueeze(1)) & (self._first.unsqueeze(1) < self._end)
        pairs = tokens @ behind.float() @ tokens.t()  # exact: at most BLOCK^2
        earlier = torch.ones(count, count, dtype=torch.bool, device=pairs.device).tril()
        seen, whole = (pairs > 0) & earlier, (pairs == BLOCK * BLOCK) & earlier.tril(-1)
        if window is not None:
            depths = self._depths.view(count, BLOCK)
            least, most = depths.amin(1), depths.amax(1)
            seen &= least.unsqueeze(1) - most < window
            whole &= most.unsqueeze(1) - least < window
        return seen, whole


def _numbers(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """Return the number of each segment, and the end of the numbers of itself and all behind it."""
    starts = [segment.start for segment in segments]
    parents = [
        bisect_right(starts, int(segment.before[-1])) - 1 if segment.before.numel() else None for segment in segments
    ]
    counts = [1] * len(segments)
    for i in reversed(range(len(segments))):
        if (parent := parents[i]) is not None:
            counts[parent] += counts[i]
    numbers: list[tuple[int, int]] = []
    free: list[int] = []  # the next number behind each segment
    roots = 0
    for parent, count in zip(parents, counts, strict=True):
        if parent is None:
            number, roots = roots, roots + count
        else:
            number = free[parent]
            free[parent] += count
        numbers.append((number, number + count))
        free.append(number + 1)
    return numbers


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of true columns in each row of `blocks`, and the columns, the true ones first."""
    dense = blocks.to(torch.int32)
    columns = dense.argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return dense.sum(1, dtype=torch.int32)[None, None], columns.contiguous()[None, None]
