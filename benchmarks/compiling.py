"""Forward and backward of one batch by plain and compiled layers: `python -m benchmarks.compiling [--dtype bfloat16]`.

The model is that of `benchmarks.layouts`; the batch has 8 groups of 8 completions. The first pass of compiled layers
compiles them, or loads the code from the folder TORCHINDUCTOR_CACHE_DIR: run it twice with an empty folder for both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.console import Console

from benchmarks.layouts import batch, median_seconds, model, options, pass_seconds, table
from benchmarks.record import store_figures
from rlhf_core.models.compiling import compile_layers
from rlhf_core.models.layouts import TREE
from rlhf_core.models.packed import PolicyModel
from rlhf_core.models.tree_attention import use_tree_attention


def main(arguments: Sequence[str] | None = None) -> None:
    parsed = options(__doc__, arguments)
    policy = PolicyModel(causal := model(getattr(torch, parsed.dtype)))
    use_tree_attention(causal)
    each = batch(8, 8, 32, 64)
    plain = median_seconds(policy, each, TREE, parsed.repeats)
    compile_layers(causal)
    first = pass_seconds(policy, each)
    compiled = median_seconds(policy, each, TREE, parsed.repeats)
    shown = table(parsed, "batch", "tokens", "plain", "compiled", "ratio", "first pass", "pays from pass")
    pays = f"{1 + (first - plain) / (plain - compiled):.0f}" if compiled < plain else "never"
    times = (f"{plain:.2f} s", f"{compiled:.2f} s", f"{plain / compiled:.2f}", f"{first:.1f} s")
    shown.add_row("8 groups of 8", str(each.num_tokens), *times, pays)
    Console().print(shown)
    store_figures({
        "plain_seconds": plain, "compiled_seconds": compiled, "speed": plain / compiled, "first_pass_seconds": first
    })  # fmt: skip


if __name__ == "__main__":
    main()
