"""One training rank: what it scores, and that an update moves the policy the way the advantages say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as from_safetensors
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from rlhf_core.algorithms import build_algorithm
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.rl.algorithm_table import ALGORITHMS
from rlhf_core.contract import Input
from rlhf_core.errors import StageError
from rlhf_core.rl.ranks import PolicyTrainer
from rlhf_core.rl.worker import RLWorker
from rlhf_core.training.group import InlineGroup
from tests.rlhf_core.rl.one_rank import rl_config, tiny_llama, trainer, trajectories, with_advantages
from tests.rlhf_core.rl.published import published
from tests.rlhf_core.stages.context import local_input
from tests.rlhf_core.system.test_freed_memory import BLOCK, BLOCKS, freed_blocks, resident

pytestmark = pytest.mark.parts


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_updates_make_rewarded_completions_likelier(algorithm: str, model: Input, tmp_path: Path) -> None:
    config = rl_config(algorithm)
    ours, _ = trainer(config, model, tmp_path)
    e = trajectories()
    before = torch.tensor(ours.probe(e))
    e = replace(e, rollout_logprobs=torch.where(e.loss_mask, before, 0.0))  # DPPO's ratio is to these
    metrics: dict[str, float] = {}
    for step in range(3):
        scored = ours.score(e)
        metrics = ours.update(with_advantages(config, ours, scored), step).metrics
    after = torch.tensor(ours.probe(e))
    change = torch.zeros(4).index_add_(0, e.sequence_ids, (after - before) * e.loss_mask)
    assert (change[0] > 0, change[1] < 0, change[2] < 0, change[3] > 0) == (True,) * 4
    assert {"policy_loss", "gradient_norm", "learning_rate", "clip_fraction", "approx_kl"} <= metrics.keys()


@pytest.mark.parametrize("settings", [{}, {"engine": {"dtype": "float32", "gradient_checkpointing": True}}])
@pytest.mark.parametrize("algorithm", ["ppo", "gspo"])
def test_before_any_update_every_ratio_is_one(algorithm: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """A model with dropout would compute another policy in the update than the one that was scored: GSPO's narrow
    bounds clip most of its tokens. The KL in the reward asks for the scores beforehand."""
    model = tiny_llama(tmp_path / "model", attention_dropout=0.5)

    def first_update(**more: Any) -> dict[str, float]:
        config = rl_config(algorithm, kl={"coefficient": 0.1, "place": "reward"}, **settings, **more)
        ours, _ = trainer(config, model, tmp_path)
        scored = ours.score(trajectories())
        return ours.update(with_advantages(config, ours, scored), 0).metrics

    metrics = first_update()
    assert (metrics["clip_fraction"], metrics["approx_kl"], metrics["kl_per_completion"]) == (0, 0, 0)
    assert metrics.get("value_clip_fraction", 0) == 0
    assert first_update(dropout=True)["approx_kl"] > 1e-6


def test_logged_completions_have_their_entropies_and_train_as_without(model: Input, tmp_path: Path) -> None:
    """Each prompt is a micro-batch of its own here; the second one is logged."""
    config = rl_config("grpo", minibatches=2, sampling={"max_tokens": 4, "temperature": 0.7})
    e = trajectories()
    logged = e.sequence_ids >= 2
    found = []
    for mask in (None, logged):
        ours, _ = trainer(config, model, tmp_path)
        scored = ours.score(e, logged=mask)
        metrics = ours.update(with_advantages(config, ours, scored), 0).metrics
        found.append((scored, metrics, ours.probe(e)))
    (plain, *others), (scored, *same) = found
    assert others == same
    assert plain.old_logprobs is not None
    assert plain.old_logprobs.equal(scored.old_logprobs)
    assert (plain.entropies, scored.ref_logprobs) == (None, None)
    causal = LlamaForCausalLM.from_pretrained(model.folder).eval()
    expected = torch.zeros(e.num_tokens)
    ends = e.sequence_lengths.cumsum(0).tolist()
    for start, end in zip([0, *ends], ends, strict=False):
        with torch.no_grad():
            logits = causal(e.input_ids[start:end].unsqueeze(0)).logits[0, :-1]
        expected[start + 1 : end] = torch.distributions.Categorical(logits=logits / 0.7).entropy()
    torch.testing.assert_close(scored.entropies, expected * (e.loss_mask & logged))


KL = {"coefficient": 0.1}
FLOAT32 = {"dtype": "float32", "zero_stage": 0, "tokens_per_micro_batch": 12}


@pytest.mark.parametrize("minibatches", [1, 2])  # the KL is measured by the only update, or before all updates
@pytest.mark.parametrize(
    "settings",
    [
        {}, {"kl": {**KL, "offload": True}}, {"lora": {"rank": 2}},
        {"sampling": {"max_tokens": 4, "temperature": 0.01}}, {"sampling": {"max_tokens": 4, "temperature": 2.0}},
        {"engine": {"tokens_per_micro_batch": 12, "gradient_checkpointing": True}},
        {"kl": {**KL, "estimator": "k3", "place": "reward"}},
        *(pytest.param(settings, marks=pytest.mark.endurance("rl-matrix")) for settings in (
            {"entropy_coefficient": 0.1}, *({"engine": {**FLOAT32, "zero_stage": stage}} for stage in (1, 2, 3)),
            {"engine": {"tokens_per_micro_batch": 12, "gradient_checkpointing": "selective"}},
            {"kl": {**KL, "engine": {**FLOAT32, "zero_stage": 3}}},
        )),
    ],
    ids=str,
)  # fmt: skip
def test_the_kl_of_a_policy_to_itself_is_zero(
    settings: dict[str, Any], minibatches: int, model: Input, tmp_path: Path
) -> None:
    """Exactly: both are computed by the same operations, whatever the engine's log-probs (0 here) are."""
    config = rl_config("grpo", **{"kl": KL, "minibatches": minibatches, **settings})
    ours, _ = trainer(config, model, tmp_path)
    metrics = ours.update(with_advantages(config, ours, ours.score(trajectories())), 0).metrics
    assert (metrics["kl"], metrics["kl_per_completion"]) == (0, 0)
    assert metrics["rollout_mismatch"] > 0.1


