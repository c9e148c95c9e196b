"""The process that runs a user's reward function: reads requests and writes replies as lines of JSON.

Started by user_process.py.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import numbers
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from json import dumps  # the user's file may replace those of the module
from pathlib import Path
from threading import Thread
from threading import enumerate as enumerate_threads
from types import ModuleType
from typing import IO, Any

from rlhf_core.errors import RecipeError, RewardError, StageError
from rlhf_core.processes.lines import open_pipes, received
from rlhf_core.processes.program_forms import PROGRAMS, player_of, prepare
from rlhf_core.processes.reward_forms import adapted
from rlhf_core.processes.user_code import (
    check_function,
    check_maker,
    check_no_threads,
    function_of,
    run_file,
    user_error,
    why_unfit,
)


def main() -> None:
    requests, replies = open_pipes()
    _serve(received(requests), replies)


def _serve(requests: Iterator[Any], replies: IO[str]) -> None:
    """Serve requests: a function to load from a file, which is run once, or arguments for the function loaded last."""
    modules: dict[str, ModuleType] = {}
    threads: list[Thread] = []  # before any file was run
    call: Callable[[list[Any]], dict[str, Any]] | None = None
    pid = os.getpid()

    def reply(content: Mapping[str, Any]) -> None:
        if os.getpid() != pid:
            os._exit(0)  # a fork that the user's code has made and returned from: each request has one reply
        replies.write(dumps(content) + "\n")
        replies.flush()

    with asyncio.Runner() as runner:  # one event loop for all calls, as clients that a function keeps need it
        for request in requests:
            if "batch" in request and call is not None:
                reply(call(request["batch"]))
                continue
            threads = threads or enumerate_threads()
            try:
                call = _loaded(request, modules, threads, runner)
            except (RecipeError, StageError) as error:
                reply({"error": str(error), "error_type": type(error).__name__})
            else:
                reply({"ready": True})


def _loaded(
    request: Mapping[str, Any], modules: dict[str, ModuleType], threads: Collection[Thread], runner: asyncio.Runner
) -> Callable[[list[Any]], dict[str, Any]]:
    file, name, shown = request["file"], request["function"], request["shown"]
    parameters, options = request["parameters"], request["options"]
    check_function(Path(file), name, shown)
    if file not in modules:
        prepare(request["kind"], request["form"])
        try:
            modules[file] = run_file(Path(file), shown)
        except KeyboardInterrupt as error:  # of the file's own: Ctrl-C does not reach this process
            raise StageError(f"{shown}: loading this file failed: {user_error(error)}") from error
    function = function_of(modules[file], name, shown)
    if request["kind"] not in ("function", "source"):
        check_no_threads(threads, shown)  # its episodes are forks
    if request["kind"] == "environment":
        check_maker(function, options, f"{shown}:{name}")
    elif request["kind"] == "tool":
        from rlhf_core.processes.tool_functions import tools_of  # loads Pydantic

        tools_of(function, options, f"{shown}:{name}")
    elif request["kind"] == "program" and request["form"] in PROGRAMS:
        player_of(request["form"], function, options, f"{shown}:{name}")
        check_no_threads(threads, shown)
    elif request["form"] != "alignment":
        _check_returns(function, f"{shown}:{name}")
        function, options = adapted(function, request["form"], options, f"{shown}:{name}"), {}
    else:
        check_signature(function, parameters, options, f"{shown}:{name}")
    if request["kind"] == "source" and inspect.iscoroutinefunction(inspect.unwrap(function)):
        raise RecipeError(f"{shown}:{name} is `async`: it must return the rows itself")
    return lambda batch: _answer(function, {**dict(zip(parameters, batch, strict=True)), **options}, runner)


def check_signature(
    function: Callable[..., Any], parameters: Sequence[str], options: Mapping[str, Any], name: str
) -> None:
    """Raise RecipeError unless `function` can be called with `parameters` and `options`, all by name."""
    _check_returns(function, name)
    try:
        inspect.signature(function).bind(**dict.fromkeys(parameters), **options)
    except (TypeError, ValueError) as error:
        takes = f"({', '.join(parameters)})" if parameters else "no arguments"
        others = f" and its options {sorted(options)}" if options else ""
        hint = ""
        if "rows" in parameters:
            hint = "; columns of the data are in `rows`, as rows[i]['answer'], or as arguments with `form: trl`"
        raise RecipeError(f"{name} must take {takes}{others}, by these names: {why_unfit(error)}{hint}") from error


def _check_returns(function: Callable[..., Any], name: str) -> None:
    """Raise RecipeError for a class, whose call makes an object, and for a generator function."""
    if isinstance(function, type):
        raise RecipeError(f"{name} is a class: give a function, or an object that can be called")
    if _is_generator(function):
        raise RecipeError(f"{name} is a generator, because it has a `yield`: collect the values and return a list")


def _is_generator(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    code = inspect.unwrap(function)
    return inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code)


def _answer(function: Callable[..., Any], arguments: Mapping[str, Any], runner: asyncio.Runner) -> dict[str, Any]:
    try:
        returned = function(**arguments)
        if inspect.isawaitable(returned):
            returned = runner.run(_awaited(returned))
        values = [_plain(value) for value in _listed(returned)] if _is_sequence(returned) else None
    except RewardError as error:  # of its form: the rows or the result do not fit
        return {"error": str(error), "error_type": "RewardError"}
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # the user's code may raise anything
        return {"error": user_error(error)}
    return {"values": values, "type": type(returned).__name__}


async def _awaited(value: Any) -> Any:
    return await value


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple) or hasattr(value, "tolist")


def _listed(value: Any) -> list[Any]:
    listed = value.tolist() if hasattr(value, "tolist") else list(value)
    return listed if isinstance(listed, list) else [listed]


def _plain(value: Any) -> Any:
    """Convert numbers of numpy and torch to Python's. Other values are kept; the parent rejects them by name."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        listed = value.tolist()
        return repr(listed) if hasattr(listed, "tolist") else _plain(listed)
    return float(value) if isinstance(value, numbers.Real | Decimal) else repr(value)


if __name__ == "__main__":
    main()
