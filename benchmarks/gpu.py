"""Training throughput and memory on one GPU: `python -m benchmarks.gpu [--output FILE]`.

Random weights in the shape of Qwen3-0.6B, in bfloat16 over float32 master weights, trained by DeepSpeed as a stage's
rank does it; without a GPU the same cases in a tiny shape. Cases with `-flex` are those of the same name with
FlexAttention in place of torch's `scaled_dot_product_attention`; the first step, which compiles, is not counted.
GRPO's update is also measured by TRL on the same card (benchmarks/gpu_trl.py). MFU counts the multiply-adds of the
model on the tokens that a case computes, without those that are computed again, over the card's bfloat16 peak without
sparsity.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.flex_on_cpu import allow_backward_on_cpu
from benchmarks.gpu_workload import QWEN3, TINY, Scale, Work, minibatch, sequences, unrelated, work
from benchmarks.record import commit, store_figures
from rlhf_core.algorithms.grpo import GRPO
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.rl.algorithms import GRPOConfig
from rlhf_core.config.stages.trained import LoraConfig, OptimizerConfig
from rlhf_core.division import Division
from rlhf_core.losses.supervised import next_token_loss
from rlhf_core.metrics import LossAndMetrics
from rlhf_core.models.adapters import add_lora
from rlhf_core.models.flex_attention import use_flex_attention
from rlhf_core.models.layouts import Layouts
from rlhf_core.models.packed import PolicyModel
from rlhf_core.training.deepspeed_engine import DeepSpeedEngine
from rlhf_core.training.distributed import join_group
from rlhf_core.types import Minibatch, PackedBatch

PEAK_FLOPS = {"H100": 989.4e12, "H200": 989.4e12, "A100": 312e12}  # of NVIDIA's datasheets, SXM, bfloat16, dense
_WARM_UP, _STEPS = 1, 3
_OPTIMIZER = OptimizerConfig(learning_rate=1e-6, schedule="constant", warmup_share=0.0)
_GRPO = GRPOConfig.model_validate({
    "optimizer": _OPTIMIZER, "rewards": {"model": {"type": "reward_model", "model": "reward_model"}}, "group_size": 8,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    case: str
    tokens: int
    computed: int
    seconds: float  # of a step, the median
    tokens_per_second: float
    mfu: float | None  # None: the card's peak is not known
    peak_bytes: int | None  # None: not on a GPU


Seconds = Callable[[int], list[float]]  # of each of a number of steps


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def model(scale: Scale, dtype: torch.dtype) -> Any:
    """Return a PreTrainedModel on the device."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**scale.config)
    with device():
        built: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return built


def engine(
    scale: Scale, *, trained: bool = True, lora: LoraConfig | None = None, flex: bool = False
) -> DeepSpeedEngine:
    causal = model(scale, torch.bfloat16)
    if flex:
        use_flex_attention(causal)
    return DeepSpeedEngine(
        PolicyModel(causal if lora is None else add_lora(causal, lora, "CAUSAL_LM")),
        engine=EngineConfig(dtype="bfloat16"), optimizer=_OPTIMIZER if trained else None, total_steps=100,
    )  # fmt: skip


def micro_batches(batch: PackedBatch, limit: int, *, shares_prompts: bool) -> list[Any]:
    division = Division.of(batch, replicas=1, tokens_per_micro_batch=limit, shares_prompts=shares_prompts)
    return division.split()[0]


def supervised(
    scale: Scale, tokens: int, lora: LoraConfig | None = None, *, flex: bool = False
) -> tuple[Work, Seconds]:
    batch, trained = unrelated(scale, tokens), engine(scale, lora=lora, flex=flex)

    def loss(model: nn.Module, part: PackedBatch) -> LossAndMetrics:
        return next_token_loss(model(part, only=part.loss_mask)[0], part.loss_mask, num_tokens=tokens), {}

    passes = (3.0, 3.0) if lora is None else (2.0, 2.0)
    return work(scale, batch, tree=True, passes=passes), repeated(lambda: trained.step([batch], loss))


