"""A policy that is its own reference has a KL of 0, to the bit, however the two are run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.small_models import small_config, small_model
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.contract import Input
from rlhf_core.division import Division
from tests.rlhf_core.rl.one_rank import rl_config, trainer, trajectories
from tests.rlhf_core.stages.context import local_input

pytestmark = pytest.mark.parts

KL = {"coefficient": 0.1, "place": "reward"}
BFLOAT16 = {"dtype": "bfloat16", "tokens_per_micro_batch": 12}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Input:
    """One that is laid out in rows."""
    folder = tmp_path_factory.mktemp("leaky")
    small_model(small_config("lfm2", vocab_size=20)).save_pretrained(folder)
    return local_input(folder, Kind.POLICY)


@pytest.mark.parametrize(
    "settings",
    [
        {"kl": KL},
        {"kl": {**KL, "offload": True}},
        pytest.param(
            {"kl": {**KL, "engine": {"dtype": "float32", "zero_stage": 3, "tokens_per_micro_batch": 12}}},
            marks=pytest.mark.endurance("rl-matrix"),
        ),
        {"kl": KL, "lora": {"rank": 2, "target_modules": ("q_proj", "in_proj")}},
        {"kl": KL, "engine": BFLOAT16},
        pytest.param(
            {"kl": {**KL, "engine": {**BFLOAT16, "zero_stage": 3}}, "engine": BFLOAT16},
            marks=pytest.mark.endurance("rl-matrix"),
        ),
    ],
    ids=["same rank", "offloaded", "sharded", "adapter off", "bfloat16", "bfloat16 sharded"],
)
def test_policy_and_reference_of_the_same_weights_give_the_same_log_probs(
    settings: dict[str, Any], model: Input, tmp_path: Path
) -> None:
    ours, _ = trainer(rl_config("grpo", **settings), model, tmp_path)
    scored = ours.score(trajectories())
    assert scored.old_logprobs is not None
    assert scored.ref_logprobs is not None
    assert scored.old_logprobs[scored.loss_mask].abs().min() > 0
    assert torch.equal(scored.old_logprobs, scored.ref_logprobs)


def test_a_reference_with_more_ranks_has_the_micro_batches_of_the_policy() -> None:
    """What a token is computed with changes its rounding."""
    policy = Division.of(trajectories(), replicas=2, tokens_per_micro_batch=7)
    reference = policy.over(3)
    micro_batches = [sorted(part for replica in division.plan for part in replica if part)
                     for division in (policy, reference)]  # fmt: skip
    assert micro_batches[0] == micro_batches[1]
    assert [len(replica) for replica in reference.plan] == [len(reference.plan[0])] * 3
    parts = [[part.input_ids for part in replica] for replica in reference.split()]
    assert torch.equal(reference.join(parts), trajectories().input_ids)
    assert policy.over(2) is policy
