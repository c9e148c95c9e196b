"""DPO by us and by TRL on the same work: `python -m benchmarks.dpo_vs_trl --trl FOLDER` (see against_trl).

The same model, pairs in the same order, optimizer, precision and threads; both compute the reference's log-probs while
they train, which is the default of both. TRL pads: its padding-free path is off.
"""

from __future__ import annotations

import sys
from functools import partial

from benchmarks.against_trl import Benchmark, main
from benchmarks.supervised_workload import SupervisedWorkload

OPTIONS = {
    "batch": "rows of a step", "prompt_tokens": "of a prompt, median", "completion_tokens": "of a completion, median",
    "max_length": "tokens of the longest sequence", "trl_micro_batch": "TRL's, pairs or packed sequences of a forward",
    "tokens_per_micro_batch": "ours, of a forward",
}  # fmt: skip
MODULES = ("supervised_ours", "supervised_trl")
BENCHMARK = Benchmark(
    name="dpo_vs_trl",
    description="DPO by us and by TRL on the same work",
    workload=partial(SupervisedWorkload, method="dpo"),
    options=OPTIONS,
    modules=MODULES,
    unit="pairs",
    aim=1.5,
    loss_tolerance={"float32": 3e-4},  # in bfloat16 the paths round their updates in different ways
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, sys.argv[1:]))
