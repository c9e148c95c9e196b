"""The formulas of a step against values computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import simulate
from benchmarks.simulate import HARDWARE, SHAPES, changed, layout_on, parse
from benchmarks.step_inputs import Hardware, Layout, Shape, Workload
from benchmarks.step_model import decode, decode_step, publish, ring, step, update, zero

# 1 layer of 10 x 10 x 8 + 3 x 10 x 20 = 1,000 weights, 1,000 in the tied embedding, 20 cached values of a token.
SHAPE = Shape(1, 10, 20, 1, 1, 10, 100, tied=True)
TOY = Hardware(
    "toy", flops=1e6, memory=1e3, node=4, link=100.0, network=20.0, host=1e4, store=1e2, publish=1e3, training=0.5,
    scoring=0.5, prefill=0.5, decoding=0.5, reading=0.5, optimizer=1.0, links=0.5, link_latency=0.01,
    network_latency=0.1, engine_step=0.25, request=0.125, call=0.5, driver=0.001, block=4,
)  # fmt: skip
WORK = Workload(SHAPE, prompts=4, group=2, prompt=6, longest=10, scored=0)


def test_weights_and_flops_of_a_shape() -> None:
    assert (SHAPE.backbone, SHAPE.parameters, SHAPE.cached) == (1000, 2000, 20)
    assert SHAPE.flops(computed=3, pairs=5, predicted=2) == 2 * 1000 * 3 + 4 * 10 * 5 + 2 * 1000 * 2
    assert SHAPES["qwen3-8b"].backbone == pytest.approx(6.95e9, rel=1e-3)  # as its model card counts them
    assert SHAPES["qwen3-8b"].parameters == pytest.approx(8.19e9, rel=1e-3)
    assert SHAPES["llama3-70b"].parameters == pytest.approx(70.6e9, rel=1e-3)


def test_tokens_of_a_step() -> None:
    assert (WORK.sampled, WORK.tokens, WORK.computed) == (80, 80 + 8 * 6, 80 + 4 * 6)
    pairs = 4 * 6**2 / 2 + 8 * (6 * 10 + 10**2 / 2)  # of each prompt, and of each completion with it
    assert WORK.forward == SHAPE.flops(104, pairs, 80)


def test_geometric_lengths_have_their_mean_and_are_cut_off() -> None:
    lengths = replace(WORK, mean=100, longest=100_000).lengths(4000)
    assert sum(lengths) / 4000 == pytest.approx(100, rel=0.01)
    assert max(lengths) == pytest.approx(100 * 8.99, rel=0.01)  # ln(2 x 4000)
    cut = replace(WORK, mean=100, longest=150).lengths(4000)
    assert sum(cut) / 4000 == pytest.approx(100 * (1 - 0.2231), rel=0.01)  # e^(-1.5)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (1, {"links": 0.0, "latency": 0.0}),
        (4, {"links": 1000 * 3 / 4 / 50, "latency": 2 * 3 * 0.01}),  # half of 100 bytes a second
        (8, {"network": 1000 * 7 / 8 / 40, "latency": 2 * (6 * 0.01 + 0.1)}),  # 4 links of 20 are less than 100
    ],
)
def test_a_ring_takes_the_time_of_its_slowest_link(devices: int, expected: dict[str, float]) -> None:
    assert ring(1000, devices, TOY, calls=2) == pytest.approx(expected)


def test_the_network_links_of_a_node_carry_a_ring_together() -> None:
    assert ring(1000, 8, replace(TOY, network=30.0))["links"] == pytest.approx(1000 * 7 / 8 / 50)  # 4 x 30 are enough


@pytest.mark.parametrize(
    ("stage", "sent"),
    [
        (0, 2 * 8000),  # an all-reduce of float32 gradients, once
        (2, 3 * 2 * 8000 + 4000),  # one in each micro-batch, then a gather of weights
        (3, 3 * (2 * 4000 + 8000)),  # weights in forward and backward, gradients once
    ],
)
def test_what_zero_exchanges(stage: int, sent: float) -> None:
    layout = Layout(4, 1, zero_stage=stage, micro_batch=9)  # type: ignore[arg-type]
    assert zero(WORK, layout, TOY)["links"] == pytest.approx(
        sent * 3 / 4 / 50
    )  # 104 tokens: 26 a rank, 3 micro-batches


def test_an_update_is_computing_adamw_and_what_is_not_hidden() -> None:
    layout = Layout(4, 1, zero_stage=3, recomputed=1.0)
    parts = update(WORK, layout, TOY)
    computing = 4 * WORK.forward / 4 / 0.5e6
    assert parts["update", "compute"] == pytest.approx(computing)
    assert parts["update", "memory bandwidth"] == pytest.approx(32 * 2000 / 4 / 1000)
    exchanged = zero(WORK, layout, TOY)
    hidden = update(WORK, replace(layout, overlap=0.5), TOY)
    assert hidden["update", "links"] == pytest.approx(
        exchanged["links"] * (1 - 0.5 * computing / sum(exchanged.values()))
    )


def test_decoding_reads_weights_for_few_sequences_and_computes_for_many() -> None:
    one, many = (decode_step(batch, 6, WORK, Layout(1, 1), TOY) for batch in (1, 400))
    assert one == pytest.approx({
        ("sampling", "memory bandwidth"): 2 * (2000 + 6 * 20) / 500, ("sampling", "engine's host"): 0.25,
    })  # fmt: skip
    fast = replace(TOY, memory=1e9)
    assert decode_step(400, 6, WORK, Layout(1, 1), fast)["sampling", "compute"] == pytest.approx(
        400 * (2 * 2000 + 40 * 6) / 0.5e6
    )
    assert ("sampling", "memory bandwidth") in many  # of the cache
    shared = decode_step(1, 6, WORK, Layout(1, 1, engine_devices=2), TOY)
    assert shared["sampling", "memory bandwidth"] == pytest.approx(one["sampling", "memory bandwidth"] / 2)
    assert shared["sampling", "links"] == pytest.approx(2 * 2 * (10 * 2) / 2 / 50)


def test_stragglers_leave_slots_of_an_engine_empty() -> None:
    fixed = replace(TOY, memory=1e12, flops=1e12)  # an engine's step takes 0.25 s whatever its batch
    both = decode([4.0, 2.0], WORK, Layout(1, 1), fixed)
    assert both["sampling", "stragglers"] == pytest.approx(0.25, rel=1e-3)  # 2 of 4 steps are half empty
    assert sum(both.values()) == pytest.approx(4 * 0.25, rel=1e-3)
    alone = decode([4.0, 2.0], WORK, Layout(1, 1, slots=1), fixed)
    assert (sum(alone.values()), alone["sampling", "stragglers"]) == pytest.approx((6 * 0.25, 0.0), rel=1e-3, abs=1e-9)


def test_a_folder_is_copied_from_node_to_node_and_a_broadcast_is_not() -> None:
    folder = publish(WORK, Layout(1, 16, zero_stage=2), TOY)
    assert folder == pytest.approx({("publish", "host memory"): 4.0, ("publish", "Ray's objects"): 2 * 40.0})
    sent = publish(WORK, Layout(1, 16, zero_stage=2, transport="collective"), TOY)
    assert sent["publish", "network"] == pytest.approx(4000 / 40)


def test_shared_devices_have_no_collective() -> None:
    with pytest.raises(ValueError, match="hybrid layout"):
        Layout(8, 8, hybrid=True, transport="collective")


@pytest.mark.parametrize("engine_step", [0.25, 500.0])
def test_a_step_waits_for_the_slower_half_if_they_run_at_once(engine_step: float) -> None:
    work, hardware = replace(WORK, mean=4), replace(TOY, engine_step=engine_step)
    both, beside = (step(work, Layout(2, 2, asynchronous=asynchronous), hardware) for asynchronous in (False, True))
    assert both.seconds == pytest.approx(sum(both.phases.values()))
    sampling, stragglers = both.phases["sampling"], both.parts["sampling", "stragglers"]
    assert stragglers > 0  # but where free slots take prompts of later steps
    assert beside.phases["sampling"] == pytest.approx(sampling - stragglers)
    rest = sum(seconds for phase, seconds in beside.phases.items() if phase != "sampling")
    assert beside.seconds == pytest.approx(rest if engine_step < 1 else sampling - stragglers)


def test_the_next_bottleneck_is_that_of_the_resource_that_is_slowest() -> None:
    options = parse(["--mean", "0", "--longest", "1024"])

    def grown(**figures: Any) -> tuple[str, str]:
        hardware = replace(HARDWARE["h100"], **figures)
        small, large = (
            step(simulate.workload_on(devices, options), layout_on(devices, options), hardware) for devices in (8, 1024)
        )
        return large.grown(small)

    assert grown() == ("publish", "Ray's objects")
    assert grown(store=1e15) == ("driver", "driver")
    assert grown(store=1e15, driver=0.0, network=1e8) == ("update", "network")
    assert grown(store=1e15, driver=0.0, network_latency=0.1) == ("update", "latency")


def test_layouts_and_figures_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="8 GPUs, of which 4 train, leave no whole engines of 3 GPUs"):
        layout_on(8, parse(["--training-share", "0.5", "--engine-devices", "3"]))
    with pytest.raises(ValueError, match="--set netwrok: the hardware has flops"):
        changed(TOY, ["netwrok=1"])
    assert changed(TOY, ["network=1"]).network == 1.0


def test_the_command_prints_a_line_for_each_size(capsys: pytest.CaptureFixture[str]) -> None:
    simulate.main(["--gpus", "8", "64", "--json", "--set", "training=0.4"])
    answer = json.loads(capsys.readouterr().out)
    first, second = answer["rows"]
    assert (first["gpus"], first["efficiency"], first["grown_most"]) == (8, 1.0, None)
    assert first["step"] == pytest.approx(sum(first["parts"].values()))
    assert (second["completions"], answer["hardware"]["training"]) == (8 * 8 * 64, 0.4)
    assert second["efficiency"] < 1
    simulate.main(["--gpus", "8"])
    assert "no cluster was measured" in capsys.readouterr().out
