"""Small random models for the engine tests. Import it as tests.rlhf_core.rollout.models."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rlhf_core.contract import Started
from rlhf_core.rollout import child_engine
from rlhf_core.rollout.child_engine import ChildEngine
from rlhf_core.rollout.engine import Request, SamplingParameters
from rlhf_core.rollout.engines import Engines, hand_over
from rlhf_core.rollout.publication import Publication, publication_of, published_tensors
from rlhf_core.rollout.transport.base import Transport, WeightManifest, digested
from rlhf_core.rollout.transport.collective import Collective
from rlhf_core.rollout.transport.ipc import SharedBuffers
from rlhf_core.rollout.vllm.prompts import prompt_of
from rlhf_core.training.background import Background
from rlhf_core.training.distributed import host_store

EOS = 2
VOCABULARY = 96


class Publishable(Protocol):
    def publish(self, weights: Publication) -> None: ...


def make_model(
    folder: Path, *, tied: bool, seed: int = 0, dtype: torch.dtype = torch.float32, context: int = 64
) -> LlamaForCausalLM:
    """A Llama of 70 thousand weights, saved in `folder`. Heads of size 32: the smallest that vLLM serves on CPU."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=context, tie_word_embeddings=tied, initializer_range=0.15,
        bos_token_id=1, eos_token_id=EOS, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype).eval()
    model.save_pretrained(folder)
    return model


def make_experts(folder: Path, family: str) -> PreTrainedModel:
    """A mixture of four experts in two layers, saved in `folder`. Widths of 48 vLLM fills up to 64 on CPU."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.15, "num_experts_per_tok": 2,
        "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    model: PreTrainedModel
    if family == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(num_local_experts=4, intermediate_size=48, **shape))
    elif family == "qwen2_moe":
        shared = {"shared_expert_intermediate_size": 32, "moe_intermediate_size": 32}
        model = Qwen2MoeForCausalLM(Qwen2MoeConfig(num_experts=4, **shared, **shape))
    else:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_experts=4, moe_intermediate_size=48, head_dim=32, **shape))
    model.save_pretrained(folder)
    return model.eval()


def disturb(model: torch.nn.Module, seed: int, only: str = "") -> None:
    """Changes every weight a little whose name has `only`, as an optimizer step would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only not in name:
                continue
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


def publish(engines: Publishable, state: Mapping[str, Tensor], version: int, **options: Any) -> Mapping[str, str]:
    """As the trainer does it; the digests of what was published."""
    with publication_of(state, version, **options) as weights:
        engines.publish(weights)
    return weights.manifest.digests


def publish_by_broadcast(engines: Engines, state: Mapping[str, Tensor], version: int) -> Mapping[str, str]:
    """As `publish`, by a broadcast from a thread of this process."""
    store = host_store("127.0.0.1")
    transport = Collective(f"127.0.0.1:{store.port}", "gloo", engines.size, 1, timeout_seconds=60)
    return _sent_meanwhile(engines, transport, state, version)


def publish_by_handle(
    engines: Engines, state: Mapping[str, Tensor], version: int, *, workers: int = 1
) -> Mapping[str, str]:
    """As `publish`, by handle from a thread of this process. workers: of each engine, that receive."""
    transport = SharedBuffers(f"{os.getpid()}-{version}", "cpu", engines.size, workers, timeout_seconds=60)
    with transport.listening():
        return _sent_meanwhile(engines, transport, state, version)


def _sent_meanwhile(
    engines: Engines, transport: Transport, state: Mapping[str, Tensor], version: int
) -> Mapping[str, str]:
    tensors, digests = published_tensors(state), dict[str, str]()
    manifest = WeightManifest.of(version, tensors)

    def start() -> Started[Mapping[str, str]]:
        def send() -> list[Mapping[str, str]]:
            transport.send(digested(tensors.items(), digests), manifest)
            return [digests]

        return Started(Background(send, name="send").result)

    return hand_over(engines, Publication(transport, manifest, dict, start)).digests


@torch.no_grad()
def expected_logprobs(
    model: torch.nn.Module, sequences: list[list[int]], temperature: float = 1.0
) -> list[list[float]]:
    """transformers' own log-probs, one sequence at a time; the first of each is 0."""
    answers = []
    for sequence in sequences:
        ids = torch.tensor([sequence])
        logits = model(input_ids=ids).logits[0, :-1].float() / temperature
        logprobs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        answers.append([0.0, *logprobs.tolist()])
    return answers


def requests(prompts: Sequence[Sequence[int]], parameters: SamplingParameters, first_seed: int = 11) -> list[Request]:
    """One of each prompt, with seeds in a row unless they are greedy."""
    greedy = parameters.temperature == 0
    return [Request(prompt, parameters, None if greedy else first_seed + i) for i, prompt in enumerate(prompts)]


def cached_tokens(engine: ChildEngine, requests: Sequence[Request], *, keep_prefixes: bool) -> list[int]:
    """Of each prompt, the tokens that the engine has not computed again."""
    tokens: list[int] = engine._process.call(_cached_tokens, engine._number, requests, keep_prefixes)
    return tokens


def _cached_tokens(number: int, requests: Sequence[Request], keep_prefixes: bool) -> list[int]:
    """In the engine's process."""
    engine = child_engine._engines[number]
    parameters = [engine._parameters(index, request) for index, request in enumerate(requests)]
    outputs = engine._run([prompt_of(request, None) for request in requests], parameters, keep_prefixes=keep_prefixes)
    return [output.num_cached_tokens for output in outputs]
