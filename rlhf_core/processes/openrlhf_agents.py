"""Agents of OpenRLHF, played as executors: `AgentExecutor` and `AgentInstance` of a file for `--train.agent_func_path`.

Sources: `openrlhf/utils/agent.py` of OpenRLHF 0.11 and its page "Agent-based Training". The package needs CUDA, so that
this file stands in for the modules that such a file imports.
"""

from __future__ import annotations

import inspect
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from rlhf_core.errors import RecipeError
from rlhf_core.processes.engine_handle import EngineHandle, RefusedCallError, Reply
from rlhf_core.processes.user_code import why_unfit

_ARGUMENTS = ("prompt", "label", "sampling_params", "max_length", "hf_tokenizer", "llm_engine")
_OVER = ("too_many_calls", "context_length_exceeded")  # codes of limits at which an episode ends as it is
# Settings of vLLM that change the distribution, which is the run's, with the values that do not.
_UNCHANGED: Mapping[str, Sequence[Any]] = {
    "top_k": (None, -1, 0), "min_p": (None, 0.0), "n": (None, 1),
    "presence_penalty": (None, 0.0), "frequency_penalty": (None, 0.0), "repetition_penalty": (None, 1.0),
}  # fmt: skip


class AgentExecutorBase(ABC):
    """Base of executors, which play an episode in `execute`."""

    @abstractmethod
    async def execute(
        self, prompt: str, label: Any, sampling_params: Any, max_length: int, hf_tokenizer: Any, llm_engine: Any
    ) -> Any:
        """Return {observation_tokens, action_ranges, reward}, or a list of these."""


class AgentInstanceBase(ABC):
    """Base of environments: `reset` starts an episode, `step` responds to a reply."""

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return states

    @abstractmethod
    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]: ...


class MultiTurnAgentExecutor(AgentExecutorBase):
    """An executor that alternates replies with `step` of an AgentInstance, made for each episode."""

    def __init__(self, agent_instance_cls: Any, **options: Any) -> None:
        """options: of the class, a setting that OpenRLHF does not have."""
        self.agent_instance_cls, self._options = agent_instance_cls, options

    async def execute(
        self, prompt: str, label: Any, sampling_params: Any, max_length: int, hf_tokenizer: Any, llm_engine: Any
    ) -> dict[str, Any]:
        agent = await _made(self.agent_instance_cls, self._options)
        text = (await _awaited(agent.reset({"observation": prompt, "label": label})))["observation"]
        tokens = hf_tokenizer.encode(text, add_special_tokens=False)
        ranges: list[tuple[int, int]] = []
        result: dict[str, Any] = {"reward": 0.0, "extra_logs": {}}
        while True:
            try:
                reply = (await llm_engine.generate(tokens, sampling_params)).outputs[0]
            except RefusedCallError as error:
                if not ranges or error.code not in _OVER:
                    raise
                break
            ranges.append((len(tokens), len(tokens) + len(reply.token_ids)))
            written = hf_tokenizer.decode(reply.token_ids)
            answer = await _awaited(
                agent.step({
                    "observation_text": text, "action_text": written, "label": label, "sampling_params": sampling_params
                })
            )  # fmt: skip
            result["reward"] += _number(answer["rewards"])
            result |= {"extra_logs": answer.get("extra_logs") or {}, "scores": answer.get("scores")}
            feedback = answer["environment_feedback"]
            text += written + feedback
            tokens = [*tokens, *reply.token_ids, *hf_tokenizer.encode(feedback, add_special_tokens=False)]
            sampling_params = answer.get("sampling_params") or sampling_params
            if answer["done"]:
                break
        return {**result, "observation_tokens": tokens, "action_ranges": ranges}


@dataclass
class SamplingParams:
    """`sampling_params` of an episode. An agent may change `max_tokens`, `stop` and `temperature`."""

    temperature: float
    max_tokens: int | None = None  # none: the most that the limits allow
    stop: list[str] | None = None
    logprobs: int | None = 1


@dataclass(frozen=True)
class _Logprob:
    logprob: float