def policy_loss(model: nn.Module, part: Minibatch) -> LossAndMetrics:
    return GRPO(_GRPO).policy_loss(logprobs(model, part), None, part, 0.0)


def logprobs(model: nn.Module, part: PackedBatch) -> Tensor:
    computed: Tensor = model(part, only=part.loss_mask)[0]
    return computed


def rl_update(scale: Scale, *, flex: bool = False) -> tuple[Work, Seconds]:
    """Compute log-probs by the policy and by a reference, and one update."""
    batch = sequences(scale, scale.rl)
    policy, reference = engine(scale, flex=flex), engine(scale, trained=False, flex=flex)

    def step() -> None:
        reference.forward([batch], logprobs)
        (old,) = policy.forward([batch], logprobs)
        policy.step([minibatch(batch, old.cpu())], policy_loss)

    return work(scale, batch, tree=True, passes=(5.0, 5.0)), repeated(step)


def grpo_update(scale: Scale, *, tree: bool, flex: bool = False) -> tuple[Work, Seconds]:
    """Run one update of a step's groups; without a tree they are packed, or in rows where that costs less (not with
    flex attention, which skips what packed sequences do not see of each other).
    """
    batch, policy = sequences(scale, scale.grpo), engine(scale, flex=flex)
    if not tree:
        causal: Any = policy.module.model
        causal.set_attn_implementation("flex" if flex else "sdpa")
        policy.module.layouts = Layouts("positions", rows=not flex)  # type: ignore[assignment]
    parts = micro_batches(minibatch(batch), scale.long, shares_prompts=tree)
    return work(scale, batch, tree=tree, passes=(3.0, 3.0)), repeated(lambda: policy.step(parts, policy_loss))


def trl_update(scale: Scale, dtype: torch.dtype) -> tuple[Work, Seconds]:
    from benchmarks.gpu_trl import update_seconds

    cost = work(scale, sequences(scale, scale.grpo), tree=False, passes=(3.0, 3.0))
    trained, group = model(scale, dtype), asdict(scale.grpo)
    return cost, lambda steps: update_seconds(trained, **group, steps=steps, synchronize=synchronize)


Case = Callable[[Scale], tuple[Work, Seconds]]
CASES: Mapping[str, Case] = {
    "sft-short": lambda scale: supervised(scale, scale.short),
    "sft-long": lambda scale: supervised(scale, scale.long),
    "sft-long-flex": lambda scale: supervised(scale, scale.long, flex=True),
    "lora-long": lambda scale: supervised(scale, scale.long, LoraConfig(rank=16)),
    "rl-long": rl_update,
    "rl-long-flex": partial(rl_update, flex=True),
    "grpo-tree": partial(grpo_update, tree=True),
    "grpo-tree-flex": partial(grpo_update, tree=True, flex=True),
    "grpo-packed": partial(grpo_update, tree=False),
    "grpo-packed-flex": partial(grpo_update, tree=False, flex=True),
    "grpo-trl": partial(trl_update, dtype=torch.float32),
    "grpo-trl-bf16-weights": partial(trl_update, dtype=torch.bfloat16),
}


def measure(name: str, scale: Scale, profile: Path | None = None) -> Result:
    """Measure a case. profile: a file to which the operators of one more step are appended, first those that take
    longest on the device, then those that take longest on the host.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    done, seconds = CASES[name](scale)
    each = statistics.median(seconds(_WARM_UP + _STEPS)[_WARM_UP:])
    peak = _peak_flops()
    result = Result(
        name, done.tokens, done.computed, each, done.tokens / each,
        None if peak is None else done.flops / each / peak,
        torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    )  # fmt: skip
    if profile is not None:
        with torch.profiler.profile() as profiler:
            seconds(1)
        with profile.open("a", encoding="utf-8") as file:
            for order in ("self_device_time_total", "self_cpu_time_total"):
                file.write(f"{name}, by {order}\n{profiler.key_averages().table(sort_by=order, row_limit=20)}\n")
    del seconds
    free()
    return result


def repeated(step: Callable[[], object]) -> Seconds:
    return lambda steps: [timed(step) for _ in range(steps)]


def timed(step: Callable[[], object]) -> float:
    synchronize()
    started = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - started


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free() -> None:
    """Return the memory of the last case to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _peak_flops() -> float | None:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((flops for card, flops in PEAK_FLOPS.items() if card in name), None)


