"""vLLM in this process: tokens in, tokens out, with the log-probs of the sampled tokens."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch

from rlhf_core.config.engines.rollout import VllmEngineConfig
from rlhf_core.errors import WeightSyncError, reason_of
from rlhf_core.models.folders.vision_models import VISION_MODELS, reads_images
from rlhf_core.models.safetensors_file import read_shapes
from rlhf_core.models.weights import require_fit
from rlhf_core.rollout.engine import EngineSettings, Progress, Refused, Request, RolloutEngine, ServedTensor
from rlhf_core.rollout.shards import joined
from rlhf_core.rollout.transport.base import Transport, WeightManifest
from rlhf_core.rollout.vllm.adapters import load_adapter
from rlhf_core.rollout.vllm.outputs import KeptIn, Partial, chosen
from rlhf_core.rollout.vllm.prompts import prompt_of, require_same_prompt
from rlhf_core.rollout.vllm.settings import engine_arguments, kept_in
from rlhf_core.types import Completion

_ADVANCE_SECONDS = 0.1  # after which `advance` returns to accept more requests; a call costs a few milliseconds
_NO_GRAMMAR = "vLLM cannot make a grammar of the JSON schema"
SleepState = Literal["awake", "asleep", "awake without weights", "awake without cache"]


class VllmEngine(RolloutEngine):
    """One vLLM engine over the GPUs of this process, or its CPU cores.

    With `lora` the base weights stay those of `folder`, and each published version is a new adapter. The process must
    not train: vLLM keeps process-wide state, and destroys the process group at shutdown.
    """

    def __init__(self, folder: Path, settings: EngineSettings) -> None:
        """Start the engine with the weights in `folder` as version 0.

        With `settings.sleeps`, `sleep` frees the device; on CPU it frees the cache, and always keeps the weights.
        Raises ValueError if the model cannot be served with these settings, StageError if the weights in `folder` are
        incomplete: vLLM would serve uninitialised memory in a layer that it fuses from several tensors.
        """
        require_fit(folder, "causal")
        self._folder = folder
        assert isinstance(settings.config, VllmEngineConfig)
        self._config = settings.config
        self._lora = settings.lora
        self._version = 0
        self._state: SleepState = "awake"
        self._keeps_weights = True
        self._adapter: Any = None  # the LoRARequest being served
        self._begun: dict[str, tuple[Request, Partial]] = {}  # unfinished requests of `advance`
        self._complete: dict[int, Progress] = {}  # finished since the last `advance`
        model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self._tied = bool(model.get("tie_word_embeddings", False))
        self._image_token: int | None = (
            model[VISION_MODELS[model["model_type"]].image_field] if reads_images(model) else None
        )
        self._most_kept = 0 if settings.kept_of is None else settings.kept_of.top_k
        self._kept_in = None if settings.kept_of is None else kept_in(settings.kept_of, model)
        with _collector_paused():
            arguments = engine_arguments(folder, model, settings)
            from vllm import LLM

            gc.freeze()
            self._set_num_threads = torch.set_num_threads  # on CPU, vLLM replaces it by a no-op
            self._llm: Any = LLM(str(folder), **arguments)
        if self._config.workers_per_engine > 1:
            self._llm.collective_rpc("prepare", args=(self._config.compiled,))
            self.logprobs([[0]])  # vLLM does not report a worker that fails: the start has a deadline
        self._llm.collective_rpc("free_memory")

    @property
    def weight_version(self) -> int:
        return self._version

    def generate(self, requests: Sequence[Request], *, keep_prefixes: bool = False) -> list[Completion]:
        """Return the completion of each request, in order; prompt and completion have at most `max_length` tokens.

        Log-probs are those of the sampling distribution, after temperature, top_p, top_k and min_p; without the last
        three they are the policy's (docs/design/decisions/0008-sampling-and-log-probs.md). A greedy token has its
        log-prob at temperature 1. Raises ValueError for a prompt that is empty or leaves no room.
        """
        parameters = [self._parameters(index, request) for index, request in enumerate(requests)]
        prompts = [prompt_of(request, self._image_token) for request in requests]
        outputs = self._run(prompts, parameters, keep_prefixes=keep_prefixes)
        for request, output in zip(requests, outputs, strict=True):
            require_same_prompt(request, output)
        both = zip(requests, outputs, strict=True)
        return [self._partial(request).add(output.outputs[0], self._version).completion() for request, output in both]

    def advance(self, requests: Mapping[int, Request], *, abandoned: Sequence[int] = ()) -> dict[int, Progress]:
        """Implement RolloutEngine.advance, with prefixes cached until new weights are loaded."""
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind

        self._require("awake")
        deadline = time.monotonic() + _ADVANCE_SECONDS
        self._llm.llm_engine.abort_request([str(number) for number in abandoned])
        for number in abandoned:
            self._begun.pop(str(number), None)
            self._complete.pop(number, None)
        for number, request in requests.items():
            parameters = self._parameters(number, request)
            parameters.output_kind = RequestOutputKind.DELTA  # to know the version of the weights of each token
            prompt = prompt_of(request, self._image_token)
            try:
                self._llm.llm_engine.add_request(str(number), prompt, parameters, lora_request=self._adapter)
            except VLLMClientError as error:
                if request.structure is None:
                    raise
                self._complete[number] = Refused(reason_of(error))  # a program's mistake, which ends no other episode
                continue
            self._begun[str(number)] = request, self._partial(request)
        while self._begun and not self._complete and time.monotonic() < deadline:
            self._step()
        complete, self._complete = self._complete, {}
        streamed = {
            int(number): partial.unfinished() for number, (asked, partial) in self._begun.items() if asked.streams
        }
        return complete | streamed

    def _step(self) -> list[Any]:
        """Run one forward. Returns vLLM's outputs, except those of requests of `advance`, which are recorded."""
        others = []
        with self._eager():
            outputs = self._llm.llm_engine.step()
        for output in outputs:
            begun = self._begun.get(output.request_id)
            if begun is None:
                others.append(output)
                continue
            request, partial = begun
            partial.add(output.outputs[0], self._version)
            if output.finished:
                require_same_prompt(request, output)
                del self._begun[output.request_id]
                failed = request.structure is not None and partial.finish_reason == "error"
                self._complete[int(output.request_id)] = Refused(_NO_GRAMMAR) if failed else partial.completion()
        return others

    def _parameters(self, index: int, request: Request) -> Any:
        """Return vLLM's sampling parameters. Raises ValueError if the prompt leaves no room."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        kept = self._kept_of(request)
        return SamplingParams(
            temperature=request.parameters.temperature,
            top_p=request.parameters.top_p,
            top_k=request.parameters.top_k,
            min_p=request.parameters.min_p,
            max_tokens=min(request.parameters.max_tokens, self._room(index, request.prompt)),
            stop_token_ids=list(request.parameters.stop_token_ids),
            seed=request.seed,
            logprobs=max(request.top_logprobs, 0 if kept is None else kept.returned),
            flat_logprobs=kept is not None,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            structured_outputs=None if request.structure is None else StructuredOutputsParams(json=request.structure),
        )

    def _kept_of(self, request: Request) -> KeptIn | None:
        """Return the reader of the tokens that are kept at each position; None if the request's are not returned."""
        parameters = request.parameters
        return self._kept_in if parameters.temperature and 0 < parameters.top_k <= self._most_kept else None

    def _partial(self, request: Request) -> Partial:
        return Partial(top=request.top_logprobs, kept_in=self._kept_of(request))

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log p(token t | tokens < t) of the raw logits, per sequence; the first of each is 0.0.

        Raises ValueError for an empty sequence and for one longer than `max_length`.
        """
        from vllm import SamplingParams

        for index, sequence in enumerate(sequences):
            if not 0 < len(sequence) <= self._config.max_length:
                raise ValueError(
                    f"sequence {index} has {len(sequence)} tokens; the engine scores 1 to {self._config.max_length}"
                )
        scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        # vLLM neither caches nor reuses prefixes of scored prompts.
        prompts = [{"prompt_token_ids": list(sequence)} for sequence in sequences]
        outputs = self._run(prompts, [scored] * len(sequences), keep_prefixes=True)
        return [
            [0.0, *chosen(sequence[1:], output.prompt_logprobs[1:])]
            for sequence, output in zip(sequences, outputs, strict=True)
        ]

    def _room(self, index: int, prompt: Sequence[int]) -> int:
        if not prompt:
            raise ValueError(f"prompt {index} is empty")
        room = self._config.max_length - len(prompt)
        if room <= 0:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens and leaves no room for a completion: "
                f"prompt and completion together have at most {self._config.max_length} (max_length)"
            )
        return room

    def _run(self, prompts: list[Any], parameters: list[Any], *, keep_prefixes: bool = False) -> list[Any]:
        """Return vLLM's finished outputs, in order. prompts, parameters: vLLM's, one of each per request."""
        self._require("awake")
        if not keep_prefixes:
            self._require_idle()
            # A prefix cached by an earlier call splits the forward differently, which changes rounding; without it, the
            # same call gives the same completions. Within this call, completions of one prompt still share their
            # prefix.
            self.forget()
        for index, prompt in enumerate(prompts):
            self._llm.llm_engine.add_request(f"call {index}", prompt, parameters[index], lora_request=self._adapter)
        outputs: dict[str, Any] = {}
        while len(outputs) < len(prompts):
            outputs |= {output.request_id: output for output in self._step() if output.finished}
        return [outputs[f"call {index}"] for index in range(len(prompts))]

    def abandon(self) -> None:
        self.advance({}, abandoned=[*map(int, self._begun), *self._complete])
        self.forget()

    def forget(self) -> None:
        """Drop the prefix and image caches; unfinished requests of `advance` are computed again."""
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not forget what it has computed")
        if self._image_token is not None:
            self._llm.llm_engine.engine_core.reset_encoder_cache()
        self._llm.collective_rpc("free_memory")

    @contextmanager
    def _eager(self) -> Iterator[None]:
        """Disable compilation unless configured: vLLM compiles a rank count even under enforce_eager, in 2-16 s."""
        with nullcontext() if self._config.compiled else torch.compiler.set_stance("force_eager"):
            yield

    def load_weights(self, transport: Transport, manifest: WeightManifest) -> None:
        """Serve the weights from `transport`, whose folder may be removed afterwards.

        Unfinished requests of `advance` continue with them, after their previous tokens are computed again.
        Raises WeightSyncError unless names and shapes are those of the model that this engine was started with.
        """
        self._require("awake", "awake without weights", "awake without cache")
        if self._lora is not None:
            self._require_idle()  # vLLM would continue a completion with its first adapter
            self._adapter = load_adapter(self._llm, self._adapter, self._lora, transport, manifest)
        else:
            self._check_tensors(manifest)
            self._llm.collective_rpc("load_published", args=(transport, manifest))
        self.forget()
        self._version = manifest.version
        self._keeps_weights = True
        if self._state == "awake without weights":
            self._state = "awake"

    def _check_tensors(self, manifest: WeightManifest) -> None:
        # vLLM only logs tensors missing from a publish, and keeps the old ones.
        version, expected, published = manifest.version, read_shapes(self._folder), dict(manifest.shapes)
        if self._tied:
            expected.pop("lm_head.weight", None)
            published.pop("lm_head.weight", None)
        for name in manifest.unchanged:
            expected.pop(name, None)
        wrong = sorted(name for name in expected.keys() | published.keys() if expected.get(name) != published.get(name))
        if wrong:
            few = ", ".join(f"{n} (engine {expected.get(n)}, published {published.get(n)})" for n in wrong[:5])
            raise WeightSyncError(f"version {version} does not fit the engine's model in {len(wrong)} tensors: {few}")

    def served(self) -> tuple[ServedTensor, ...]:
        """Read back the weights that vLLM computes with; with `lora` the adapter's, if one was published.

        Packed weights are read in full for every version that `read_back_every` divides, for others a few columns of
        each. Layers that are quantised, or of an unknown layout, cannot be read: their digests are of received values.
        Raises WeightSyncError if workers that share a tensor do not have all of it.
        """
        self._require("awake")
        whole = self._version % self._config.read_back_every == 0
        return joined(self._llm.collective_rpc("served_tensors", args=(whole,)))

    def sleep(self, *, keep_weights: bool) -> None:
        """Release the device, except vLLM's own context, and drop cached prefixes.

        keep_weights: in host memory (vLLM's level 1); otherwise they are discarded (level 2), and `load_weights` must
        follow `wake`. An engine with adapters must keep them: no publish includes its base weights.
        """
        self._require("awake")
        if self._lora is not None and not keep_weights:
            raise ValueError("an engine of LoRA adapters must keep its base weights: no publish brings them again")
        self._llm.sleep(level=1 if keep_weights else 2)
        self._llm.collective_rpc("free_memory")
        self._keeps_weights, self._state = keep_weights, "asleep"

    def wake(self, *, cache: bool = True) -> None:
        if not cache:
            self._require("asleep")
            self._llm.wake_up(tags=["weights"])
            self._state = "awake without cache"
            return
        self._require("asleep", "awake without cache")
        # A second call for the memory of weights would map it twice.
        self._llm.wake_up(tags=None if self._state == "asleep" else ["kv_cache"])
        self._state = "awake" if self._keeps_weights else "awake without weights"

    def _require(self, *states: SleepState) -> None:
        if self._state not in states:
            raise RuntimeError(f"the engine is {self._state}; this needs it {' or '.join(states)}")

    def _require_idle(self) -> None:
        if self._begun:
            raise RuntimeError("completions that `advance` has begun are not whole yet")

    def shutdown(self) -> None:
        """Release memory and destroy vLLM's process group. The engine cannot be used afterwards."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        torch.set_num_threads = self._set_num_threads


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause garbage collection, which takes a third of an engine's start: it traverses the modules of vLLM."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