@dataclass(frozen=True)
class _Completion:
    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[dict[int, _Logprob]]


@dataclass(frozen=True)
class _RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[_Completion]


@dataclass
class _Engine:
    """`llm_engine`: `generate` as OpenRLHF's, on tokens. Keeps its replies with the tokens before them."""

    handle: EngineHandle
    limits: Mapping[str, Any]
    replies: list[tuple[list[int], Reply]] = field(default_factory=list)

    async def generate(self, prompt_token_ids: Sequence[int], sampling_params: Any) -> _RequestOutput:
        given = {name: getattr(sampling_params, name, None) for name in _UNCHANGED}
        if changed := [name for name, value in given.items() if value not in _UNCHANGED[name]]:
            raise ValueError(
                f"sampling_params.{changed[0]} is {given[changed[0]]!r}: the run trains on the log-probs of its own "
                "`sampling`; change `max_tokens`, `stop`, `temperature` and `top_p` alone"
            )
        asked, most = sampling_params.max_tokens, self.limits["max_tokens"]
        stop = getattr(sampling_params, "stop", None) or ()
        reply = await self.handle.generate(
            prompt_token_ids, max_tokens=None if asked is None else min(asked, most),
            stop=[stop] if isinstance(stop, str) else stop,
            temperature=getattr(sampling_params, "temperature", None), top_p=getattr(sampling_params, "top_p", None),
        )  # fmt: skip
        self.replies.append((list(prompt_token_ids), reply))
        pairs = zip(reply.token_ids, reply.logprobs, strict=True)
        logprobs = [{token: _Logprob(value)} for token, value in pairs]
        completion = _Completion(list(reply.token_ids), reply.text, reply.finish_reason, logprobs)
        return _RequestOutput(list(prompt_token_ids), [completion])


class _Encoded(dict[str, Any]):
    @property
    def input_ids(self) -> Any:
        return self["input_ids"]


class _Tokenizer:
    """`hf_tokenizer`: the policy's, which is not in this process."""

    def __init__(self, handle: EngineHandle, as_tensor: Callable[[Any], Any]) -> None:
        """as_tensor: returns a tensor of lists."""
        self._handle, self._as_tensor = handle, as_tensor

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, return_tensors: str | None = None
    ) -> Mapping[str, Any]:
        ids: Any = self.encode(text, add_special_tokens=add_special_tokens)
        return _Encoded(input_ids=ids if return_tensors is None else self._as_tensor([ids]))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if add_special_tokens:
            raise ValueError("hf_tokenizer needs add_special_tokens=False: prompts have their special tokens already")
        tokens: list[int] = self._handle.blocking("tokenize", {"text": text})
        return tokens

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        method = "decode" if skip_special_tokens else "write"
        text: str = self._handle.blocking(method, {"token_ids": _listed(token_ids)})
        return text

    def apply_chat_template(
        self, conversation: Sequence[Any], *, tokenize: bool = True, add_generation_prompt: bool = False,
        tools: Sequence[Any] | None = None,
    ) -> Any:  # fmt: skip
        if not add_generation_prompt:
            raise ValueError("hf_tokenizer.apply_chat_template needs add_generation_prompt=True: a reply follows")
        tokens = self._handle.blocking("encode", {"messages": list(conversation), "tools": tools})
        return tokens if tokenize else self.decode(tokens)


