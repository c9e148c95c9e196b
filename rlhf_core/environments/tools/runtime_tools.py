"""The tools `bash` and `edit`, which work in a runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.config.environments.tools import BashTool
from rlhf_core.contract import StageContext
from rlhf_core.environments.tools.toolset import EpisodeTools, ToolResult, Toolset
from rlhf_core.runtimes import Image, Ran, Runtime, RuntimeHost, open_runtimes


def _schema(name: str, description: str, **parameters: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string", "description": text} for key, text in parameters.items()},
                "required": [*parameters],
                "additionalProperties": False,
            },
        },
    }


BASH = _schema(
    "bash",
    "Runs a command of bash, and returns its output. Files are kept for the next command, processes are not.",
    command="the command",
)
EDIT = _schema(
    "edit",
    "Replaces a text, which must occur exactly once, in a file. An empty `old` writes a new file.",
    path="the file",
    old="the text to replace",
    new="the text that replaces it",
)


def runtime_schemas(*, edits: bool) -> Sequence[Mapping[str, Any]]:
    return (BASH, EDIT) if edits else (BASH,)


class RuntimeTools(Toolset):
    @classmethod
    def of(cls, config: BashTool, context: StageContext) -> RuntimeTools:
        return cls(config)

    def __init__(self, config: BashTool) -> None:
        """Raises StageError if this node cannot start runtimes."""
        self.schemas = runtime_schemas(edits=config.edits)
        self._seconds = config.timeout_seconds
        self._runtimes = open_runtimes(config.runtime)

    def new(self) -> EpisodeTools:
        return _EpisodeRuntime(self._runtimes, self._seconds)

    def close(self) -> None:
        self._runtimes.close()


class _EpisodeRuntime:
    """The tools in the runtime of one episode."""

    def __init__(self, runtimes: RuntimeHost, seconds: float) -> None:
        self._runtimes, self._seconds = runtimes, seconds
        self._calls: RuntimeCalls | None = None

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:
        self._calls = RuntimeCalls(await self._runtimes.start(Image()), self._seconds)

    async def call(self, name: str, arguments: Any) -> ToolResult:
        assert self._calls is not None
        return await self._calls.call(name, arguments)

    def close(self) -> None:
        if self._calls is not None:
            self._calls.close()


class RuntimeCalls:
    """Calls in a started runtime, which it takes over."""

    def __init__(self, runtime: Runtime, seconds: float) -> None:
        """seconds: time limit of a command."""
        self.runtime = runtime
        self._seconds = seconds

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:
        return None

    async def call(self, name: str, arguments: Any) -> ToolResult:
        required = (BASH if name == "bash" else EDIT)["function"]["parameters"]["required"]
        if (
            not isinstance(arguments, dict)
            or arguments.keys() != set(required)
            or not all(isinstance(value, str) for value in arguments.values())
        ):
            return ToolResult(f"Error: the arguments must be {{{', '.join(required)}}}, all text", "wrong_arguments")
        if name == "bash":
            return self._result(await self.runtime.run(arguments["command"], self._seconds))
        return await self._edited(**arguments)

    def close(self) -> None:
        self.runtime.stop()

    def _result(self, ran: Ran) -> ToolResult:
        stopped = {
            "time": f"[stopped: it ran longer than {self._seconds:g} s]",
            "memory": "[stopped: it took too much memory]",
            "files": "[stopped: it wrote too many or too large files]",
        }
        status = f"[exit status {ran.status}]" if ran.status else ""
        parts = (
            ran.output.removesuffix("\n"),
            "[there was more output]" if ran.cut else "",
            stopped.get(ran.stopped, status),
        )
        text = "\n".join(part for part in parts if part)
        return ToolResult(text or "[no output]", "tool_errors" if ran.status or ran.stopped else None)

    async def _edited(self, path: str, old: str, new: str) -> ToolResult:
        content = await self.runtime.read(path) if "\0" not in path and path.strip("/") else None
        if old and content is None:
            return ToolResult(f"Error: there is no file {path[:200]}", "tool_errors")
        if not old and content is not None:
            return ToolResult(
                f"Error: {path[:200]} is there already, and an empty `old` writes a new file", "tool_errors"
            )
        if old and content is not None:
            if (count := content.count(old.encode())) != 1:
                return ToolResult(f"Error: `old` occurs {count} times in {path[:200]}, not once", "tool_errors")
            new_content = content.replace(old.encode(), new.encode())
        else:
            new_content = new.encode()
        await self.runtime.write({path: new_content})
        return ToolResult(f"{path[:200]} is written")
