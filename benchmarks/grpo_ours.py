"""Our side of `benchmarks.grpo_vs_trl`: the RL stage as shipped, on a Ray cluster of its own.

`python -m benchmarks.grpo_ours WORKLOAD MODEL RESULT SIDE`. One engine (vLLM) and one training rank (DeepSpeed), each a
Ray actor in its own process, and the loop in this one. Weights are published and proven after every step.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import grpo_workload
from benchmarks.grpo_workload import LEARNING_RATE, GRPOWorkload, prompt_ids, rows
from benchmarks.stage_alone import stage_inputs
from benchmarks.workload import COMPILED, SELECTIVE, Result, answer, measured
from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.data.prompts import to_prompts
from rlhf_core.data.reading import write_dataset
from rlhf_core.stages import rl
from rlhf_core.stages.key import computing_libraries
from rlhf_core.stages.ray_cluster import RayCluster

REWARD_FILE = Path(grpo_workload.__file__)


def config(workload: GRPOWorkload, side: str) -> RLConfig:
    """Return the stage's settings; all others are defaults."""
    return RLConfig.model_validate({
        "algorithm": "grpo",
        "dataset": "prompts",
        "steps": workload.all_steps,
        "prompts_per_step": workload.prompts,
        "sampling": {"max_tokens": workload.completion_tokens},
        "rollout": {
            "max_length": workload.length, "cpu_cache_gib": 0.5, "threads": workload.threads,
            "compiled": side == COMPILED,
        },
        "placement": {"threads": workload.threads},
        "engine": {
            "dtype": workload.dtype,
            "zero_stage": 0,
            "compiled": side == COMPILED,
            "gradient_checkpointing": "selective" if side == SELECTIVE else False,
            "tokens_per_micro_batch": workload.tokens_per_micro_batch,
        },
        "checkpoint": {"every_minutes": None},
        "grpo": {
            "group_size": workload.group,
            "rewards": {"text": {"type": "function", "path": str(REWARD_FILE)}},
            "optimizer": {"learning_rate": LEARNING_RATE, "schedule": "constant", "warmup_share": 0.0},
        },
    })  # fmt: skip


def measured_steps(workload: GRPOWorkload, ended: Sequence[tuple[float, Mapping[str, float]]]) -> Result:
    """Return the steps. ended: end and metrics of each step.

    Raises RuntimeError if a completion ended that never should.
    """
    for _, metrics in ended[workload.warm_up :]:
        if not workload.mean_completion and metrics["completion_length"] != workload.completion_tokens:
            raise RuntimeError(f"completions have {metrics['completion_length']} tokens on average: not the same work")
    names = {"generate": "rollout", "score": "score", "update": "update", "publish": "publish"}
    phases = [{phase: metrics[f"seconds/{name}"] for phase, name in names.items()} for _, metrics in ended]
    times = [time for time, _ in ended]
    tokens = [metrics["completion_length"] * workload.completions for _, metrics in ended]
    return measured(workload, times, tokens, computing_libraries(), phases=phases)


def run(workload: GRPOWorkload, model: Path, side: str) -> Result:
    with tempfile.TemporaryDirectory(prefix="grpo-") as name:
        folder = Path(name)
        write_dataset(folder / "prompts", rows(workload), {})
        prompts = to_prompts(rows(workload), load_tokenizer(model), max_tokens=workload.longest)
        if {prompt.token_ids for prompt in prompts} != prompt_ids(workload):
            raise RuntimeError("the prompts are not those of the workload")
        inputs, context = stage_inputs(model, folder / "prompts", folder)
        rl.run(config(workload, side), inputs, context, RayCluster())
    return measured_steps(workload, context.ended)


if __name__ == "__main__":
    answer(sys.argv[1:], GRPOWorkload, run)
