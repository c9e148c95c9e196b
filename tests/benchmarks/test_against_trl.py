"""What the benchmarks against TRL share: the arithmetic of the table, and who measures when. No TRL is needed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from benchmarks.against_trl import Measurement, different_work, main, parse, plan, summarise, table
from benchmarks.dpo_vs_trl import BENCHMARK as DPO
from benchmarks.grpo_vs_trl import BENCHMARK as GRPO
from benchmarks.grpo_workload import GRPOWorkload
from benchmarks.process_memory import ProcessWatch
from benchmarks.workload import Result, Step, measured

pytestmark = pytest.mark.endurance("benchmarks")


def measurement(side: str, seconds: float, dtype: str = "float32", peak: int = 2**30) -> Measurement:
    """Two steps of 100 tokens: half of the time goes into sampling, a quarter into the update."""
    steps = [
        Step(whole, 100, {"generate": whole / 2, "score": 0.0, "update": whole / 4, "publish": 0.0, "other": whole / 4})
        for whole in (0.9 * seconds, 1.1 * seconds)
    ]
    return Measurement("25m", dtype, side, Result(0.0, steps, {}), peak, {}, 0.0)


def test_a_row_has_the_median_of_its_repeats_and_our_ratio_to_the_best_of_trl() -> None:
    found = summarise([
        measurement("ours", 0.5), measurement("trl", 1.0), measurement("trl-bf16-weights", 2.0),
        measurement("trl", 1.25, peak=2**31), measurement("ours", 0.4), measurement("ours", 1.0),
        measurement("trl", 0.1, "bfloat16"),
    ])  # fmt: skip
    assert [(row.side, row.dtype) for row in found] == [
        ("ours", "float32"), ("trl", "float32"), ("trl-bf16-weights", "float32"), ("trl", "bfloat16"),
    ]  # fmt: skip
    ours, trl, other, _ = found
    assert ours.throughput == pytest.approx((100.0, 200.0, 250.0))
    assert trl.throughput == pytest.approx((80.0, 90.0, 100.0))
    assert ours.ratio == pytest.approx(200 / 90)
    assert (trl.ratio, other.ratio) == (None, None)
    assert trl.peak == 2**31
    phases = {"generate": 0.25, "score": 0.0, "update": 0.125, "publish": 0.0, "other": 0.125}
    assert ours.phases == pytest.approx(phases)
    assert ours.step == pytest.approx(0.5)


def test_without_trl_there_is_no_ratio() -> None:
    (row,) = summarise([measurement("ours", 0.5)])
    assert row.ratio is None


def test_the_table_says_all_of_it() -> None:
    shown = StringIO()
    rows = summarise([measurement("ours", 0.5), measurement("trl", 1.0)])
    Console(width=160, file=shown).print(table(GRPO, rows))
    lines = [" ".join(line.replace("│", " ").split()) for line in shown.getvalue().splitlines()]
    assert "25m float32 ours 200 200-200 1024 0.25 0.00 0.12 0.00 0.12 0.50 2.00" in lines
    assert "25m float32 trl 100 100-100 1024 0.50 0.00 0.25 0.00 0.25 1.00" in lines


def test_the_sides_take_turns() -> None:
    options = parse(GRPO, ["--sizes", "1m", "--sides", "ours", "trl", "--repeats", "2", "--steps", "7"])
    planned = list(plan(GRPO, options))
    assert [side for _, side in planned] == ["ours", "trl", "trl", "ours"] * 2
    assert [work.dtype for work, _ in planned] == ["float32"] * 4 + ["bfloat16"] * 4
    assert planned[0][0] == GRPOWorkload("1m", "float32", steps=7)


def test_missing_trl_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(GRPO, ["--trl", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        "error: there is no TRL here: pip install -e .[bench], or name its folder by --trl\n"
    )


@pytest.mark.parametrize(
    ("dtype", "consumed", "losses", "said"),
    [
        ("float32", {"tokens": 70}, [0.69, 0.5001], None),
        ("float32", {"tokens": 70}, [0.69, 0.501], "ours has the losses [0.69, 0.5], trl [0.69, 0.501]"),
        ("bfloat16", {"tokens": 70}, [0.69, 0.51], None),
        ("bfloat16", {"tokens": 71}, [0.69, 0.5], "ours consumed {'tokens': 70}, trl {'tokens': 71}"),
    ],
    ids=["rounding", "losses", "bfloat16", "tokens"],
)
def test_it_is_found_that_the_sides_did_not_do_the_same(
    dtype: str, consumed: dict[str, int], losses: list[float], said: str | None
) -> None:
    results = Result(0.0, [], {}, {"tokens": 70}, [0.69, 0.5]), Result(0.0, [], {}, consumed, losses)
    both = [
        Measurement("1m", dtype, side, each, 0, {}, 0.0) for side, each in zip(("ours", "trl"), results, strict=True)
    ]
    expected = None if said is None else f"1m {dtype}: {said}: not the same work"
    assert different_work(DPO, both) == expected


def test_a_result_counts_the_steps_after_the_warm_up_and_survives_its_file(tmp_path: Path) -> None:
    work = GRPOWorkload("1m", "float32", warm_up=2, steps=2)
    result = measured(work, [10.0, 12.0, 13.0, 15.0], [8, 8, 8, 9], {"torch": "2"}, phases=[{"update": 0.75}] * 4)
    assert result.began == 12.0
    assert result.steps == [
        Step(1.0, 8, {"update": 0.75, "other": 0.25}),
        Step(2.0, 9, {"update": 0.75, "other": 1.25}),
    ]
    result.write(tmp_path / "result.json")
    assert Result.read(tmp_path / "result.json") == result
    with pytest.raises(RuntimeError, match="3 steps instead of 4"):
        measured(work, [10.0, 12.0, 13.0], [8, 8, 8], {})


def test_memory_of_a_process_and_its_children_is_seen_and_what_others_compute() -> None:
    hold = "held = bytearray(b'x') * (64 << 20); import time; time.sleep(60)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"
    parent = subprocess.Popen([sys.executable, "-c", outer])
    children: list[psutil.Process] = []
    try:
        with ProcessWatch(parent.pid, interval=0.05) as watch:
            began, worked = time.perf_counter(), time.process_time()
            while (watch.peak < 64 << 20 or time.process_time() < worked + 0.3) and time.perf_counter() < began + 20:
                sum(range(10_000))  # we are one of the others
            children = psutil.Process(parent.pid).children()
            others = watch.others(began, ended := time.perf_counter())
    finally:
        for process in (*children, parent):
            process.kill()
        parent.wait()
    assert 64 << 20 <= watch.peak < 128 << 20
    assert set(watch.at_peak) == {Path(sys.executable).name}
    assert 0.2 / ((ended - began) * psutil.cpu_count()) < others < 1.1


def test_steps_between_two_looks_are_too_few() -> None:
    with ProcessWatch(os.getpid(), interval=60.0) as watch:
        began = time.perf_counter()
    with pytest.raises(ValueError, match="are too few to know who used the machine: measure more steps"):
        watch.others(began, began + 1.0)
