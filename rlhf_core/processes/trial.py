"""One function call in a process of its own with limits of memory and time: the call may hang, or grow."""

from __future__ import annotations

import json
import resource
import subprocess
from collections.abc import Callable
from contextlib import closing
from importlib import import_module
from typing import ParamSpec, TypeVar

from rlhf_core.errors import StageError, reason_of
from rlhf_core.processes.lines import LineProcess, ProcessError, open_pipes, received

P = ParamSpec("P")
R = TypeVar("R")


def tried(seconds: float, memory: int, function: Callable[P, R], /, *arguments: P.args, **named: P.kwargs) -> R:
    """Call a module's `function(*arguments, **named)` in the process. Arguments and result are JSON values.

    memory: bytes of data; libraries reserve more addresses than they use. Raises StageError with the text of the
    function's own; MemoryError or TimeoutError at a limit; ProcessError, with the reason, for any other failure.
    """
    request = {
        "memory": memory, "module": function.__module__, "function": function.__name__,
        "arguments": arguments, "named": named,
    }  # fmt: skip
    with closing(LineProcess(["-m", "rlhf_core.processes.trial"], log=subprocess.DEVNULL)) as process:
        reply = process.exchange(request, seconds)
    match reply:
        case {"refused": text}:
            raise StageError(text)
        case {"failed": text}:
            raise ProcessError(text)
        case {"needs": "memory"}:
            raise MemoryError
    value: R = reply["value"]
    return value


def main() -> None:
    requests, replies = open_pipes()
    request = next(received(requests))
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = request["memory"] if most == resource.RLIM_INFINITY else min(request["memory"], most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    try:
        function = getattr(import_module(request["module"]), request["function"])
        reply = json.dumps({"value": function(*request["arguments"], **request["named"])})
    except MemoryError:
        reply = '{"needs": "memory"}'
    except StageError as error:
        reply = json.dumps({"refused": str(error)})
    except Exception as error:  # the question is a program, too
        reply = json.dumps({"failed": f"raised {type(error).__name__}: {reason_of(error)}"})
    print(reply, file=replies, flush=True)


if __name__ == "__main__":
    main()