@dataclass(frozen=True, slots=True)
class Turn:
    """Device memory and seconds of a trainer's offload and reload."""

    training_bytes: int  # on the device between two steps
    lent_bytes: int  # while it is lent
    lent_reserved_bytes: int  # still reserved by the process then, beside CUDA's context
    offload_seconds: float
    reload_seconds: float


def measure_turn(scale: Scale) -> Turn | None:
    """Measure full training under ZeRO 2, with its pinned host memory allocated; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    batch, trained = unrelated(scale, scale.short), engine(scale)

    def loss(model: nn.Module, part: PackedBatch) -> LossAndMetrics:
        return next_token_loss(logprobs(model, part), part.loss_mask, num_tokens=scale.short), {}

    for _ in range(2):
        trained.step([batch], loss)
        before = torch.cuda.memory_allocated()
        offload = timed(trained.offload)
        lent, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        turn = Turn(before, lent, reserved, offload, timed(trained.reload))
    del trained
    free()
    return turn


def machine() -> dict[str, str]:
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__, "transformers": transformers.__version__, "commit": commit() or "",
    }  # fmt: skip


def figures(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """Return the figures of each case, with the speed of GRPO's updates as a multiple of TRL's."""
    found: dict[str, dict[str, Any]] = {
        each.case: {
            "seconds": each.seconds, "tokens_per_second": each.tokens_per_second, "mfu": each.mfu,
            "peak_gib": None if each.peak_bytes is None else each.peak_bytes / 2**30,
        }
        for each in results
    }  # fmt: skip
    if theirs := [found[name]["tokens_per_second"] for name in ("grpo-trl", "grpo-trl-bf16-weights") if name in found]:
        for name in found.keys() & {"grpo-tree", "grpo-packed"}:
            found[name]["of_trl"] = [found[name]["tokens_per_second"] / speed for speed in theirs]
    return found


def table(results: Sequence[Result]) -> Table:
    shown = Table("case", title=", ".join(f"{name} {value}" for name, value in machine().items()))
    for column in ("tokens", "computed", "seconds", "tokens/s", "MFU", "peak GiB"):
        shown.add_column(column, justify="right")
    for each in results:
        shown.add_row(
            each.case, str(each.tokens), str(each.computed), f"{each.seconds:.3f}", f"{each.tokens_per_second:.0f}",
            "" if each.mfu is None else f"{each.mfu:.1%}",
            "" if each.peak_bytes is None else f"{each.peak_bytes / 2**30:.1f}",
        )  # fmt: skip
    return shown


def run(names: Sequence[str], scale: Scale, output: Path | None, profile: Path | None) -> Iterator[Result]:
    """Return the results, each written to `output` at once with those before it."""
    results: list[Result] = []
    turn = measure_turn(scale)
    for name in names:
        results.append(measure(name, scale, profile))
        if output is not None:
            record = {"machine": machine(), "turn": turn and asdict(turn), "results": [asdict(r) for r in results]}
            output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        yield results[-1]
    if turn is not None:
        print(
            f"lends its device: {turn.training_bytes / 2**30:.2f} GiB in use become {turn.lent_bytes / 2**30:.2f} in "
            f"{turn.offload_seconds:.2f} s, back in {turn.reload_seconds:.2f} s"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--output", type=Path, help="all figures, as JSON")
    parser.add_argument("--profile", type=Path, help="a file for the operators of one step of each case")
    options = parser.parse_args(arguments)
    join_group(rank=0, size=1)
    allow_backward_on_cpu()
    results = []
    scale = QWEN3 if torch.cuda.is_available() else TINY
    for result in run(options.cases, scale, options.output, options.profile):
        print(f"{result.case}: {result.tokens_per_second:.0f} tokens/s", flush=True)
        results.append(result)
    Console(width=120).print(table(results))
    store_figures(figures(results), seeds=[0])


if __name__ == "__main__":
    main()
