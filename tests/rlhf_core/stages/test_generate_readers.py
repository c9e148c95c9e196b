"""Models that read what the stage `generate` samples: rewards as in RL, and the KL to another model."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_core.algorithms import build_algorithm
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import encode_prompt, load_tokenizer
from rlhf_core.chat.tokenizers import word_level_tokenizer
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.config.stages.sampled import GenerateConfig
from rlhf_core.contract import Input, Output
from rlhf_core.data.reading import read_rows
from rlhf_core.errors import StageError
from rlhf_core.rl.hybrid import OwnDevices
from rlhf_core.rl.ranks import PolicyTrainer
from rlhf_core.rl.reward_models import rank_scores, read_reward_models
from rlhf_core.rl.rewarding import RewardPipeline
from rlhf_core.rl.roles import roles
from rlhf_core.rl.worker import RLWorker
from rlhf_core.stages import generate
from rlhf_core.stages.in_process import InProcessCluster
from rlhf_core.training.group import InlineGroup
from rlhf_core.types import Prompt, Trajectory
from tests.rlhf_core.rl.torch_engine import torch_engine
from tests.rlhf_core.stages.context import local_input
from tests.rlhf_core.stages.supervised_runs import base_model, context_of, dataset, no_cluster, reward_model

pytestmark = pytest.mark.parts

ENGINE = {"dtype": "float32", "zero_stage": 0}
REWARDS = {
    "whole": {"type": "reward_model", "weight": 0.5, "placement": {"threads": 1}},
    "again": {"type": "reward_model", "normalize": False, "placement": {"threads": 1}},
    "steps": {"type": "process_reward_model", "separator": "a"},
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Input]:
    folder = tmp_path_factory.mktemp("inputs")
    rows = [{"prompt": [{"role": "user", "content": f"say {letter}"}]} for letter in "abc"]
    return {"model": base_model(folder / "base"), "dataset": dataset(folder / "data", rows)}


def settings(**changes: Any) -> GenerateConfig:
    whole = {
        "dataset": "d",
        "samples": 3,
        "sampling": {"max_tokens": 5},
        "rollout": {"max_length": 24},
        "engine": ENGINE,
    }
    return GenerateConfig.model_validate_json(json.dumps({**whole, **changes}))


def run(folder: Path, inputs: Mapping[str, Input], config: GenerateConfig) -> Output:
    return generate.run(config, inputs, context_of(folder, inputs), InProcessCluster(torch_engine))


@pytest.mark.endurance("rl-matrix")
def test_rewards_of_models_are_those_that_rl_gives_the_same_tokens(inputs: dict[str, Input], tmp_path: Path) -> None:
    whole = reward_model(tmp_path / "whole", inputs["model"], seed=1, mean=0.5, std=2.0)
    steps = reward_model(tmp_path / "steps", inputs["model"], seed=2, mean=-0.25, std=0.5)
    models = {"whole": whole, "again": whole, "steps": steps}
    given = {**inputs, **{f"rewards.{name}.model": model for name, model in models.items()}}
    started: list[str] = []

    class Cluster(InProcessCluster):
        @contextmanager
        def workers(self, placement: Any, engine: Any, factory: Any, /, *args: Any) -> Any:
            started.extend(role.name for role in args[-1])
            with super().workers(placement, engine, factory, *args) as group:
                yield group

    config = settings(rewards=REWARDS, keep_tokens=True)
    output = generate.run(config, given, context_of(tmp_path / "work", given), Cluster(torch_engine))
    assert started == ["reward:whole", "reward:steps"]
    entries = [(row, entry) for row in read_rows(output.folder) for entry in row["completions"]]

    rl = RLConfig.model_validate({
        "algorithm": "grpo", "dataset": "d", "steps": 1, "prompts_per_step": 3, "sampling": {"max_tokens": 5},
        "rollout": {"max_length": 24}, "engine": ENGINE,
        "grpo": {"group_size": 3, "rewards": REWARDS, "optimizer": {"learning_rate": 1.0}},
    })  # fmt: skip
    in_rl = {**inputs, **{f"grpo.rewards.{name}.model": model for name, model in models.items()}}
    context = context_of(tmp_path / "rl", in_rl)
    own = {role.name: role for role in roles(rl, in_rl)}
    assert list(own) == ["policy", "reward:whole", "reward:steps"]
    trainer = PolicyTrainer(rl, build_algorithm(rl), InlineGroup(RLWorker, rl, context, list(own.values())), seed=0)
    scores = rank_scores(rl, in_rl, trainer, OwnDevices())
    readers = read_reward_models(rl.settings.model_rewards, "grpo.rewards", in_rl, 24)
    tokenizer = load_tokenizer(inputs["model"].folder)
    pipeline = RewardPipeline(rl.settings, 5, {n: r.reward(scores[n]) for n, r in readers.items()}, tokenizer)
    (group,) = pipeline([[_trajectory(tokenizer, *each) for each in entries]])
    assert group is not None
    for (_, entry), trajectory in zip(entries, group, strict=True):
        assert trajectory.step_rewards is not None
        assert entry["rewards"] == pytest.approx({name: trajectory.extra[name] for name in REWARDS}, abs=1e-5)
        assert entry["reward"] == pytest.approx(trajectory.reward + float(trajectory.step_rewards.sum()), abs=1e-5)
        assert entry["rewards"]["whole"] == pytest.approx((entry["rewards"]["again"] - 0.5) / 2, abs=1e-5)
        assert math.fsum(entry["logprobs"]) == entry["logprob"]
    assert len({entry["reward"] for _, entry in entries}) > 5


def _trajectory(tokenizer: Any, row: Mapping[str, Any], entry: Mapping[str, Any]) -> Trajectory:
    prompt = Prompt(row["id"], "", tuple(encode_prompt(tokenizer, row["prompt"])), row)
    ids = torch.tensor([*prompt.token_ids, *entry["token_ids"]])
    mask = torch.arange(ids.numel()) >= len(prompt.token_ids)
    ended = entry["token_ids"][-1] == tokenizer.eos_token_id
    return Trajectory(
        prompt, ids, mask, torch.zeros(ids.numel()), 0, "stop" if ended else "length", completion=entry["text"]
    )


@pytest.mark.endurance("rl-matrix")
def test_the_kl_is_the_mean_of_what_two_models_say_of_the_samples(inputs: dict[str, Input], tmp_path: Path) -> None:
    given = {**inputs, "reference.model": base_model(tmp_path / "other", seed=1)}
    output = run(tmp_path / "work", given, settings(reference={"model": "base"}, keep_tokens=True))
    tokenizer = load_tokenizer(inputs["model"].folder)
    models = [
        AutoModelForCausalLM.from_pretrained(given[name].folder, dtype=torch.float64)
        for name in ("model", "reference.model")
    ]
    kls, tokens = [], 0
    for row in read_rows(output.folder):
        prompt = encode_prompt(tokenizer, row["prompt"])
        for entry in row["completions"]:
            ids = torch.tensor([prompt + entry["token_ids"]])
            with torch.no_grad():
                logits = [model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for model in models]
            ours, theirs = (one.gather(-1, ids[0, len(prompt) :, None]).sum().item() for one in logits)
            assert entry["logprob"] == pytest.approx(ours, abs=1e-4)
            assert entry["reference_logprob"] == pytest.approx(theirs, abs=1e-4)
            kls.append(ours - theirs)
            tokens += len(entry["token_ids"])
    metrics = output.metrics
    assert metrics["kl"] == pytest.approx(sum(kls) / len(kls), abs=1e-4)
    assert metrics["kl_per_token"] == pytest.approx(sum(kls) / tokens, abs=1e-4)
    low, high = metrics["kl_low"], metrics["kl_high"]
    assert isinstance(low, float)
    assert isinstance(high, float)
    assert low < sum(kls) / len(kls) < high


@pytest.mark.endurance("rl-matrix")
def test_the_kl_of_a_model_to_a_copy_of_itself_is_0(inputs: dict[str, Input], tmp_path: Path) -> None:
    copy = local_input(shutil.copytree(inputs["model"].folder, tmp_path / "copy"), Kind.POLICY)
    output = run(tmp_path / "work", {**inputs, "reference.model": copy}, settings(reference={"model": "base"}))
    assert [output.metrics[name] for name in ("kl", "kl_low", "kl_high", "kl_per_token")] == [0.0] * 4


def test_a_reference_with_other_tokens_is_refused_before_anything_starts(
    inputs: dict[str, Input], tmp_path: Path
) -> None:
    word_level_tokenizer(["say"], context_length=64).save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text("{}")
    given = {**inputs, "reference.model": local_input(tmp_path / "other", Kind.POLICY)}
    with pytest.raises(StageError, match=r"^reference\.model: its tokenizer differs from the policy's: name another"):
        generate.run(settings(reference={"model": "x"}), given, context_of(tmp_path / "work", given), no_cluster)


def test_the_engines_and_each_model_reserve_one_after_the_other() -> None:
    placed = {**REWARDS["whole"], "placement": {"workers": 2, "gpus_per_worker": 1.0, "cpus_per_worker": 0.5}}
    config = settings(rewards={"whole": placed}, reference={"model": "x"}, placement={"cpus_per_worker": 3.0})
    assert (config.reserves().cpus, config.reserves().gpus) == (3.0, 2.0)