@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_kl_is_that_of_the_trainers_log_probs(minibatches: int, model: Input, tmp_path: Path) -> None:
    torch.manual_seed(2)
    LlamaForCausalLM(LlamaForCausalLM.from_pretrained(model.folder).config).save_pretrained(tmp_path / "other")
    other = local_input(tmp_path / "other", Kind.POLICY)
    config = rl_config("grpo", kl={**KL, "reference": "other"}, minibatches=minibatches)
    ours, _ = trainer(config, model, tmp_path / "work", {"grpo.kl.reference": other})
    scored = ours.score(trajectories())
    assert scored.ref_logprobs is not None
    policy = torch.tensor(ours.probe(scored))
    expected = float((policy - scored.ref_logprobs)[scored.loss_mask].double().sum())
    metrics = ours.update(with_advantages(config, ours, scored), 0).metrics
    assert metrics["kl"] == pytest.approx(expected / 10, rel=1e-5)
    assert metrics["kl_per_completion"] == pytest.approx(expected / 4, rel=1e-5)


class Noisy(LlamaForCausalLM):
    """Draws random numbers in eval mode too."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        torch.rand(())
        return super().forward(*arguments, **options)


def test_a_model_whose_noise_cannot_be_switched_off_is_refused(model: Input, tmp_path: Path) -> None:
    config = rl_config("grpo")
    ours, group = trainer(config, model, tmp_path)
    group._worker._policy.module.model.__class__ = Noisy
    scored = ours.score(trajectories())
    with pytest.raises(StageError, match=r"Noisy draws random numbers even in eval mode.*`dropout: true`"):
        ours.update(with_advantages(config, ours, scored), 0)


def test_scores_come_back_at_their_own_tokens(model: Input, tmp_path: Path) -> None:
    """Several micro-batches, put together again: the same as the trainer's plain log-probs of the whole batch."""
    ours, _ = trainer(rl_config("ppo", kl={"coefficient": 0.1}), model, tmp_path)
    e = trajectories()
    scored = ours.score(e)
    expected = torch.tensor(ours.probe(e)) * e.loss_mask
    assert scored.old_logprobs is not None
    assert scored.ref_logprobs is not None
    assert scored.values is not None
    torch.testing.assert_close(scored.old_logprobs, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(scored.ref_logprobs, scored.old_logprobs, atol=1e-6, rtol=0)
    assert bool((scored.values[~e.loss_mask] == 0).all())
    assert bool((scored.values[e.loss_mask] != 0).all())


def test_the_reward_models_scores_come_back_at_their_own_tokens(model: Input, tmp_path: Path) -> None:
    torch.manual_seed(1)
    classifier = LlamaForSequenceClassification.from_pretrained(model.folder, num_labels=1, pad_token_id=0)
    classifier.save_pretrained(tmp_path / "reward")
    reward = local_input(tmp_path / "reward", Kind.REWARD_MODEL)
    config = rl_config("grpo", rewards={"taste": {"type": "reward_model"}})
    ours, _ = trainer(config, model, tmp_path / "work", {"grpo.rewards.taste.model": reward})
    e = trajectories()
    scores = ours.reward_scores(e, "reward:taste")
    lasts = scores[e.last_token_indices]
    for ids, last in zip(e.input_ids.split(e.sequence_lengths.tolist()), lasts, strict=True):
        torch.testing.assert_close(classifier(ids[None]).logits[0, 0], last, atol=1e-5, rtol=0)
    assert scores.shape == (e.num_tokens,)


def test_what_is_known_is_not_computed(model: Input, tmp_path: Path) -> None:
    ours, group = trainer(rl_config("grpo"), model, tmp_path)
    scored = ours.score(trajectories())
    assert (scored.old_logprobs, scored.ref_logprobs, scored.values) == (None, None, None)
    assert not group._worker._frozen
    assert "critic" not in group._worker._engines


def test_policy_and_critic_are_checkpointed_and_the_reference_is_not(model: Input, tmp_path: Path) -> None:
    config = rl_config("ppo", kl={"coefficient": 0.1})
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"gradient_checkpointing": True})})
    _, group = trainer(config, model, tmp_path)
    worker = group._worker
    engines = (worker._engines["policy"], worker._engines["critic"], worker._frozen["reference"].engine)
    models = [engine.module.model for engine in engines]
    assert [m.is_gradient_checkpointing for m in models] == [True, True, False]


