"""GRPO against TRL: the arithmetic of the table, and that the work is what it says. TRL need not be installed."""

from __future__ import annotations

import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import psutil
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from benchmarks.grpo_ours import config, counted_steps
from benchmarks.grpo_vs_trl import Measurement, main, parse, plan, summarise, table
from benchmarks.grpo_workload import Shape, Workload, make_model, prompt_ids, reward, rows, tokenizer
from benchmarks.process_memory import ProcessWatch
from rlhf_core.data.chat import load_tokenizer, stop_token_ids
from rlhf_core.data.prompts import to_prompts

WORK = Workload("1m", "float32", prompts=2, group=4, prompt_tokens=8, completion_tokens=5, micro_batch=4)


def measured(side: str, seconds: float, dtype: str = "float32", peak: int = 2**30) -> Measurement:
    """Two steps of 100 tokens: half of the time goes into sampling, a quarter into the update."""
    steps = [
        {"seconds": seconds * share, "generate": seconds * share / 2, "score": 0.0, "update": seconds * share / 4,
         "publish": 0.0}
        for share in (0.9, 1.1)
    ]  # fmt: skip
    return Measurement("25m", dtype, side, 100, steps, peak, {}, 0.0, {})


def test_a_row_has_the_median_of_its_repeats_and_our_ratio_to_the_best_of_trl() -> None:
    found = summarise([
        measured("ours", 0.5), measured("trl", 1.0), measured("trl-bf16-weights", 2.0),
        measured("trl", 1.25, peak=2**31), measured("ours", 0.4), measured("ours", 1.0),
        measured("trl", 0.1, "bfloat16"),
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


def test_without_trl_there_is_no_ratio() -> None:
    (row,) = summarise([measured("ours", 0.5)])
    assert row.ratio is None


def test_the_table_says_all_of_it() -> None:
    shown = StringIO()
    Console(width=160, file=shown).print(table(summarise([measured("ours", 0.5), measured("trl", 1.0)])))
    lines = [" ".join(line.replace("│", " ").split()) for line in shown.getvalue().splitlines()]
    assert "25m float32 ours 200 200-200 1024 0.25 0.00 0.12 0.00 0.12 2.00" in lines
    assert "25m float32 trl 100 100-100 1024 0.50 0.00 0.25 0.00 0.25" in lines


def test_the_sides_take_turns() -> None:
    options = parse(["--sizes", "1m", "--sides", "ours", "trl", "--repeats", "2", "--steps", "7"])
    planned = list(plan(options))
    assert [side for _, side in planned] == ["ours", "trl", "trl", "ours"] * 2
    assert [work.dtype for work, _ in planned] == ["float32"] * 4 + ["bfloat16"] * 4
    assert planned[0][0] == Workload("1m", "float32", steps=7)


def test_work_that_cannot_be_the_same_is_refused() -> None:
    with pytest.raises(ValueError, match="micro_batch 48 does not divide 64"):
        list(plan(parse(["--micro-batch", "48"])))


def test_missing_trl_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trl", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        "error: there is no TRL here: pip install -e .[bench], or name its folder by --trl\n"
    )


def test_our_steps_are_those_after_the_warm_up() -> None:
    phases = {"seconds/rollout": 0.5, "seconds/score": 0.0, "seconds/update": 0.25, "seconds/publish": 0.125}
    ended = [(second, {"completion_length": 5.0, **phases}) for second in (10.0, 12.0, 13.0, 15.0)]
    counted = counted_steps(WORK, ended)
    assert [step["seconds"] for step in counted] == [1.0, 2.0]
    assert counted[0] == {"seconds": 1.0, "generate": 0.5, "score": 0.0, "update": 0.25, "publish": 0.125}
    short = [(second, {**metrics, "completion_length": 4.9}) for second, metrics in ended]
    with pytest.raises(RuntimeError, match=r"4\.9 tokens"):
        counted_steps(WORK, short)


def test_the_stage_is_asked_for_the_same_work() -> None:
    asked = config(WORK)
    assert (asked.steps, asked.prompts_per_step, asked.settings.group_size) == (7, 2, 4)
    assert (asked.sampling.max_tokens, asked.sampling.temperature, asked.sampling.top_p) == (5, 1.0, 1.0)
    assert asked.engine.tokens_per_micro_batch == 4 * 13
    assert (asked.settings.kl.coefficient, asked.settings.epochs, asked.settings.minibatches) == (0.0, 1, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    assert make_model(Shape(64, 32, 64, 2, 1, 1), folder) == 64 * 32 + 2 * (4 * 32**2 + 3 * 32 * 64 + 2 * 32) + 32
    return folder


def test_the_model_never_ends_a_completion(model: Path) -> None:
    assert stop_token_ids(load_tokenizer(model)) == (63,)
    ids = torch.randint(0, 63, (16, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logprobs = AutoModelForCausalLM.from_pretrained(model)(ids).logits.log_softmax(-1)
    assert float(logprobs[..., 63].max()) < -15
    assert float(logprobs[..., :63].min()) > -10


def test_prompts_are_as_long_as_asked_and_the_same_for_both() -> None:
    asked = to_prompts(rows(WORK), tokenizer(WORK.shape.vocabulary), max_tokens=8)
    assert {prompt.token_ids for prompt in asked} == prompt_ids(WORK)
    assert {len(ids) for ids in prompt_ids(WORK)} == {8}


def test_the_reward_differs_and_its_process_loads_no_torch() -> None:
    assert len(set(reward(["w5 w6", "w5 w7", "w9"], [], []))) == 3
    program = "import sys, benchmarks.grpo_workload; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


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
