"""The log-probs that an engine returns with its samples, against the trainer's of the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from rlhf_core.chat.tokenizers import word_level_tokenizer
from rlhf_core.config.engines.rollout import SamplingConfig, VllmEngineConfig
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.episodes.rollouter import Rollouter
from rlhf_core.kept_tokens import KeptTokens
from rlhf_core.models.packed import PolicyModel
from rlhf_core.packing import pack
from rlhf_core.processes.child_process import ChildProcess
from rlhf_core.rl.rollouts import RolloutSampler
from rlhf_core.rollout.child_engine import ChildEngine
from rlhf_core.rollout.engine import EngineSettings, Request, RolloutEngine, SamplingParameters
from rlhf_core.types import Completion, Prompt
from tests.rlhf_core.rollout.models import EOS, make_model

pytestmark = pytest.mark.parts

CONFIG = VllmEngineConfig(max_length=64, cpu_cache_gib=0.05, max_sequences=64)
PROMPTS = [[1, 5, 6, 7], [1, 9], [1, 20, 21, 22, 23, 24, 25], [1, 5, 6, 8]] * 16

PAIRS = list(enumerate(PROMPTS[:4]))
RL = RLConfig.model_validate({
    "algorithm": "grpo", "dataset": "p", "steps": 3, "prompts_per_step": 2, "sampling": {"max_tokens": 24},
    "rollout": {"max_length": 64},
    "grpo": {"rewards": {"own": {"type": "verifier"}}, "group_size": 2, "optimizer": {"learning_rate": 1e-3}},
})  # fmt: skip

Served = tuple[LlamaForCausalLM, ChildEngine]


KEPT = SamplingConfig(max_tokens=24, top_k=6, top_p=0.9, min_p=0.02)


@pytest.fixture(scope="module")
def served(engine_process: ChildProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("sampling")
    model = make_model(folder, tied=True)
    engine = ChildEngine(engine_process, folder, EngineSettings(CONFIG, "float32", seed=0, kept_of=KEPT))
    yield model, engine
    engine.shutdown()


def sampled(engine: ChildEngine, **settings: float) -> tuple[list[Completion], Tensor]:
    """Completions of all prompts, and the log-probs that came with them, one after the other."""
    sampling = SamplingConfig.model_validate({"max_tokens": 24, **settings})
    parameters = SamplingParameters.of(sampling, (EOS,))
    completions = engine.share(
        RolloutEngine.generate, [Request(prompt, parameters, seed) for seed, prompt in enumerate(PROMPTS)]
    )
    return completions, torch.tensor([logprob for completion in completions for logprob in completion.logprobs])


@torch.no_grad()
def trainers_logprobs(
    model: LlamaForCausalLM, completions: list[Completion], temperature: float, kept: Tensor | None = None
) -> Tensor:
    """As a training rank computes them, over the whole vocabulary or the `kept` tokens of the batch."""
    pairs = list(zip(PROMPTS, completions, strict=True))
    batch = pack(
        [[*prompt, *completion.token_ids] for prompt, completion in pairs],
        [[False] * len(prompt) + [True] * len(completion.token_ids) for prompt, completion in pairs],
    )
    batch = replace(batch, kept_tokens=kept)
    logprobs: Tensor = PolicyModel(model)(batch, temperature=temperature, only=batch.loss_mask)[0]
    return logprobs[batch.loss_mask]


def test_steps_sample_with_random_numbers_of_their_own(served: Served) -> None:
    """torch's generator on CPU keeps the low 32 bits of a seed: seeds that differed above them only made step k + 16
    repeat the random numbers of step k. A request keeps its own whatever else is in the batch."""
    _, engine = served
    rollouter = Rollouter(engine, word_level_tokenizer([], context_length=64), RL.rollout)
    sampler = RolloutSampler(RL, rollouter, seed=0)
    prompts = [Prompt(str(i), "", tuple(ids), {"prompt": [{"role": "user", "content": "?"}]}) for i, ids in PAIRS]

    def tokens(count: int, step: int, sampling_round: int = 0) -> list[list[int]]:
        groups = sampler.sample(prompts[:count], step, sampling_round)
        return [t.token_ids.tolist() for group in groups for t in group]

    first = tokens(4, 3)
    for other in (tokens(4, 4), tokens(4, 3 + 16), tokens(4, 3 + 32), tokens(4, 3, sampling_round=1)):
        assert all(a != b for a, b in zip(first, other, strict=True))
    assert tokens(4, 3) == first
    assert tokens(1, 3) == first[:2]
    assert first[0] != first[1]  # two completions of one prompt


@pytest.mark.parametrize("temperature", [0.01, 0.3, 0.7, 1.0, 1.5, 2.0])
def test_the_kl_of_a_policy_to_itself_is_zero_at_every_temperature(served: Served, temperature: float) -> None:
    model, engine = served
    completions, rollout = sampled(engine, temperature=temperature)
    difference = rollout - trainers_logprobs(model, completions, temperature)
    rounding = 2e-5 / min(temperature, 1.0)  # a temperature multiplies the logits' rounding by its inverse
    assert abs(float(difference.mean())) < rounding / 10
    assert float(difference.abs().max()) < rounding


@pytest.mark.parametrize("cut", [{"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.3}], ids=str)
def test_a_truncated_distribution_is_another_than_the_policys(served: Served, cut: dict[str, float]) -> None:
    """Why RL needs the kept tokens; an evaluation, which trains on no log-prob, samples from exactly what they say."""
    model, engine = served
    completions, rollout = sampled(engine, temperature=0.7, **cut)
    whole = trainers_logprobs(model, completions, temperature=0.7)
    assert float((rollout - whole).mean()) > 0.3
    for prompt, completion in list(zip(PROMPTS, completions, strict=True))[:4]:
        expected = truncated_logprobs(model, prompt, completion, temperature=0.7, **cut)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "cut", [{"top_k": 6}, {"top_k": 3}, {"top_k": 6, "top_p": 0.7}, {"top_k": 6, "min_p": 0.3}], ids=str
)
def test_over_the_kept_tokens_the_kl_of_a_policy_to_itself_is_zero(served: Served, cut: dict[str, float]) -> None:
    model, engine = served
    completions, rollout = sampled(engine, temperature=0.7, **cut)
    for prompt, completion in list(zip(PROMPTS, completions, strict=True))[:4]:
        expected = truncated_logprobs(model, prompt, completion, temperature=0.7, **cut)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-4)
    parts = []
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert completion.kept is not None
        assert len(completion.kept.counts) == len(completion.token_ids)
        assert max(completion.kept.counts) <= cut["top_k"]
        parts += [KeptTokens.nowhere(len(prompt)), completion.kept]
    kept = KeptTokens.joined(parts).dense()
    difference = rollout - trainers_logprobs(model, completions, temperature=0.7, kept=kept)
    assert float(difference.abs().max()) < 3e-5


def test_samples_of_all_tokens_have_no_kept_ones(served: Served) -> None:
    completions, _ = sampled(served[1])
    assert all(completion.kept is None for completion in completions)


def test_requests_that_advance_return_the_kept_tokens_too(served: Served) -> None:
    """In several parts, each of which has its own."""
    _, engine = served
    parameters = SamplingParameters.of(KEPT, (EOS,))
    done: dict[int, Completion] = {}
    asked = {number: Request(prompt, parameters, number) for number, prompt in enumerate(PROMPTS[:4])}
    while len(done) < 4:
        done |= engine.call_on(0, RolloutEngine.advance, asked)
        asked = {}
    for completion in done.values():
        assert completion.kept is not None
        position = 0
        for token, count in zip(completion.token_ids, completion.kept.counts, strict=True):
            assert token in completion.kept.token_ids[position : position + count]
            position += count


@torch.no_grad()
def truncated_logprobs(
    model: LlamaForCausalLM, prompt: list[int], completion: Completion, *, temperature: float,
    top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0,
) -> Tensor:  # fmt: skip
    """Of the distribution that is left when the unlikely tokens are taken out, by the settings' definitions."""
    tokens = torch.tensor(completion.token_ids)
    logits = model(input_ids=torch.tensor([[*prompt, *completion.token_ids]])).logits[0, len(prompt) - 1 : -1]
    probabilities, order = torch.softmax(logits / temperature, dim=-1).sort(descending=True)
    kept = probabilities >= min_p * probabilities[:, :1]
    if top_k:
        kept[:, top_k:] = False
    left = (probabilities * kept) / (probabilities * kept).sum(-1, keepdim=True)
    kept &= left.cumsum(-1) - left < top_p  # those before it are not yet enough, of what the others leave
    left = (probabilities * kept) / (probabilities * kept).sum(-1, keepdim=True)
    place = (order == tokens.unsqueeze(1)).int().argmax(-1, keepdim=True)
    return left.gather(1, place).squeeze(1).log()
