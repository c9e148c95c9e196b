from __future__ import annotations

import itertools

import torch

from rlhf_core.chat.tokenizers import word_level_tokenizer
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.episodes.rollouter import Rollouter
from rlhf_core.rl.rollouts import RolloutSampler, request_seed
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.scripted import ScriptedEngine
from rlhf_core.types import Prompt

ROW = {"prompt": [{"role": "user", "content": "?"}]}
TOKENIZER = word_level_tokenizer([], context_length=64)
CONFIG = RLConfig.model_validate({
    "algorithm": "grpo", "dataset": "p", "steps": 3, "prompts_per_step": 2, "sampling": {"max_tokens": 3},
    "rollout": {"max_length": 16},
    "grpo": {"rewards": {"own": {"type": "verifier"}}, "group_size": 2, "optimizer": {"learning_rate": 1e-3}},
})  # fmt: skip


def rollouter(engine: ScriptedEngine) -> Rollouter:
    return Rollouter(InlineEngines(engine), TOKENIZER, CONFIG.rollout)


def sampled_seeds(seed: int, *rounds: tuple[int, int]) -> list[int]:
    """The seed of every request of some (step, round), as the engine sees them."""
    seen: list[int] = []

    def script(prompt: object, request_seed: int | None) -> list[int]:
        assert request_seed is not None
        seen.append(request_seed)
        return [TOKENIZER.eos_token_id]

    sampler = RolloutSampler(CONFIG, rollouter(ScriptedEngine(script)), seed)
    prompts = [Prompt(str(i), "", (7,), ROW) for i in range(3)]
    for step, sampling_round in rounds:
        sampler.sample(prompts, step, sampling_round)
    return seen


def test_every_request_of_a_run_has_a_seed_of_its_own() -> None:
    seeds = sampled_seeds(0, *itertools.product(range(50), range(4)))
    assert len(seeds) == 50 * 4 * 3 * 2
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_are_a_function_of_seed_step_round_and_index_alone() -> None:
    whole = sampled_seeds(3, (0, 0), (0, 1), (1, 0))
    assert sampled_seeds(3, (1, 0)) == whole[12:]
    assert sampled_seeds(3, (0, 1)) == whole[6:12]
    assert not set(sampled_seeds(4, (0, 0), (0, 1), (1, 0))) & set(whole)


def test_requests_differ_in_the_bits_that_generators_keep() -> None:
    """torch's generator on CPU, with which vLLM samples there, keeps the low 32 bits of a seed."""
    assert torch.rand(4, generator=torch.Generator().manual_seed(7)).equal(
        torch.rand(4, generator=torch.Generator().manual_seed(7 + 2**32))
    )
    for seed in (0, 1, 2**31):
        seeds = [
            request_seed(seed, *request)
            for request in itertools.product((*range(0, 64, 16), 10**6), (0, 1, 255), range(64), (0, 1, 16))
        ]
        assert len({seed % 2**32 for seed in seeds}) == len(seeds)


def test_trajectories_are_prompt_and_completion_with_the_completion_trained() -> None:
    engine = ScriptedEngine(lambda prompt, seed: [9, 10, 11, 12], logprob=-0.5)
    ((one, two),) = RolloutSampler(CONFIG, rollouter(engine), 0).sample([Prompt("p", "", (7, 8), ROW)], 0)
    assert one.token_ids.tolist() == two.token_ids.tolist() == [7, 8, 9, 10, 11]
    assert one.loss_mask.tolist() == [False, False, True, True, True]
    torch.testing.assert_close(one.rollout_logprobs, torch.tensor([0.0, 0.0, -0.5, -0.5, -0.5]))
    assert (one.finish_reason, one.weight_version) == ("length", 0)
