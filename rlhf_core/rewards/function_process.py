"""The process that runs a user's reward function: reads requests and writes replies as lines of JSON.

Started by function.py.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any

from rlhf_core.data.user_code import load_function
from rlhf_core.errors import RecipeError, StageError


def main() -> None:
    # Output of the user's code goes to the log; the pipe carries only replies.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as replies:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        _serve(sys.stdin, replies)


def _serve(requests: IO[str], replies: IO[str]) -> None:
    opening = json.loads(requests.readline())
    options = opening["options"]
    try:
        function = load_function(Path(opening["file"]), opening["function"], opening["shown"])
        _check_signature(function, options, f"{opening['shown']}:{opening['function']}")
    except (RecipeError, StageError) as error:
        _reply(replies, {"error": str(error), "error_type": type(error).__name__})
        return
    _reply(replies, {"ready": True})
    for line in _lines(requests):
        _reply(replies, _answer(function, json.loads(line)["batch"], options))


def _lines(requests: IO[str]) -> Iterator[str]:
    """Ends this process when its parent has died, even while the user's function runs, which may never return."""
    lines: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in requests:
            lines.put(line)
        os._exit(1)

    Thread(target=read, daemon=True).start()
    while True:
        yield lines.get()


def _check_signature(function: Callable[..., Any], options: Mapping[str, Any], name: str) -> None:
    try:
        inspect.signature(function).bind([], [], [], **options)
    except TypeError as error:
        parameters = f"(completions, prompts, rows) and its options {sorted(options)}"
        raise RecipeError(f"{name} must take {parameters}: {error}") from error


def _answer(function: Callable[..., Any], batch: list[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    try:
        returned = function(*batch, **options)
        values = [_plain(value) for value in _listed(returned)] if _is_sequence(returned) else None
    except Exception:  # the user's code may raise anything; its traceback is shown unchanged
        return {"error": traceback.format_exc()}
    return {"values": values, "type": type(returned).__name__}


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple) or hasattr(value, "tolist")


def _listed(value: Any) -> list[Any]:
    listed = value.tolist() if hasattr(value, "tolist") else list(value)
    return listed if isinstance(listed, list) else [listed]


def _plain(value: Any) -> Any:
    """Converts numbers of numpy and torch to Python's. Other values are kept, and rejected by name in the parent."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return repr(value)


def _reply(replies: IO[str], reply: Mapping[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
