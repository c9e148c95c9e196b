"""SFT by us and by TRL on the same work: `python -m benchmarks.sft_vs_trl --trl FOLDER` (see against_trl).

The same model, conversations, optimizer, precision and threads; both pack without padding. All tokens of the
conversations are counted, of which both train the assistant's.
"""

from __future__ import annotations

import sys
from functools import partial

from benchmarks.against_trl import Benchmark, main
from benchmarks.dpo_vs_trl import MODULES, OPTIONS
from benchmarks.supervised_workload import SupervisedWorkload

BENCHMARK = Benchmark(
    name="sft_vs_trl",
    description="SFT by us and by TRL on the same work",
    workload=partial(SupervisedWorkload, method="sft", batch=32),
    options=OPTIONS,
    modules=MODULES,
    unit="tokens",
    aim=1.3,
    loss_tolerance={"float32": 1e-5, "bfloat16": 1e-3},
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, sys.argv[1:]))
