"""GRPO against TRL: that the work is what it says. TRL need not be installed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.against_trl import parse, plan
from benchmarks.grpo_ours import config, measured_steps
from benchmarks.grpo_vs_trl import BENCHMARK
from benchmarks.grpo_workload import GRPOWorkload, prompt_ids, reward, rows
from benchmarks.word_models import SHAPES, Shape, make_model, tokenizer
from rlhf_core.chat.encoding import load_tokenizer, stop_token_ids
from rlhf_core.data.prompts import to_prompts

pytestmark = pytest.mark.endurance("benchmarks")

WORK = GRPOWorkload(
    "1m", "float32", prompts=2, group=4, prompt_tokens=8, completion_tokens=5, trl_micro_batch=4, warm_up=2, steps=2
)


def test_work_that_cannot_be_the_same_is_refused() -> None:
    with pytest.raises(ValueError, match="trl_micro_batch 48 does not divide 64"):
        list(plan(BENCHMARK, parse(BENCHMARK, ["--trl-micro-batch", "48"])))


def test_our_steps_have_the_phases_of_the_comparison_and_whole_completions() -> None:
    phases = {"seconds/rollout": 0.5, "seconds/score": 0.0, "seconds/update": 0.25, "seconds/publish": 0.125}
    ended = [(second, {"completion_length": 5.0, **phases}) for second in (10.0, 12.0, 13.0, 15.0)]
    first, _ = measured_steps(WORK, ended).steps
    assert (first.seconds, first.amount) == (1.0, 40)
    assert first.phases == {"generate": 0.5, "score": 0.0, "update": 0.25, "publish": 0.125, "other": 0.125}
    short = [(second, {**metrics, "completion_length": 4.9}) for second, metrics in ended]
    with pytest.raises(RuntimeError, match=r"4\.9 tokens"):
        measured_steps(WORK, short)


def test_the_stage_is_asked_for_the_same_work() -> None:
    asked = config(WORK, "ours")
    assert (asked.steps, asked.prompts_per_step, asked.settings.group_size) == (4, 2, 4)
    assert (asked.sampling.max_tokens, asked.sampling.temperature, asked.sampling.top_p) == (5, 1.0, 1.0)
    assert (asked.settings.kl.coefficient, asked.settings.epochs, asked.settings.minibatches) == (0.0, 1, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    parameters = 64 * 32 + 2 * (4 * 32**2 + 3 * 32 * 64 + 2 * 32) + 32
    assert make_model(Shape(64, 32, 64, 2, 1, 1), folder, ends_after=0) == parameters
    return folder


def test_the_model_never_ends_a_completion(model: Path) -> None:
    assert stop_token_ids(load_tokenizer(model)) == (63,)
    ids = torch.randint(0, 63, (16, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logprobs = AutoModelForCausalLM.from_pretrained(model)(ids).logits.log_softmax(-1)
    assert float(logprobs[..., 63].max()) < -15
    assert float(logprobs[..., :63].min()) > -10


def test_a_model_ends_its_completions_after_as_many_tokens_as_asked(tmp_path: Path) -> None:
    make_model(SHAPES["25m"], tmp_path, ends_after=28)
    ids = torch.randint(5, 12_000, (16, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ends = AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits.softmax(-1)[..., -1]
    assert float(ends.mean()) == pytest.approx(1 / 28, rel=0.1)
    assert float(ends.std()) < 0.3 / 28


def test_ragged_prompts_and_completions_are_counted_as_they_are() -> None:
    work = replace(WORK, longest_prompt=30, mean_completion=4)
    lengths = {len(ids) for ids in prompt_ids(work)}
    assert (min(lengths), max(lengths), work.length) == (8, 30, 35)
    phases = dict.fromkeys(("seconds/rollout", "seconds/score", "seconds/update", "seconds/publish"), 0.0)
    ended = [(float(second), {"completion_length": 2.0 + second / 8, **phases}) for second in range(4)]
    assert [step.amount for step in measured_steps(work, ended).steps] == [8 * 2.25, 8 * 2.375]


def test_prompts_are_as_long_as_asked_and_the_same_for_both() -> None:
    asked = to_prompts(rows(WORK), tokenizer(WORK.shape.vocabulary), max_tokens=8)
    assert {prompt.token_ids for prompt in asked} == prompt_ids(WORK)
    assert {len(ids) for ids in prompt_ids(WORK)} == {8}


def test_the_reward_differs_and_its_process_loads_no_torch() -> None:
    assert len(set(reward(["w5 w6", "w5 w7", "w9"], [], []))) == 3
    program = "import sys, benchmarks.grpo_workload; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
