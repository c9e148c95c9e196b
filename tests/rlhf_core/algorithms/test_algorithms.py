"""Advantages and losses of each algorithm, pinned to numbers worked out by hand."""

import pytest
import torch

from rlhf_core.algorithms import build_algorithm
from rlhf_core.algorithms.ppo import last_trained_token
from rlhf_core.config.rl import RLConfig
from rlhf_core.types import Experience

BASE = {
    "dataset": "prompts", "steps": 1, "prompts_per_step": 1,
    "sampling": {"max_tokens": 4}, "rollout": {"max_length": 8},
}  # fmt: skip
OPTIMIZER = {"learning_rate": 1e-3}


def rl_config(algorithm: str, **settings: object) -> RLConfig:
    block = {"rewards": {"exact": {"type": "verifier"}}, "optimizer": OPTIMIZER, **settings}
    if algorithm == "ppo":
        block |= {"critic_optimizer": OPTIMIZER, "critic_start": "policy"}
    return RLConfig.model_validate({**BASE, "algorithm": algorithm, algorithm: block})


def experience(**fields: torch.Tensor) -> Experience:
    """Two trajectories: prompt of 2 and completion of 2 tokens; prompt of 1 and completion of 1 token."""
    return Experience(
        input_ids=torch.arange(6),
        position_ids=torch.tensor([0, 1, 2, 3, 0, 1]),
        sequence_lengths=torch.tensor([4, 2]),
        loss_mask=torch.tensor([False, False, True, True, False, True]),
        **fields,
    )


def test_ppo_puts_the_reward_on_the_last_sampled_token_and_the_kl_on_every_one() -> None:
    algorithm = build_algorithm(rl_config("ppo", kl={"coefficient": 0.5}))
    e = algorithm.advantages(
        experience(
            old_logprobs=torch.tensor([0.0, 0.0, -1.0, -2.0, 0.0, -3.0]),
            ref_logprobs=torch.tensor([0.0, 0.0, -1.2, -1.0, 0.0, -3.0]),
            values=torch.zeros(6),
        ),
        torch.tensor([1.0, -2.0]),
        torch.tensor([0, 0]),
    )
    # k1 is 0.2, -1.0 and 0.0; the reward of each sequence is added at tokens 3 and 5.
    torch.testing.assert_close(e.rewards, torch.tensor([0.0, 0.0, -0.1, 1.5, 0.0, -2.0]))
    # gamma 1, lambda 0.95, values 0: the advantage of token 2 is -0.1 + 0.95 * 1.5.
    torch.testing.assert_close(e.returns, torch.tensor([0.0, 0.0, 1.325, 1.5, 0.0, -2.0]))
    trained = e.advantages[e.loss_mask]
    assert float(trained.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(trained.std(correction=0)) == pytest.approx(1.0, abs=1e-5)


def test_grpo_gives_every_token_of_a_completion_its_groups_normalised_reward() -> None:
    e = build_algorithm(rl_config("grpo")).advantages(experience(), torch.tensor([1.0, 0.0]), torch.tensor([7, 7]))
    a = 0.5 / 0.5**0.5  # the unbiased standard deviation of {0, 1} is sqrt(1/2)
    torch.testing.assert_close(e.advantages, torch.tensor([0.0, 0.0, a, a, 0.0, -a]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_at_the_old_policy_the_gradient_is_plain_policy_gradient(algorithm: str) -> None:
    advantages = torch.tensor([0.0, 0.0, 2.0, -1.0, 0.0, 0.5])
    logprobs = torch.tensor([0.0, 0.0, -1.0, -2.0, 0.0, -3.0], requires_grad=True)
    e = experience(advantages=advantages)
    loss, _ = build_algorithm(rl_config(algorithm)).policy_loss(logprobs, None, e, num_tokens=3)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, -advantages / 3)


def test_known_old_logprobs_and_left_out_ones_give_the_same_gradient_on_policy() -> None:
    advantages = torch.tensor([0.0, 0.0, 2.0, -1.0, 0.0, 0.5])
    values = torch.tensor([0.0, 0.0, -1.0, -2.0, 0.0, -3.0])
    gradients = []
    for old in (None, values.clone()):
        logprobs = values.clone().requires_grad_()
        e = experience(advantages=advantages, old_logprobs=old)
        build_algorithm(rl_config("grpo")).policy_loss(logprobs, None, e, num_tokens=3)[0].backward()
        gradients.append(logprobs.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_the_entropy_bonus_pulls_entropy_up() -> None:
    entropy = torch.ones(6, requires_grad=True)
    e = experience(advantages=torch.zeros(6))
    algorithm = build_algorithm(rl_config("grpo", entropy_coefficient=0.3))
    loss, _ = algorithm.policy_loss(torch.zeros(6, requires_grad=True), entropy, e, num_tokens=3)
    loss.backward()
    torch.testing.assert_close(entropy.grad, torch.tensor([0.0, 0.0, -0.1, -0.1, 0.0, -0.1]))


def test_the_last_sampled_token_may_be_followed_by_tokens_that_were_not() -> None:
    e = experience()
    mask = torch.tensor([False, True, False, False, True, False])
    moved = Experience(e.input_ids, e.position_ids, e.sequence_lengths, mask)
    assert last_trained_token(moved).tolist() == [1, 4]


def test_a_trajectory_without_sampled_tokens_is_refused() -> None:
    e = experience()
    empty = Experience(e.input_ids, e.position_ids, e.sequence_lengths, torch.zeros(6, dtype=torch.bool))
    with pytest.raises(ValueError, match="without a sampled token"):
        last_trained_token(empty)
