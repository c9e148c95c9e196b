"""Cost of an update by its parts: `python -m benchmarks.scaling [--dtype bfloat16]`.

Forward and backward of the log-probs of one batch by a model of 25M parameters with random weights, in a tree. One
quantity at a time is varied: all tokens, the longest sequence, completions of one prompt, and the spread of lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console

from benchmarks.layouts import VOCABULARY, median_seconds, model, options, table
from rlhf_core.models.layouts import TREE
from rlhf_core.models.packed import PolicyModel
from rlhf_core.models.token_tree import TokenTree
from rlhf_core.models.tree_attention import use_tree_attention
from rlhf_core.packing import pack
from rlhf_core.types import PackedBatch

_PROMPT, _COMPLETIONS, _MEAN = 96, 64, 64


@dataclass(frozen=True, slots=True)
class Case:
    """A batch: completions of these lengths, `group` of each prompt."""

    varied: str
    value: str
    lengths: tuple[int, ...]
    group: int = 8

    def batch(self) -> PackedBatch:
        generator = torch.Generator().manual_seed(0)

        def tokens(count: int) -> torch.Tensor:
            return torch.randint(3, VOCABULARY, (count,), generator=generator)

        prompts = [tokens(_PROMPT) for _ in range(-(-len(self.lengths) // self.group))]
        sequences = [torch.cat([prompts[i // self.group], tokens(n)]) for i, n in enumerate(self.lengths)]
        return pack(sequences, [torch.arange(len(ids)) >= _PROMPT for ids in sequences])


def cases() -> Iterator[Case]:
    for count in (16, 32, 64, 128):
        yield Case("completions", str(count), log_normal(0.7, count))
    for longest in (64, 256, 1024, 2048):
        rest = (_COMPLETIONS * _MEAN - longest) // (_COMPLETIONS - 1)
        yield Case("longest completion, equal tokens", str(longest), (longest, *[rest] * (_COMPLETIONS - 1)))
    for group in (1, 2, 4, 8, 16, 64):
        yield Case("completions of a prompt", str(group), log_normal(0.7), group)
    for deviation in (0.0, 0.5, 1.0, 1.5):
        yield Case("deviation of log length, equal tokens", str(deviation), log_normal(deviation))


def log_normal(deviation: float, count: int = _COMPLETIONS) -> tuple[int, ...]:
    """Return lengths of mean 64, whatever their deviation."""
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(1)).double().mul(deviation).exp()
    return tuple((drawn / drawn.mean() * _MEAN).round().int().clamp_min(1).tolist())


def main(arguments: Sequence[str] | None = None) -> None:
    parsed = options(__doc__, arguments)
    policy = PolicyModel(causal := model(getattr(torch, parsed.dtype)))
    use_tree_attention(causal)
    shown = table(
        parsed, "varied", "", "longest", "trained", "computed", "seconds", "trained/s", "ms per computed token"
    )
    for case in cases():
        batch = case.batch()
        seconds = median_seconds(policy, batch, TREE, parsed.repeats)
        computed = len(TokenTree.of(batch).kept)
        shown.add_row(
            case.varied, case.value, str(_PROMPT + max(case.lengths)), str(batch.num_trained_tokens), str(computed),
            f"{seconds:.2f}", f"{batch.num_trained_tokens / seconds:.0f}", f"{1000 * seconds / computed:.2f}",
        )  # fmt: skip
    Console(width=140).print(shown)


if __name__ == "__main__":
    main()
