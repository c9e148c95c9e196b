"""RL that chooses its prompts: the rates that a run leaves, and those that the next one begins with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.config.stages.merging import MergeConfig
from rlhf_core.contract import Input
from rlhf_core.rl.pass_rates import RATES_FILE
from rlhf_core.stages import merge, rl
from rlhf_core.stages.in_process import InProcessCluster
from tests.rlhf_core.rl.torch_engine import torch_engine
from tests.rlhf_core.stages.context import LocalContext, local_input
from tests.rlhf_core.stages.supervised_runs import base_model, context_of, dataset

pytestmark = pytest.mark.parts


def config(*rates: str, **settings: Any) -> RLConfig:
    block = {
        "rewards": {"exact": {"type": "verifier", "pattern": "(.)"}}, "optimizer": {"learning_rate": 1e-2},
        "group_size": 16, "mismatch": {"correction": "truncate", "low": 0.0, "high": 2.0},
    }  # fmt: skip
    return RLConfig.model_validate({
        "algorithm": "grpo", "grpo": block, "dataset": "d", "steps": 3, "prompts_per_step": 4,
        "sampling": {"max_tokens": 1}, "rollout": {"max_length": 24}, "engine": {"dtype": "float32", "zero_stage": 0},
        "select": {"pass_rate": (0.01, 0.9), "rates": rates}, **settings,
    })  # fmt: skip


def run(folder: Path, settings: RLConfig, inputs: Mapping[str, Input]) -> tuple[Input, LocalContext]:
    context = context_of(folder, inputs)
    output = rl.run(settings, inputs, context, InProcessCluster(torch_engine))
    return local_input(output.folder, output.kind), context


def test_rates_go_from_run_to_run_and_through_a_merge(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"say {letter}"}], "answer": letter} for letter in "abcd"]
    inputs = {"model": base_model(tmp_path / "base"), "dataset": dataset(tmp_path / "d", rows)}
    adapter, context = run(tmp_path / "one", config(lora={"rank": 2}), inputs)
    assert adapter.manifest.kind == Kind.ADAPTER
    written = (adapter.folder / RATES_FILE).read_bytes()
    assert len(written.splitlines()) == 4
    assert [metrics["difficulty/known_share"] for _, metrics in context.logs] == [1.0, 1.0, 1.0]
    merged = merge.run(MergeConfig(adapter="rl"), {**inputs, "adapter": adapter}, LocalContext(tmp_path / "merge"))
    assert (merged.folder / RATES_FILE).read_bytes() == written
    policy = local_input(merged.folder, Kind.POLICY)
    narrow = config("first", select={"pass_rate": (0.999, 1.0), "rates": ("first",), "when_none": "nearest"})
    _, context = run(tmp_path / "two", narrow, {**inputs, "select.rates.first": policy})
    # An untrained model is hardly ever right: all rates are known, and none is within the bounds.
    assert context.logs[0][1]["difficulty/outside"] == 4


def test_replayed_groups_are_trained_beside_sampled_ones(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"say {letter}"}], "answer": letter} for letter in "abcd"]
    inputs = {"model": base_model(tmp_path / "base"), "dataset": dataset(tmp_path / "d", rows)}
    settings = config(replay={"share": 0.5, "max_age": 1}, steps=6)
    _, context = run(tmp_path / "run", settings, inputs)
    replayed = [metrics["replay/prompts"] for _, metrics in context.logs]
    assert replayed[0] == 0 < max(replayed) <= 2
    # Of weights of one step before, so that engine and trainer differ there, and nowhere else.
    for (_, metrics), count in zip(context.logs, replayed, strict=True):
        assert (metrics["rollout_kl"] > 1e-6) == (count > 0)


def test_a_saved_critic_is_an_artifact_that_the_next_one_starts_from(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"say {letter}"}], "answer": letter} for letter in "abcd"]
    inputs = {"model": base_model(tmp_path / "base"), "dataset": dataset(tmp_path / "d", rows)}
    optimizer = {"learning_rate": 1e-2}
    block: dict[str, Any] = {
        "rewards": {"exact": {"type": "verifier", "pattern": "(.)"}}, "optimizer": optimizer, "group_size": 2,
        "critic": {"optimizer": optimizer, "save": True},
    }  # fmt: skip
    first = config(algorithm="ppo", ppo=block, steps=2, select=None)
    policy, _ = run(tmp_path / "one" / "work", first, inputs)
    saved = tmp_path / "one" / "published" / "critic.2"
    assert (saved / "config.json").read_bytes() == (policy.folder / "critic" / "config.json").read_bytes()
    next_block = {**block, "critic": {"optimizer": optimizer, "start": "saved"}}
    second = config(algorithm="ppo", ppo=next_block, steps=1, select=None)
    critic = local_input(saved, Kind.REWARD_MODEL)
    _, context = run(tmp_path / "two" / "work", second, {**inputs, "model": policy, "ppo.critic.start": critic})
    assert context.logs[0][1]["critic_squared_error"] < 1.0
