"""Critic and reward models that are adapters: they have the base of a policy that is an adapter of the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForSequenceClassification

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.contract import Input
from rlhf_core.errors import StageError
from rlhf_core.models.adapters import adapter_state, base_model, share_base
from rlhf_core.models.folders.folder import ADAPTER
from rlhf_core.models.loading import load_causal_model, load_scalar_model
from rlhf_core.models.merging import merge_adapter
from rlhf_core.rl.ranks import PolicyTrainer
from rlhf_core.rl.roles import roles
from rlhf_core.rl.worker import RLWorker
from tests.rlhf_core.models.saved import save_state
from tests.rlhf_core.rl.one_rank import OPTIMIZER, rl_config, trainer, trajectories, with_advantages
from tests.rlhf_core.rl.published import published
from tests.rlhf_core.stages.context import local_input

pytestmark = pytest.mark.parts

LORA = {"rank": 4}


def both_adapters(zero_stage: int = 0, *, critic_engine: dict[str, Any] | None = None, **extra: Any) -> RLConfig:
    fewer = {**LORA, "target_modules": ["q_proj", "v_proj"]}  # layers with an adapter in one model only
    config = rl_config("ppo", lora=LORA, critic={"lora": fewer, "engine": critic_engine}, kl={"coefficient": 0.1})
    engine = config.engine.model_copy(update={"zero_stage": zero_stage})
    return config.model_copy(update={"engine": engine, **extra})


def started(
    config: RLConfig, model: Input, folder: Path, others: dict[str, Input] | None = None
) -> tuple[PolicyTrainer, RLWorker]:
    ours, group = trainer(config, model, folder, others)
    return ours, group._worker


def base_weights(worker: RLWorker, role: str) -> dict[str, nn.Parameter]:
    """By their names in the base model."""
    named = base_model(worker._engines[role].module.model).named_parameters()
    return {n.replace(".base_layer.", "."): p for n, p in named if n.startswith("model.") and "lora_" not in n}


def step(ours: PolicyTrainer, config: RLConfig, number: int) -> None:
    ours.update(with_advantages(config, ours, ours.score(trajectories())), number)


def values(ours: PolicyTrainer) -> Tensor:
    found = ours.score(trajectories()).values
    assert found is not None
    return found


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_policy_and_critic_have_one_base(zero_stage: int, model: Input, tmp_path: Path) -> None:
    """Also after steps of both, and after they have lent their device and taken it back."""
    config = both_adapters(zero_stage)
    ours, worker = started(config, model, tmp_path)
    before = {name: p.detach().clone() for name, p in base_weights(worker, "policy").items()}
    step(ours, config, 0)
    scored = ours.score(trajectories())
    worker.offload()
    worker.reload()
    again = ours.score(trajectories())
    for name in ("old_logprobs", "ref_logprobs", "values"):
        assert torch.equal(getattr(scored, name), getattr(again, name)), name
    policy, critic = base_weights(worker, "policy"), base_weights(worker, "critic")
    assert policy.keys() == critic.keys()
    assert len(policy) == 2 * 9 + 2  # nine tensors a layer, the embedding and the last norm
    for name, parameter in policy.items():
        assert critic[name] is parameter, name
        assert critic[name].data_ptr() == parameter.data_ptr()
        assert torch.equal(parameter, before[name]), name


def test_the_critic_learns_and_the_policy_is_left_alone(model: Input, tmp_path: Path) -> None:
    optimizer = {**OPTIMIZER, "learning_rate": 1e-3}
    config = rl_config("ppo", lora=LORA, critic={"lora": LORA, "optimizer": optimizer})
    ours, worker = started(config, model, tmp_path)
    e = with_advantages(config, ours, ours.score(trajectories()))
    assert e.values is not None
    assert e.returns is not None
    error = [float(((values(ours) - e.returns) * e.loss_mask).square().sum())]
    weights = published(ours)
    for _ in range(3):
        weighted = ours._weighted(e)
        worker.update_critic([weighted])
    error.append(float(((values(ours) - e.returns) * e.loss_mask).square().sum()))
    assert error[1] < error[0]
    assert published(ours) == weights, "the policy's adapter has not moved"
    moved = {name for name, p in worker._engines["critic"].module.named_parameters() if p.requires_grad}
    assert all("lora_" in name or "score" in name for name in moved)


@pytest.mark.endurance("rl-matrix")
def test_sharing_the_base_changes_no_value(model: Input, tmp_path: Path) -> None:
    """The same start under another name is another input, and so gives the critic a base of its own."""
    found = []
    for start in (None, "copy"):
        config = rl_config("ppo", lora=LORA, critic={"lora": LORA, "start": start}, kl={"coefficient": 0.1})
        copied = tmp_path / "copied"
        if not copied.exists():
            copied.symlink_to(model.folder)
        others = {} if start is None else {"ppo.critic.start": local_input(copied, Kind.POLICY)}
        ours, group = trainer(config, model, tmp_path / str(start), others)
        worker = group._worker
        policy, critic = base_weights(worker, "policy"), base_weights(worker, "critic")
        assert all((critic[name] is policy[name]) is (start is None) for name in policy)
        results = [values(ours)]
        for number in range(2):
            step(ours, config, number)
            results.append(values(ours))
        found.append((results, published(ours)))
    (shared, policy_a), (own, policy_b) = found
    assert all(torch.equal(a, b) for a, b in zip(shared, own, strict=True))
    assert not torch.equal(shared[0], shared[2])
    assert policy_a == policy_b


FLOAT32 = {"dtype": "float32", "zero_stage": 0}


@pytest.mark.parametrize(
    ("config", "shared"),
    [
        (both_adapters(), True),
        (both_adapters(1, critic_engine={**FLOAT32, "attention": "eager"}), True),
        (both_adapters(3), False),
        (both_adapters(critic_engine={**FLOAT32, "zero_stage": 3}), False),
        (both_adapters(critic_engine={**FLOAT32, "dtype": "bfloat16"}), False),
        (rl_config("ppo", lora=LORA), False),
        (rl_config("ppo", critic={"lora": LORA}), False),
    ],
)
def test_when_the_base_is_shared(config: RLConfig, shared: bool, model: Input) -> None:
    critic = next(role for role in roles(config, {"model": model}) if role.name == "critic")
    assert critic.shares_base is shared


@pytest.mark.endurance("rl-matrix")
def test_adapter_and_head_are_checkpointed_and_the_base_is_not(model: Input, tmp_path: Path) -> None:
    config = both_adapters(2)
    ours, worker = started(config, model, tmp_path / "whole")
    step(ours, config, 0)
    saved = {name: part.state() for name, part in worker.parts().items()}
    copies = {
        name: type(state)(*({k: t.clone() for k, t in tensors.items()} for tensors in (state.shared, state.own)))
        for name, state in saved.items()
    }
    critic = {name for name in {**copies["critic"].shared, **copies["critic"].own} if name.startswith("weight.")}
    assert any("lora_" in name for name in critic)
    assert any("score" in name for name in critic)
    assert all("lora_" in name or "score" in name for name in critic)
    step(ours, config, 1)

    resumed, other = started(config, model, tmp_path / "resumed")
    step(resumed, config, 0)  # to be forgotten
    step(resumed, config, 0)
    for name, part in other.parts().items():
        part.load_state(copies[name])
    step(resumed, config, 1)
    assert torch.equal(values(resumed), values(ours))
    assert published(resumed) == published(ours)


@pytest.mark.endurance("rl-matrix")
def test_the_critic_is_saved_merged(model: Input, tmp_path: Path) -> None:
    config = rl_config("ppo", lora=LORA, critic={"lora": LORA, "save": True})
    ours, group = trainer(config, model, tmp_path / "work")
    step(ours, config, 0)
    expected = values(ours)
    group.call(RLWorker.save, tmp_path / "out")
    assert (tmp_path / "out" / "adapter_config.json").exists(), "the policy's adapter"
    assert not (tmp_path / "out" / "critic" / "adapter_config.json").exists()
    saved = local_input(tmp_path / "out" / "critic", Kind.REWARD_MODEL)
    again, _ = trainer(
        rl_config("ppo", critic={"start": "saved"}), model, tmp_path / "again", {"ppo.critic.start": saved}
    )
    torch.testing.assert_close(values(again), expected, atol=1e-6, rtol=0)


@pytest.fixture(scope="module")
def judge(model: Input, tmp_path_factory: pytest.TempPathFactory) -> Input:
    """A reward model that was trained as an adapter of `model`, as its stage leaves it."""
    folder = tmp_path_factory.mktemp("judge")
    torch.manual_seed(1)
    adapted = load_scalar_model(model.folder, dtype=torch.float32, attention="sdpa", lora=LoraConfig(rank=2), seed=1)
    trained = {n: torch.randn_like(p) * 0.1 for n, p in adapted.named_parameters() if p.requires_grad}
    save_state(adapted, adapter_state(adapted, trained), folder / ADAPTER, None)
    merge_adapter(model.folder, folder / ADAPTER, folder)
    made = local_input(folder, Kind.REWARD_MODEL)
    return Input(made.manifest.model_copy(update={"parents": {"model": model.manifest.ref}}), folder)


JUDGED: dict[str, Any] = {"rewards": {"taste": {"type": "reward_model"}}, "lora": LORA, "kl": {"coefficient": 0.1}}
TASTE = "ppo.rewards.taste.model"


@pytest.mark.endurance("rl-matrix")
def test_a_reward_model_that_is_an_adapter_has_the_policy_s_base_and_its_own_scores(
    model: Input, judge: Input, tmp_path: Path
) -> None:
    """Those of the merged model, whatever the policy and the critic on the same base have learned."""
    config = rl_config("ppo", **JUDGED, critic={"lora": LORA, "start": "policy"})
    ours, worker = started(config, model, tmp_path / "shared", {TASTE: judge})
    policy, scorer = base_weights(worker, "policy"), base_weights(worker, "reward:taste")
    assert policy.keys() == scorer.keys()
    assert all(scorer[name] is policy[name] for name in policy)
    before = ours.reward_scores(trajectories(), "reward:taste")
    step(ours, config, 0)
    worker.offload()
    worker.reload()
    assert torch.equal(ours.reward_scores(trajectories(), "reward:taste"), before)
    other = Input(judge.manifest.model_copy(update={"parents": {}}), judge.folder)
    merged, apart = started(config, model, tmp_path / "merged", {TASTE: other})
    assert not any(scorer[name] is p for name, p in base_weights(apart, "reward:taste").items())
    expected = merged.reward_scores(trajectories(), "reward:taste")
    assert float(expected.abs().max()) > 0.1
    torch.testing.assert_close(before, expected, atol=1e-5, rtol=1e-5)
    assert "reward:taste" not in worker.parts()


@pytest.mark.parametrize(
    ("settings", "shared"),
    [
        ({}, True),
        ({"lora": None}, False),
        ({"rewards": {"taste": {"type": "reward_model", "placement": {}}}}, False),
        ({"rewards": {"taste": {"type": "reward_model", "engine": {**FLOAT32, "zero_stage": 3}}}}, False),
        ({"rewards": {"taste": {"type": "reward_model", "engine": {**FLOAT32, "dtype": "bfloat16"}}}}, False),
    ],
)
def test_when_a_reward_model_shares_the_base(
    settings: dict[str, Any], shared: bool, model: Input, judge: Input
) -> None:
    config = rl_config("ppo", **{**JUDGED, **settings}, critic={"start": "policy"})
    role = next(role for role in roles(config, {"model": model, TASTE: judge}) if role.name == "reward:taste")
    assert role.shares_base is shared


def test_bases_that_do_not_fit_are_refused(model: Input, tmp_path: Path) -> None:
    lora = LoraConfig(rank=2)
    config = load_causal_model(model.folder, dtype=torch.float32, attention="sdpa").config
    config.intermediate_size, config.num_labels = 48, 1
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    policy = load_causal_model(model.folder, dtype=torch.float32, attention="sdpa", lora=lora)
    critic = load_scalar_model(tmp_path, dtype=torch.float32, attention="sdpa", lora=lora)
    with pytest.raises(StageError, match=r"layers\.0\.mlp\.down_proj\.weight is .*\(32, 48\) in one .*\(32, 64\)"):
        share_base(critic, policy)
