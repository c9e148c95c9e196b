"""Executors of the user's Python file: functions that play an episode on tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_core.chat.encoding import Tokenizer, decode_completion, decoded
from rlhf_core.config.environments.environments import ExecutorEnvironment
from rlhf_core.contract import StageContext
from rlhf_core.environments.agents.executor_images import ExecutorImages
from rlhf_core.environments.agents.hosted_program import ProcessProgram, ProgramHost
from rlhf_core.environments.agents.program import CallError, CallOptions, Outcome, Policy, outcome_of
from rlhf_core.errors import EpisodeError, StageError
from rlhf_core.processes.hosting import EpisodeProcess


class ExecutorHost(ProgramHost):
    @classmethod
    def of(cls, config: ExecutorEnvironment, context: StageContext, tokenizer: Tokenizer) -> ExecutorHost:
        return cls(config, context.user_file(config.path))

    def new(self) -> Executor:
        return Executor(self)


class Executor(ProcessProgram):
    async def _play(self, process: EpisodeProcess, row: Mapping[str, Any], seed: int, policy: Policy) -> Outcome:
        await process.send({"executor": {"row": dict(row)}, "seed": seed})
        served = _Served(policy, ExecutorImages(policy))
        return outcome_of(await _returned(process, served), ("reward", "sequences", "score", "metrics"))


async def _returned(process: EpisodeProcess, policy: _Served) -> Any:
    """Return the executor's return value; until then, serve its requests concurrently."""
    answers: set[asyncio.Task[None]] = set()
    receiving = asyncio.create_task(process.receive())
    try:
        while True:
            done, _ = await asyncio.wait({receiving, *answers}, return_when=asyncio.FIRST_COMPLETED)
            for answer in done & answers:
                answer.result()  # an invalid request ends the episode
                answers.discard(answer)
            if receiving not in done:
                continue
            message = receiving.result()
            if "value" in message:
                return message["value"]
            answers.add(asyncio.create_task(_answer(process, policy, message)))
            receiving = asyncio.create_task(process.receive())
    finally:
        for task in (receiving, *answers):
            task.cancel()
        await asyncio.gather(receiving, *answers, return_exceptions=True)


async def _answer(process: EpisodeProcess, policy: _Served, message: Mapping[str, Any]) -> None:
    try:
        method, number, arguments = message["ask"], message["number"], message["arguments"]
        answer = {"answer": await policy.answer(method, **arguments)}
    except (CallError, StageError) as error:
        answer = {"refused": str(error), "code": error.code if isinstance(error, CallError) else ""}
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise EpisodeError(f"its request to the policy is invalid: {message!r:.200}") from error
    await process.send({"number": number, **answer})


@dataclass(frozen=True, slots=True)
class _Served:
    """The policy, as the process of one episode calls it."""

    policy: Policy
    images: ExecutorImages

    async def answer(self, method: str, **arguments: Any) -> Any:
        policy = self.policy
        match method:
            case "generate":
                return await self._generated(**arguments)
            case "encode":
                return self.images.encoded(arguments["messages"], arguments["tools"])
            case "tokenize":
                return self.images.tokenized(arguments["text"])
            case "decode":
                return decode_completion(policy.tokenizer, arguments["token_ids"])
            case "write":
                return decoded(policy.tokenizer, arguments["token_ids"])
            case "limits":
                return {name: getattr(policy, name) for name in ("max_length", "max_tokens", "temperature")}
            case _:
                raise EpisodeError(f"it called the policy's method {method!r}, which does not exist")

    async def _generated(self, **arguments: Any) -> dict[str, Any]:
        prompt = arguments["token_ids"]
        call = await self.policy.generate(
            prompt, max_tokens=arguments["max_tokens"], stop=arguments["stop"],
            images=self.images.placed(prompt, arguments["images"]),
            options=CallOptions(temperature=arguments["temperature"], top_p=arguments["top_p"]),
        )  # fmt: skip
        completion = call.completion
        self.images.sampled(completion)
        return {
            "number": call.number, "token_ids": list(completion.token_ids), "logprobs": list(completion.logprobs),
            "finish_reason": completion.finish_reason,
            "text": decode_completion(self.policy.tokenizer, completion.token_ids),
        }  # fmt: skip
