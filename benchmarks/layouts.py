"""Forward and backward of one batch in each layout of sequences: `python -m benchmarks.layouts [--dtype bfloat16]`.

A model of 25M parameters with random weights computes the log-probs of completions and their gradient. The batches are
groups of completions with one prompt, pairs, and sequences that share nothing; lengths of completions are exponential.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.record import store_figures
from rlhf_core.models.layouts import TREE, Layouts
from rlhf_core.models.packed import PolicyModel
from rlhf_core.models.token_tree import TokenTree
from rlhf_core.models.tree_attention import use_tree_attention
from rlhf_core.packing import pack
from rlhf_core.types import PackedBatch

VOCABULARY, _LONGEST = 8192, 256
_ROWS_OR_PACKED = Layouts("positions", rows=True)  # whichever costs less, as for models that a tree is not right for
# Prompts, completions of each, tokens of a prompt, mean tokens of a completion.
_BATCHES = {"8 groups of 8": (8, 8, 96, 28), "32 pairs": (32, 2, 40, 120), "64 sequences": (64, 1, 5, 90)}


def model(dtype: torch.dtype) -> Any:
    """Return a PreTrainedModel."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=4096,
    )  # fmt: skip
    built: Any = LlamaForCausalLM(config)
    return built.to(dtype).train()


def batch(prompts: int, completions: int, prompt: int, mean: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for _ in range(prompts):
        shared = torch.randint(3, VOCABULARY, (prompt,), generator=generator)
        lengths = torch.empty(completions).exponential_(1 / mean, generator=generator).clamp(1, _LONGEST).int()
        sequences += [
            torch.cat([shared, torch.randint(3, VOCABULARY, (length,), generator=generator)])
            for length in lengths.tolist()
        ]
    return pack(sequences, [torch.arange(len(ids)) >= prompt for ids in sequences])


def pass_seconds(policy: PolicyModel, each: PackedBatch) -> float:
    """Return the seconds of one forward and backward."""
    started = time.perf_counter()
    policy(each, only=each.loss_mask)[0].sum().backward()
    seconds = time.perf_counter() - started
    policy.zero_grad()
    return seconds


def median_seconds(policy: PolicyModel, each: PackedBatch, layouts: Layouts, repeats: int) -> float:
    """Return the median over passes, without the first one, which is slower."""
    policy.layouts = layouts
    seconds = [pass_seconds(policy, each) for _ in range(repeats + 1)]
    return statistics.median(seconds[1:])


def options(description: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args(arguments)


def table(parsed: argparse.Namespace, name: str, *figures: str) -> Table:
    shown = Table(name, title=f"{parsed.dtype}, {torch.get_num_threads()} threads, median of {parsed.repeats}")
    for column in figures:
        shown.add_column(column, justify="right")
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    parsed = options(__doc__, arguments)
    policy = PolicyModel(causal := model(getattr(torch, parsed.dtype)))
    shown = table(parsed, "batch", "tokens", "computed in a tree", "rows or packed", "tree", "ratio")
    figures = {}
    for name, sizes in _BATCHES.items():
        each = batch(*sizes)
        causal.set_attn_implementation("sdpa")
        before = median_seconds(policy, each, _ROWS_OR_PACKED, parsed.repeats)
        use_tree_attention(causal)
        tree = median_seconds(policy, each, TREE, parsed.repeats)
        computed = len(TokenTree.of(each).kept)
        times = (f"{before:.2f} s", f"{tree:.2f} s", f"{before / tree:.2f}")
        shown.add_row(name, str(each.num_tokens), str(computed), *times)
        figures[name] = {
            "tokens": each.num_tokens, "computed": computed,
            "rows_seconds": before, "tree_seconds": tree, "speed": before / tree,
        }  # fmt: skip
    Console().print(shown)
    store_figures(figures)


if __name__ == "__main__":
    main()
