"""Functions as tools: schemas for the policy, and validation of its arguments."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, Required, get_type_hints

from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError
from typing_extensions import TypedDict

from rlhf_core.errors import RecipeError, reason_of, without_addresses
from rlhf_core.processes.user_code import why_unfit


@dataclass(frozen=True, slots=True)
class ToolFunction:
    schema: dict[str, Any]  # as the OpenAI API has it: {type: function, function: {name, description, parameters}}
    arguments: TypeAdapter[Any]


def tools_of(loaded: Callable[..., Any], options: Mapping[str, Any], name: str) -> dict[str, ToolFunction]:
    """Return the tools of a function, or of a class by its public methods, by name.

    Raises RecipeError if one has no docstring, or parameters without types, or the class does not accept its options.
    """
    if not isinstance(loaded, type):
        if options:
            raise RecipeError(f"{name}: `options` are for a class, and this is a function")
        return {loaded.__name__: _tool(loaded, loaded.__name__, name, bound=True)}
    try:
        inspect.signature(loaded).bind(**options)
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"{name} must take its options {sorted(options)}, by these names: {why_unfit(error)}"
        ) from error
    methods = {
        method: function
        for method, function in inspect.getmembers(loaded, inspect.isfunction)
        if not method.startswith("_") and method != "reset"
    }
    if not methods:
        raise RecipeError(f"{name} has no public method beside `reset`: each is a tool that the policy may call")
    return {method: _tool(function, method, f"{name}.{method}", bound=False) for method, function in methods.items()}


def _tool(function: Callable[..., Any], name: str, shown: str, *, bound: bool) -> ToolFunction:
    description = inspect.getdoc(function)
    if not description:
        raise RecipeError(f"{shown} has no docstring: it tells the policy what the tool does")
    parameters = list(inspect.signature(function).parameters.values())[0 if bound else 1 :]
    try:
        types = get_type_hints(function, include_extras=True)
    except Exception as error:  # an annotation is code, and may raise anything
        raise RecipeError(f"{shown}: its annotations cannot be read: {reason_of(error)}") from error
    fields: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise RecipeError(f"{shown} takes `*{parameter.name}`: a tool is called with arguments by their names")
        if parameter.name not in types:
            raise RecipeError(f"{shown}: its parameter `{parameter.name}` has no type, which the policy needs to know")
        needed = parameter.default is parameter.empty
        of_type = types[parameter.name]
        annotation = of_type if needed else Annotated[of_type, Field(json_schema_extra={"default": parameter.default})]
        fields[parameter.name] = Required[annotation] if needed else NotRequired[annotation]
    typed_dict: Any = TypedDict  # whose fields mypy wants to know
    arguments = typed_dict("Arguments", fields)
    arguments.__pydantic_config__ = ConfigDict(extra="forbid")
    try:
        adapter = TypeAdapter(arguments)
        schema = _untitled(adapter.json_schema())
        json.dumps(schema)
    except (PydanticUserError, PydanticSchemaGenerationError, TypeError) as error:
        raise RecipeError(f"{shown}: its parameters have no JSON schema: {reason_of(error)}") from error
    described = {"name": name, "description": description, "parameters": schema}
    return ToolFunction({"type": "function", "function": described}, adapter)


def _untitled(schema: Any) -> Any:
    """Remove the titles that pydantic derives from names."""
    if isinstance(schema, list):
        return [_untitled(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _untitled(item) for name, item in value.items()} if key == "properties" else _untitled(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
    }


class CalledTools:
    """The tools of one episode, in its process: `reset` with the row, `step` with a call."""

    def __init__(
        self, loaded: Callable[..., Any], options: Mapping[str, Any], tools: Mapping[str, ToolFunction]
    ) -> None:
        self._tools = tools
        self._object = loaded(**options) if isinstance(loaded, type) else None
        self._function = loaded

    async def reset(self, row: Mapping[str, Any]) -> None:
        reset = getattr(self._object, "reset", None)
        if reset is not None and inspect.isawaitable(begun := reset(row)):
            await begun

    async def step(self, call: Mapping[str, Any]) -> dict[str, str]:
        """Return {result: text}, or {wrong: the fault of the arguments}, or {raised: the exception}."""
        name = call["name"]
        try:
            arguments = self._tools[name].arguments.validate_python(call["arguments"])
        except ValidationError as error:
            return {"wrong": "; ".join(f"{_place(e['loc'])}{e['msg']}" for e in error.errors())}
        function = self._function if self._object is None else getattr(self._object, name)
        try:
            result = function(**arguments)
            if inspect.isawaitable(result):
                result = await result
        except Exception as error:  # the policy chose the arguments, so it learns their effect
            return {"raised": f"{type(error).__name__}: {without_addresses(str(error))}"}
        return {"result": result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)}


def _place(location: tuple[int | str, ...]) -> str:
    return f"`{'.'.join(map(str, location))}`: " if location else ""
