"""Environments of TRL, for `environment_factory` of GRPOTrainer, played as agents.

Source: the argument's documentation in TRL 1.16. An episode is the loop of its trainer: the policy calls public methods
until a reply has no call.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from rlhf_core.errors import RecipeError, reason_of

_NO_TOOLS = ("reset", "get_reward")
_OVER = ("too_many_calls", "context_length_exceeded")  # codes of limits at which an episode ends as it is


def player(make: Callable[..., Any], options: Mapping[str, Any], name: str) -> Callable[..., Any]:
    """Return an agent that plays an episode in an environment that `make` makes.

    make: a class, or a function that returns an object; called once here, too, as TRL does. Raises RecipeError if it
    has no `reset`, or a method that cannot be a tool.
    """
    from openai import AsyncOpenAI, BadRequestError  # imported once, before episodes fork

    kind = make if isinstance(make, type) else type(make(**options))
    if not callable(getattr(kind, "reset", None)):
        raise RecipeError(f"{name} has no method `reset`, which TRL calls with the columns of the row")
    schemas: list[Any] = [_schema(method, f"{name}.{method.__name__}") for method in _methods(kind)]

    async def play(row: Mapping[str, Any], base_url: str, api_key: str) -> Any:
        environment = make(**options)
        messages = _prompt(row["prompt"], await _awaited(_called_with(environment.reset, row)), name)
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=None) as client:
            while True:
                try:
                    reply = await client.chat.completions.create(model="policy", messages=messages, tools=schemas)
                except BadRequestError as error:
                    if error.code not in _OVER or len(messages) == len(row["prompt"]):
                        raise
                    break
                message = reply.choices[0].message
                if not message.tool_calls:
                    break
                messages.append(message.model_dump(exclude_none=True))
                messages += [await _result(environment, call) for call in message.tool_calls]
        return await _awaited(environment.get_reward()) if hasattr(environment, "get_reward") else 0.0

    return play


def _methods(kind: type) -> list[Callable[..., Any]]:
    found = inspect.getmembers(kind, inspect.isfunction)
    return [method for name, method in found if not name.startswith("_") and name not in _NO_TOOLS]


def _schema(method: Callable[..., Any], name: str) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema: dict[str, Any] = get_json_schema(method)
    except Exception as error:  # of its docstring and annotations; of several types of transformers
        raise RecipeError(f"{name} cannot be a tool: {reason_of(error)}") from error
    return schema


def _called_with(reset: Callable[..., Any], row: Mapping[str, Any]) -> Any:
    """Call `reset` with the columns of the row, or with those that it names."""
    parameters = inspect.signature(reset).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return reset(**(row if takes_all else {name: value for name, value in row.items() if name in parameters}))


def _prompt(prompt: list[Any], observation: Any, name: str) -> list[Any]:
    """Return the prompt with the text that `reset` returned, which TRL appends to the last message."""
    if observation is None:
        return list(prompt)
    if not isinstance(observation, str):
        raise TypeError(f"{name}.reset returned {type(observation).__name__}, expected text or None")
    *before, last = prompt
    if isinstance(last["content"], str):
        return [*before, {**last, "content": last["content"] + observation}]
    return [*before, {**last, "content": [*last["content"], {"type": "text", "text": observation}]}]


async def _result(environment: Any, call: Any) -> dict[str, Any]:
    """Return the message with the result of a call. An exception is a result that the policy reads."""
    name = call.function.name
    try:
        if name in _NO_TOOLS or name.startswith("_") or not hasattr(type(environment), name):
            raise ValueError(f"Tool {name} not found.")
        result = await _awaited(getattr(environment, name)(**json.loads(call.function.arguments)))
    except Exception as error:  # the policy chose the arguments, so it learns their effect
        result = {"error": str(error)}
    return {"role": "tool", "tool_call_id": call.id, "name": name, "content": str(result)}


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