def test_a_model_has_micro_batches_of_its_own_size(
    model: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, counts = [], []
    for name, tokens in (("alike", 12), ("own", 7)):
        engine = {"dtype": "float32", "zero_stage": 0, "tokens_per_micro_batch": tokens}
        ours, group = trainer(rl_config("ppo", critic={"engine": engine}), model, tmp_path / name)
        critic = group._worker._engines["critic"]
        monkeypatch.setattr(critic, "_require_same_count", counts.append)
        values.append(ours.score(trajectories()).values)
    torch.testing.assert_close(values[0], values[1], atol=1e-6, rtol=0)
    assert counts[0] < counts[1], "more and smaller micro-batches"


def test_weights_are_those_that_save_writes(model: Input, tmp_path: Path) -> None:
    ours, group = trainer(rl_config("grpo"), model, tmp_path / "work")
    group.call(RLWorker.save, tmp_path / "out")
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    tensors = from_safetensors(published(ours))
    assert tensors.keys() == saved.keys()
    assert all(torch.equal(tensors[name], saved[name]) for name in saved)


def test_a_frozen_policy_does_not_move_while_the_critic_warms_up(model: Input, tmp_path: Path) -> None:
    config = rl_config("ppo", critic={"warmup_steps": 1})
    ours, _ = trainer(config, model, tmp_path)
    scored = ours.score(trajectories())
    e = with_advantages(config, ours, scored)
    before = published(ours)
    metrics = ours.update(e, step=0).metrics
    assert published(ours) == before
    assert "value_loss" in metrics
    assert "policy_loss" not in metrics
    ours.update(e, step=1)
    assert published(ours) != before


COMPONENTS: dict[str, Any] = {
    "teacher": {"model": "teacher", "coefficient": 0.5}, "cross_entropy": {"coefficient": 0.3, "least_reward": 1.0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("minibatches", "components"), [(1, {}), (2, {}), (2, COMPONENTS)], ids=["1", "2", "2 components"]
)
def test_the_same_update_whatever_the_micro_batches(
    minibatches: int, components: dict[str, Any], model: Input, tmp_path: Path
) -> None:
    results = []
    for tokens in (8, 1000):
        config = rl_config("grpo", minibatches=minibatches, **components)
        config = config.model_copy(
            update={"engine": config.engine.model_copy(update={"tokens_per_micro_batch": tokens})}
        )
        ours, _ = trainer(config, model, tmp_path / str(tokens))
        scored = ours.score(trajectories())
        ours.update(with_advantages(config, ours, scored), 0)
        results.append(from_safetensors(published(ours)))
    differences = torch.cat([(tensor - results[1][name]).flatten().abs() for name, tensor in results[0].items()])
    # Adam divides a gradient by its own size: where it is next to nothing, so is what its rounding is divided by.
    assert float(differences.mean()) < 1e-7
    assert float(differences.max()) < 1e-4, "an update moves a weight by 1e-2"


@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_mismatch_with_the_engine_is_measured(minibatches: int, model: Input, tmp_path: Path) -> None:
    """By the update itself where it is the only one, else from the old log-probs: the same figures."""
    config = rl_config("grpo", minibatches=minibatches)
    ours, _ = trainer(config, model, tmp_path)
    e = trajectories()
    difference = torch.tensor(ours.probe(e), dtype=torch.float64)[e.loss_mask]  # the engine's log-probs are 0 here
    metrics = ours.update(with_advantages(config, ours, ours.score(e)), 0).metrics
    assert metrics["rollout_mismatch"] == pytest.approx(float(difference.abs().mean()), rel=1e-5)
    assert metrics["rollout_mismatch_max"] == pytest.approx(float(difference.abs().max()), rel=1e-5)
    assert metrics["rollout_kl"] == pytest.approx(float((difference.exp() - 1 - difference).mean()), rel=1e-5)


def test_the_mismatch_is_measured_while_the_policy_is_frozen(model: Input, tmp_path: Path) -> None:
    config = rl_config("ppo", critic={"warmup_steps": 1})
    ours, _ = trainer(config, model, tmp_path)
    metrics = ours.update(with_advantages(config, ours, ours.score(trajectories())), 0).metrics
    assert metrics["rollout_mismatch_max"] >= metrics["rollout_mismatch"] > 1


def test_the_kl_coefficient_adapts_from_step_to_step(model: Input, tmp_path: Path) -> None:
    config = rl_config("ppo", kl={"coefficient": 0.1, "target": 1.0, "horizon": 4}, critic={"warmup_steps": 1})
    ours, _ = trainer(config, model, tmp_path)
    coefficients = []
    for step in range(3):
        metrics = ours.update(with_advantages(config, ours, ours.score(trajectories())), step).metrics
        coefficients.append(metrics["kl_coefficient"])
        assert metrics["kl_per_completion"] < 0.8, "the error is held at its bound of -20 %"
    # Step 0 trains the critic alone: what the policy's KL is says nothing then.
    assert coefficients == pytest.approx([0.1, 0.1, 0.1 * 0.95])
    again = PolicyTrainer(config, build_algorithm(config), InlineGroup(lambda: None), seed=0)
    again.load_state_dict(ours.state_dict())
    assert again.kl_coefficient == ours.kl_coefficient == pytest.approx(0.1 * 0.95**2)


def test_a_kl_in_the_loss_needs_no_old_log_probs_for_a_single_update(model: Input, tmp_path: Path) -> None:
    ours, _ = trainer(rl_config("grpo", kl={"coefficient": 0.1}), model, tmp_path)
    scored = ours.score(trajectories())
    assert scored.old_logprobs is None
    assert scored.ref_logprobs is not None


def test_what_an_update_has_freed_is_returned_before_engines_are_given_weights(model: Input, tmp_path: Path) -> None:
    _, group = trainer(rl_config("grpo"), model, tmp_path)
    in_use, before = freed_blocks(), resident()
    group.call(RLWorker.offer_weights, 1, 1)
    assert resident() < before - BLOCK * BLOCKS / 2
    assert in_use
    group.call(RLWorker.withdraw_weights)
