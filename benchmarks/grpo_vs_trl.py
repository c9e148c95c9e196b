"""GRPO by us and by TRL on the same work: `python -m benchmarks.grpo_vs_trl --trl FOLDER` (see against_trl).

The same model, prompts, number and length of completions, precision and threads; one optimizer step a batch, no KL.
"""

from __future__ import annotations

import sys
from functools import partial

from benchmarks.against_trl import Benchmark, main
from benchmarks.grpo_workload import GRPOWorkload
from benchmarks.word_models import make_model

BENCHMARK = Benchmark(
    name="grpo_vs_trl",
    description="GRPO by us and by TRL on the same work",
    workload=GRPOWorkload,
    options={
        "prompts": "of a step", "group": "completions of a prompt", "prompt_tokens": "of a prompt",
        "completion_tokens": "of a completion", "micro_batch": "sequences of one forward",
    },
    modules=("grpo_ours", "grpo_trl"),
    unit="tokens",  # of completions, trained
    aim=1.5,
    phases=("generate", "score", "update", "publish", "other"),
    make_model=partial(make_model, ends=False),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, sys.argv[1:]))
