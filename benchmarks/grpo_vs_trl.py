"""GRPO by us and by TRL on the same work: `python -m benchmarks.grpo_vs_trl --trl FOLDER` (see against_trl).

The same model, prompts, number of completions and distribution of their lengths, precision and threads; one optimizer
step a batch, no KL.
"""

from __future__ import annotations

import sys

from benchmarks.against_trl import Benchmark, main
from benchmarks.grpo_workload import GRPOWorkload
from benchmarks.word_models import make_model

BENCHMARK = Benchmark(
    name="grpo_vs_trl",
    description="GRPO by us and by TRL on the same work",
    workload=GRPOWorkload,
    options={
        "prompts": "of a step", "group": "completions of a prompt", "prompt_tokens": "of the shortest prompt",
        "longest_prompt": "tokens; 0: all are as long as the shortest",
        "completion_tokens": "of the longest completion",
        "mean_completion": "tokens of a completion; 0: all are as long as the longest",
        "trl_micro_batch": "TRL's, completions of a forward", "tokens_per_micro_batch": "ours, of a forward",
    },
    modules=("grpo_ours", "grpo_trl"),
    unit="tokens",  # of completions, trained
    aim=1.6,
    phases=("generate", "score", "update", "publish", "other"),
    make_model=lambda workload, folder: make_model(workload.shape, folder, ends_after=workload.mean_completion),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, sys.argv[1:]))
