"""Unit costs of this machine: the figures are those that the measurements were made by, and the command runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import placement
from benchmarks.gpu_workload import TINY, sequences, work
from benchmarks.grpo_workload import GRPOWorkload
from benchmarks.simulate import HARDWARE
from benchmarks.simulate_here import PHASES, alone, predicted, run
from benchmarks.step_inputs import Layout, Shape, Workload
from benchmarks.step_model import sampling, score, update
from benchmarks.unit_costs import BATCHES, LONG_PROMPT, PROMPT, PROMPTS, Measured, Pair, fitted, shape_of, unit_costs
from benchmarks.word_models import make_model

pytestmark = [pytest.mark.endurance("benchmarks"), pytest.mark.slow("measures a run")]


def test_a_forward_costs_what_the_benchmark_of_a_gpu_counts() -> None:
    of, group = TINY.config, TINY.grpo
    shape = Shape(
        of["num_hidden_layers"], of["hidden_size"], of["intermediate_size"], of["num_attention_heads"],
        of["num_key_value_heads"], of["head_dim"], of["vocab_size"], tied=True,
    )  # fmt: skip
    modelled = Workload(shape, group.prompts, group.completions, group.prompt, group.completion)
    counted = work(TINY, sequences(TINY, group), tree=True, passes=(1, 1))
    assert modelled.computed == counted.computed
    assert modelled.forward == pytest.approx(counted.flops, rel=0.02)


def test_measurements_that_follow_the_formulas_give_their_figures() -> None:
    shape = shape_of(GRPOWorkload("25m", "float32"))
    known = replace(
        HARDWARE["h100"], flops=100e9, memory=20e9, training=0.5, scoring=0.6, prefill=0.7, decoding=0.4,
        reading=math.inf, optimizer=0.3, engine_step=0.004, request=0.001, call=0.03, publish=300e6, block=128,
    )  # fmt: skip
    layout = Layout(1, 1)

    def sampled(batch: int, prompt: int, tokens: int) -> float:
        asked = Workload(shape, batch, 1, prompt, tokens, weight_bytes=4)
        return sum(sampling(asked, layout, known).values())

    first = [sampled(batch, PROMPT, 1) for batch in BATCHES]
    steps = [(sampled(batch, PROMPT, 25) - once) / 24 for batch, once in zip(BATCHES, first, strict=True)]
    trained = []
    for prompts in PROMPTS:
        asked = Workload(shape, prompts, 8, 24, 24, weight_bytes=4)
        trained.append((
            asked.forward, sum(score(asked, layout, known).values()), sum(update(asked, layout, known).values()),
        ))  # fmt: skip
    published = 4 * shape.parameters / known.publish
    measured = Measured(first, steps, sampled(BATCHES[1], LONG_PROMPT, 1), trained, published)
    pair = Pair(0.8, 1e9, 1e-4)
    found = fitted(shape, pair, measured)
    assert found.flops * found.training == pytest.approx(50e9)
    assert found.flops * found.scoring == pytest.approx(60e9)
    assert found.flops * found.prefill == pytest.approx(70e9, rel=0.01)
    assert found.flops * found.decoding == pytest.approx(40e9, rel=0.01)
    assert found.memory * found.optimizer == pytest.approx(6e9)
    assert (found.engine_step, found.request, found.call) == pytest.approx((0.004, 0.001, 0.03), rel=0.05)
    assert (found.publish, found.together) == pytest.approx((300e6, 0.8))
    with pytest.raises(RuntimeError, match="more work took less time"):
        fitted(shape, pair, replace(measured, steps=steps[::-1]))


def test_a_tiny_run_is_predicted_and_measured(tmp_path: Path) -> None:
    work = GRPOWorkload(
        "1m", "float32", prompts=2, group=4, prompt_tokens=8, completion_tokens=5, trl_micro_batch=4, warm_up=1,
        steps=2, threads=1,
    )  # fmt: skip
    make_model(work.shape, tmp_path, ends_after=0)
    measured = alone(unit_costs, work, tmp_path, 1, False)
    assert min(*measured.first, *measured.steps, measured.long, *measured.trained[0], measured.published) > 0
    seen = alone(run, work, tmp_path, 2, 2, True)
    assert predicted(work, HARDWARE["h100"], 2, 2).keys() == seen.keys() == {*PHASES, "step"}
    assert seen["step"] == pytest.approx(sum(seen[phase] for phase in PHASES))
    assert min(seen["sampling"], seen["update"]) > 0


def test_bundles_are_placed_on_nodes_with_gpus_that_do_not_exist(capfd: pytest.CaptureFixture[str]) -> None:
    placement.main(["--nodes", "2", "--gpus", "3", "--bundles", "6", "--repeats", "1"])
    assert "2 nodes of 3 GPUs" in capfd.readouterr().out
