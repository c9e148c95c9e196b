"""An engine in this process that samples with plain transformers: slow, and a function of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf_core.config.engines.rollout import SamplingConfig
from rlhf_core.contract import StageContext
from rlhf_core.kept_tokens import KeptTokens
from rlhf_core.rollout.digest import tensor_digest
from rlhf_core.rollout.engine import Request, RolloutEngine, SamplingParameters, ServedTensor
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.publication import published_tensors
from rlhf_core.rollout.transport.base import Transport, WeightManifest
from rlhf_core.stages.cluster import EngineSpec
from rlhf_core.types import Completion


class TorchEngine(RolloutEngine):
    weight_version: int = 0

    def __init__(self, folder: Path, max_length: int, kept_of: SamplingConfig | None = None) -> None:
        self._max_length = max_length
        self._kept_of = kept_of
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def _logprobs(self, tokens: Sequence[int]) -> Tensor:
        """(T, V): what the model says after each token."""
        logits: Tensor = self._model(torch.tensor([list(tokens)])).logits[0]
        return logits.log_softmax(-1)

    def generate(self, requests: Sequence[Request], *, keep_prefixes: bool = False) -> list[Completion]:
        for index, request in enumerate(requests):
            if not 0 < len(request.prompt) < self._max_length:
                raise ValueError(f"prompt {index} has {len(request.prompt)} tokens")
        return [self._completion(request) for request in requests]

    def _completion(self, request: Request) -> Completion:
        parameters = request.parameters
        generator = torch.Generator().manual_seed(request.seed or 0)
        tokens: list[int] = []
        logprobs: list[float] = []
        kept: list[list[int]] = []
        reason = "length"
        for _ in range(min(parameters.max_tokens, self._max_length - len(request.prompt))):
            after = self._logprobs([*request.prompt, *tokens])[-1]
            if parameters.temperature == 0:
                tokens.append(int(after.argmax()))
            else:
                after = (after / parameters.temperature).log_softmax(-1)
                kept.append(_kept(after, parameters))
                after = torch.full_like(after, -torch.inf).index_copy(0, torch.tensor(kept[-1]), after[kept[-1]])
                after = after.log_softmax(-1)
                tokens.append(int(torch.multinomial(after.exp(), 1, generator=generator)))
            logprobs.append(float(after[tokens[-1]]))
            if tokens[-1] in parameters.stop_token_ids:
                reason = "stop"
                break
        of_tokens = None if self._kept_of is None or not kept else KeptTokens.of(kept)
        return Completion(tokens, logprobs, reason, self.weight_version, kept=of_tokens)  # type: ignore[arg-type]

    def load_weights(self, transport: Transport, manifest: WeightManifest) -> None:
        missing = self._model.load_state_dict(dict(transport.receive(manifest)), strict=False)
        assert not missing.unexpected_keys
        self.weight_version = manifest.version

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [
            [0.0, *(float(row[token]) for row, token in zip(self._logprobs(s)[:-1], s[1:], strict=True))]
            for s in sequences
        ]

    def served(self) -> tuple[ServedTensor, ...]:
        weights = published_tensors(self._model.state_dict())
        return tuple(ServedTensor(name, name, tensor_digest(tensor)) for name, tensor in weights.items())


def _kept(after: Tensor, parameters: SamplingParameters) -> list[int]:
    """The tokens that top_k, top_p and min_p keep, by their definitions. after: (V,) log-probs at the temperature."""
    probabilities, order = after.exp().sort(descending=True, stable=True)
    kept = probabilities >= parameters.min_p * probabilities[0]
    if parameters.top_k:
        kept[parameters.top_k :] = False
        probabilities = probabilities * kept / (probabilities * kept).sum()
    kept &= probabilities.cumsum(0) - probabilities < parameters.top_p
    chosen: list[int] = order[kept].tolist()
    return chosen


def torch_engine(spec: EngineSpec, context: StageContext) -> AbstractContextManager[TorchEngine]:
    """What an InProcessCluster opens in place of vLLM."""
    settings = spec.settings
    return nullcontext(InlineEngines(TorchEngine(spec.model.folder, settings.config.max_length, settings.kept_of)))
