"""An engine without a model, for tests and dry runs: a function returns the sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlhf_core.rollout.engine import Request, RolloutEngine, ServedTensor
from rlhf_core.rollout.transport.base import Transport, WeightManifest, take_all
from rlhf_core.types import Completion

# (prompt, seed of the request, or None when greedy) -> completion tokens
Script = Callable[[Sequence[int], int | None], Sequence[int]]


class ScriptedEngine(RolloutEngine):
    """An engine that truncates the script's tokens at the first stop token, max_tokens or max_length.

    Every token has the log-prob `logprob`. `loaded` has (transport, version) of each load.
    """

    def __init__(self, script: Script, *, max_length: int = 1024, logprob: float = -1.0) -> None:
        self._script = script
        self._max_length = max_length
        self._logprob = logprob
        self._version = 0
        self.loaded: list[tuple[Transport, int]] = []

    @property
    def weight_version(self) -> int:
        return self._version

    def generate(self, requests: Sequence[Request], *, keep_prefixes: bool = False) -> list[Completion]:
        for index, request in enumerate(requests):
            length, most = len(request.prompt), self._max_length - 1
            if not 0 < length <= most:
                raise ValueError(f"prompt {index} has {length} tokens; it takes 1 to {most} (max_length)")
        return [self._completion(request) for request in requests]

    def _completion(self, request: Request) -> Completion:
        room = min(request.parameters.max_tokens, self._max_length - len(request.prompt))
        tokens: list[int] = []
        for token in self._script(request.prompt, request.seed):
            if len(tokens) == room:
                break
            tokens.append(token)
            if token in request.parameters.stop_token_ids:
                return Completion(tokens, [self._logprob] * len(tokens), "stop", self._version)
        return Completion(tokens, [self._logprob] * len(tokens), "length", self._version)

    def load_weights(self, transport: Transport, manifest: WeightManifest) -> None:
        take_all(transport.receive(manifest))
        self.loaded.append((transport, manifest.version))
        self._version = manifest.version

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[0.0, *[self._logprob] * (len(sequence) - 1)] for sequence in sequences]

    def served(self) -> tuple[ServedTensor, ...]:
        return ()
