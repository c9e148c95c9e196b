"""RL on truncated samples: log-probs over the kept tokens on both sides, against float64."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.chat.tokenizers import word_level_tokenizer
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.episodes.stops import until_stop
from rlhf_core.kept_tokens import NO_TOKEN, KeptTokens
from rlhf_core.models.logprobs import chunked_logprobs
from rlhf_core.models.packed import PolicyModel
from rlhf_core.rl.experience import pack_hinted, pack_trajectories
from rlhf_core.rl.stored import stored, trajectory_of
from rlhf_core.rollout.engine import Request, SamplingParameters
from rlhf_core.stages import rl
from rlhf_core.stages.in_process import InProcessCluster
from rlhf_core.types import Completion, Prompt, Trajectory
from tests.rlhf_core.rl.torch_engine import TorchEngine, torch_engine
from tests.rlhf_core.stages.supervised_runs import base_model, context_of, dataset

pytestmark = pytest.mark.parts

VOCABULARY, TEMPERATURE = 11, 0.7
CUTS: list[dict[str, Any]] = [
    {"top_k": 5}, {"top_k": 8, "top_p": 0.8}, {"top_k": 6, "min_p": 0.2}, {"top_k": 9, "top_p": 0.9, "min_p": 0.1},
]  # fmt: skip


def oracle(logits: Tensor, targets: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probs and entropies of each row's kept tokens in float64, one row at a time."""
    logprobs, entropies = [], []
    for row, target, mine in zip(logits.double() / TEMPERATURE, targets, kept, strict=True):
        tokens = [int(token) for token in mine if token != NO_TOKEN]
        weights = (row[tokens] - row[tokens].max()).exp()
        probabilities = weights / weights.sum()
        logprobs.append(probabilities[tokens.index(int(target))].log())
        entropies.append(-(probabilities * probabilities.log()).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("chunk", [10**6, 3 * VOCABULARY], ids=["whole", "in chunks"])
def test_log_probs_entropies_and_gradients_are_those_of_the_kept_tokens(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(4, VOCABULARY, bias=False)
    hidden = torch.randn(40, 4, generator=generator, requires_grad=True)
    kept = KeptTokens.of(
        torch.randperm(VOCABULARY, generator=generator)[: 1 + row % VOCABULARY].tolist() for row in range(40)
    ).dense()
    targets = torch.tensor([int(row[row != NO_TOKEN][-1]) for row in kept])
    logprobs, entropies = chunked_logprobs(
        head, hidden, targets, vocabulary=VOCABULARY, temperature=TEMPERATURE, kept=kept, with_entropy=True,
        chunk_elements=chunk,
    )  # fmt: skip
    assert entropies is not None
    weights = torch.randn(2, 40, generator=generator)
    ((weights[0] * logprobs).sum() + (weights[1] * entropies).sum()).backward()
    assert hidden.grad is not None
    assert head.weight.grad is not None

    exact_hidden = hidden.detach().double().requires_grad_()
    exact_weight = head.weight.detach().double().requires_grad_()
    exact_logprobs, exact_entropies = oracle(exact_hidden @ exact_weight.T, targets, kept)
    ((weights[0] * exact_logprobs).sum() + (weights[1] * exact_entropies).sum()).backward()
    for ours, exact in (
        (logprobs, exact_logprobs), (entropies, exact_entropies), (hidden.grad, exact_hidden.grad),
        (head.weight.grad, exact_weight.grad),
    ):  # fmt: skip
        assert exact is not None
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


def test_a_token_that_is_not_kept_has_no_gradient() -> None:
    logits = torch.randn(1, VOCABULARY, requires_grad=True)
    kept = KeptTokens.of([[2, 4, 6]]).dense()
    logprobs, _ = chunked_logprobs(
        torch.nn.Identity(),
        logits,
        torch.tensor([4]),
        vocabulary=VOCABULARY,
        kept=kept,
    )
    logprobs.sum().backward()
    assert logits.grad is not None
    assert logits.grad[0].nonzero().flatten().tolist() == [2, 4, 6]
    assert float(logits.grad.sum()) == pytest.approx(0, abs=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **shape))
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)  # so that distributions differ from the uniform one
    model.save_pretrained(folder)
    return folder


