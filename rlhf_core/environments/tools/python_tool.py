"""The tool `python`: each call runs a piece of code in a fresh, confined interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.config.environments.tools import PythonTool
from rlhf_core.contract import StageContext
from rlhf_core.environments.tools.toolset import EpisodeTools, ToolResult, Toolset
from rlhf_core.processes.keeper import MOST_FILE_BYTES, MOST_FILES
from rlhf_core.processes.sandbox import Sandbox
from rlhf_core.processes.sandbox_process import MOST_OUTPUT

SCHEMA = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs Python code in a fresh interpreter, and returns what it prints and the value of its last "
        "line, if that is an expression.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "the code"}},
            "required": ["code"],
            "additionalProperties": False,
        },
    },
}


class PythonTools(Toolset):
    schemas = (SCHEMA,)

    @classmethod
    def of(cls, config: PythonTool, context: StageContext) -> PythonTools:
        return cls(config)

    def __init__(self, config: PythonTool) -> None:
        """Start the sandbox. Raises StageError if this node cannot confine the code."""
        self._seconds = config.timeout_seconds
        self._sandbox = Sandbox(config.timeout_seconds, config.memory_gib, config.modules)

    def new(self) -> EpisodeTools:
        return _Calls(self._sandbox, self._seconds)

    def close(self) -> None:
        self._sandbox.close()


class _Calls:
    """The calls of one episode. No state is kept between them."""

    def __init__(self, sandbox: Sandbox, seconds: float) -> None:
        self._sandbox = sandbox
        self._stopped = {
            "time": f"it ran longer than {seconds:g} s",
            "output": f"it printed more than {MOST_OUTPUT // 1024} KiB",
            "files": f"it wrote more than {MOST_FILE_BYTES // 2**20} MiB or {MOST_FILES} files, or too deep folders",
        }

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:
        return None

    async def call(self, name: str, arguments: Any) -> ToolResult:
        if not isinstance(arguments, dict) or arguments.keys() != {"code"} or not isinstance(arguments["code"], str):
            return ToolResult("Error: the arguments must be {code: text}", "wrong_arguments")
        ran = await self._sandbox.run(arguments["code"])
        why = self._stopped.get(ran.stopped, "")
        if ran.status < 0 and not why:
            why = f"its process was ended by signal {-ran.status}"
        text = ran.output.removesuffix("\n")
        if why:
            text = f"{text}\n[stopped: {why}]".lstrip("\n")
        return ToolResult(text or "[no output]", "tool_errors" if why or ran.status else None)

    def close(self) -> None:
        return None
