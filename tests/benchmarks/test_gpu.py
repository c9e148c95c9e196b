"""What `benchmarks.gpu` counts, in its tiny shape."""

from __future__ import annotations

from typing import Any

import pytest
from torch.nn.attention import flex_attention
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu import CASES, Case, supervised
from benchmarks.gpu_workload import TINY, sequences
from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.models import flex_attention as ours
from rlhf_core.training.distributed import join_group

pytestmark = pytest.mark.endurance("benchmarks")


@pytest.mark.parametrize(
    ("case", "tolerance"),
    [
        (CASES["sft-long"], 0.08),
        (lambda scale: supervised(scale, scale.long, LoraConfig(rank=1)), 0.08),  # adapters are not counted
        (CASES["rl-long"], 0.08),
        (CASES["grpo-tree"], 0.15),  # of attention torch counts the masked pairs too
    ],
    ids=["sft", "lora", "rl", "grpo"],
)
def test_the_cost_of_a_step_is_what_torch_counts(case: Case, tolerance: float) -> None:
    join_group(rank=0, size=1)
    work, seconds = case(TINY)
    seconds(1)
    with FlopCounterMode(display=False) as counter:
        seconds(1)
    assert counter.get_total_flops() == pytest.approx(work.flops, rel=tolerance)


@pytest.mark.parametrize("name", ["sft-long", "rl-long", "grpo-tree", "grpo-packed"])
def test_cases_with_flex_attention_do_the_work_of_those_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *states: None)
    calls: list[int] = []
    attend = ours.flex_attention

    def counted(*states: Any, **options: Any) -> Any:
        calls.append(1)
        return attend(*states, **options)

    monkeypatch.setattr(ours, "flex_attention", counted)
    join_group(rank=0, size=1)
    (work, plain), (same, flex) = CASES[name](TINY), CASES[f"{name}-flex"](TINY)
    assert work == same
    calls.clear()
    plain(1)
    assert not calls
    flex(1)
    assert calls


def test_a_tree_computes_prompts_once() -> None:
    join_group(rank=0, size=1)
    group = TINY.grpo
    tree, packed = CASES["grpo-tree"](TINY)[0], CASES["grpo-packed"](TINY)[0]
    assert tree.tokens == packed.tokens == packed.computed == sequences(TINY, group).num_tokens
    assert tree.computed == group.prompts * (group.prompt + group.completions * group.completion)