def played(folder: Path, cut: dict[str, Any]) -> list[Trajectory]:
    sampling = {"top_p": 1.0, **cut}
    parameters = SamplingParameters(temperature=TEMPERATURE, max_tokens=12, stop_token_ids=(), **sampling)
    engine = TorchEngine(folder, 32, kept_of=object())  # type: ignore[arg-type]
    prompts = [(1, 2, 3), (4, 5), (6,)]
    completions = engine.generate([Request(prompt, parameters, seed) for seed, prompt in enumerate(prompts)])
    return [trajectory(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]


def trajectory(prompt: tuple[int, ...], completion: Completion) -> Trajectory:
    given, sampled = len(prompt), len(completion.token_ids)
    assert completion.kept is not None
    return Trajectory(
        Prompt("p", "", prompt, {}), torch.tensor([*prompt, *completion.token_ids]),
        torch.tensor([False] * given + [True] * sampled), torch.tensor([0.0] * given + list(completion.logprobs)), 0,
        "length", kept=KeptTokens.joined([KeptTokens.nowhere(given), completion.kept]),
    )  # fmt: skip


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_policy_has_no_kl_to_itself_and_its_ratio_is_one(folder: Path, cut: dict[str, Any]) -> None:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    batch = pack_trajectories(played(folder, cut), truncated=True)
    assert batch.kept_tokens is not None
    assert (batch.kept_tokens >= 0).sum(1).max() <= cut["top_k"]
    with torch.no_grad():
        ours = PolicyModel(model)(batch, temperature=TEMPERATURE, only=batch.loss_mask)[0]
        whole = PolicyModel(model)(replace(batch, kept_tokens=None), temperature=TEMPERATURE, only=batch.loss_mask)[0]
    difference = (ours - batch.rollout_logprobs)[batch.loss_mask]
    assert float(difference.abs().max()) < 1e-5
    # Over all tokens, as before, every ratio is below 1.
    assert float((whole - batch.rollout_logprobs)[batch.loss_mask].max()) < 0


def test_missing_kept_tokens_are_an_error(folder: Path) -> None:
    made = played(folder, {"top_k": 5})
    pack_trajectories(made)  # not truncated: they are not looked at
    for wrong in (None, KeptTokens.nowhere(made[0].token_ids.numel())):
        with pytest.raises(ValueError, match="a sampled token is not among those that truncated sampling kept"):
            pack_trajectories([replace(made[0], kept=wrong), *made[1:]], truncated=True)


def test_a_checkpoint_keeps_them(folder: Path) -> None:
    made = played(folder, {"top_k": 5})[0]
    again = trajectory_of(json.loads(json.dumps(stored(made))), made.prompt)
    assert again.kept == made.kept


def test_a_reply_that_a_text_ends_keeps_those_of_its_tokens() -> None:
    tokenizer = word_level_tokenizer([], context_length=64)
    ids = tokenizer("abcd", add_special_tokens=False)["input_ids"]
    kept = KeptTokens.of([[token, 0] for token in ids])
    completion = Completion(ids, [-1.0] * 4, "length", 0, kept=kept)
    assert until_stop(completion, ["b"], tokenizer).kept == kept.first(2)


def test_a_teacher_with_a_hint_reads_them_at_the_same_tokens(folder: Path) -> None:
    made = played(folder, {"top_k": 5})
    hinted = [replace(t, prompt=replace(t.prompt, hinted_ids=(*t.prompt.token_ids, 9, 9))) for t in made]
    batch, packed = pack_hinted(hinted), pack_trajectories(made, truncated=True)
    assert batch is not None
    assert batch.kept_tokens is not None
    assert packed.kept_tokens is not None
    assert torch.equal(batch.kept_tokens[batch.loss_mask], packed.kept_tokens[packed.loss_mask])


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_run_measures_no_mismatch(tmp_path: Path, algorithm: str) -> None:
    optimizer = {"learning_rate": 1e-2}
    block: dict[str, Any] = {
        "rewards": {"exact": {"type": "verifier", "pattern": "(.)"}}, "optimizer": optimizer, "group_size": 4,
        "kl": {"coefficient": 0.1}, "epochs": 2,
    }  # fmt: skip
    block |= {"critic": {"optimizer": optimizer}} if algorithm == "ppo" else {"entropy_coefficient": 0.01}
    config = RLConfig.model_validate({
        "algorithm": algorithm, algorithm: block, "dataset": "d", "steps": 2, "prompts_per_step": 2,
        "sampling": {"max_tokens": 4, "top_k": 6, "top_p": 0.9, "temperature": 0.8}, "rollout": {"max_length": 24},
        "engine": {"dtype": "float32", "zero_stage": 0},
    })  # fmt: skip
    rows = [{"prompt": [{"role": "user", "content": f"say {letter}"}], "answer": letter} for letter in "abcd"]
    inputs = {"model": base_model(tmp_path / "base"), "dataset": dataset(tmp_path / "d", rows)}
    context = context_of(tmp_path / "work", inputs)
    rl.run(config, inputs, context, InProcessCluster(torch_engine))
    assert [metrics["rollout_mismatch_max"] < 1e-4 for _, metrics in context.logs] == [True, True]
    assert context.logs[0][1]["kl"] == pytest.approx(0, abs=1e-5)