def player(make: Any, options: Mapping[str, Any], name: str) -> Callable[..., Any]:
    """Return an executor that plays an episode by OpenRLHF's AgentExecutor, or by its AgentInstance.

    make: the class. Raises RecipeError if it is neither.
    """
    import torch  # once, before episodes fork

    if not isinstance(make, type) or not (hasattr(make, "execute") or hasattr(make, "step")):
        raise RecipeError(f"{name} must be a class with `execute`, as OpenRLHF's AgentExecutor, or with `step`")
    if hasattr(make, "execute"):
        try:
            inspect.signature(make.execute).bind(None, **dict.fromkeys(_ARGUMENTS))
        except (TypeError, ValueError) as error:
            raise RecipeError(f"{name}.execute must take ({', '.join(_ARGUMENTS)}): {why_unfit(error)}") from error

    async def play(engine: EngineHandle, row: Mapping[str, Any]) -> dict[str, Any]:
        executor = make(**options) if hasattr(make, "execute") else MultiTurnAgentExecutor(make, **options)
        limits = await engine.limits()
        llm_engine, tokenizer = _Engine(engine, limits), _Tokenizer(engine, torch.LongTensor)
        prompt = tokenizer.decode(await engine.encode(row["prompt"]))
        returned = await executor.execute(
            prompt=prompt, label=row.get("answer", ""), sampling_params=SamplingParams(limits["temperature"]),
            max_length=limits["max_length"], hf_tokenizer=tokenizer, llm_engine=llm_engine,
        )  # fmt: skip
        return _outcome(returned, llm_engine.replies, name)

    return play


def _outcome(returned: Any, replies: list[tuple[list[int], Reply]], name: str) -> dict[str, Any]:
    """Return reward, score, metrics and sequences of the samples that `execute` has returned. Logs are the first's."""
    samples = returned if isinstance(returned, list | tuple) else [returned]
    left = list(replies)
    rewards = {_number(sample["reward"]) for sample in samples}
    if len(rewards) != 1:
        raise ValueError(f"{name} returned samples with the rewards {sorted(rewards)}: an episode has one")
    reward, first = rewards.pop(), samples[0]
    outcome = {"reward": reward, "sequences": [_segments(sample, left) for sample in samples]}
    outcome["metrics"] = _metrics(first.get("extra_logs") or {}, name)
    score = first.get("scores")
    if score is None or (_number(score) == reward and not 0 <= reward <= 1):  # repeated rewards are no scores
        return outcome
    return outcome | {"score": _number(score)}


def _metrics(logs: Mapping[str, Any], name: str) -> dict[str, float]:
    """Return the numbers of `extra_logs`, which are metrics; others are printed to the log."""
    metrics = {}
    for key, value in logs.items():
        item = value.item() if hasattr(value, "item") else value
        if isinstance(item, int | float):
            metrics[str(key)] = float(item)
        else:
            print(f"{name}: extra_logs has {key} = {value!r}, which is no metric", flush=True)
    return metrics


def _segments(sample: Mapping[str, Any], left: list[tuple[list[int], Reply]]) -> list[Any]:
    """Return the tokens of a sample up to its last reply, with the replies of its ranges, taken from `left`."""
    tokens, segments, at = _listed(sample["observation_tokens"]), list[Any](), 0
    for start, end in sample["action_ranges"]:
        same = [each for each in left if each[0] == tokens[:start] and each[1].token_ids == tokens[start:end]]
        if not same:
            raise ValueError(f"action_ranges has ({start}, {end}), whose tokens the engine did not sample after those")
        left.remove(same[0])
        segments += [tokens[at:start], same[0][1]]
        at = end
    return segments


async def _made(make: Any, options: Mapping[str, Any]) -> Any:
    """Return an object of a class whose `__init__` may be `async`, as in OpenRLHF's documentation."""
    if not inspect.iscoroutinefunction(make.__init__):
        return make(**options)
    made = make.__new__(make)
    await made.__init__(**options)
    return made


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _listed(values: Any) -> list[Any]:
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _number(value: Any) -> float:
    return float(value.item() if hasattr(value, "item") else value)


def stand_in() -> None:
    """Make the modules importable that agents import, with the classes of this file."""
    bases = {each.__name__: each for each in (AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor)}
    contents: Mapping[str, Mapping[str, Any]] = {
        "openrlhf": {}, "openrlhf.utils": {}, "openrlhf.utils.agent": bases,
        "openrlhf.utils.logging_utils": {"init_logger": logging.getLogger},
    }  # fmt: skip
    for name, content in contents.items():
        module = ModuleType(name, "Stands in for OpenRLHF's, for an executor of the form `openrlhf`.")
        module.__path__ = []
        vars(module).update(content)
        sys.modules[name] = module
