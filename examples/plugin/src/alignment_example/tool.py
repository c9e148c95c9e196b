"""A kind of tools: a number is added to the policy's, in the process of the stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from rlhf_core.config.environments.tools import ToolConfig, ToolEntry
from rlhf_core.contract import StageContext
from rlhf_core.environments.tools.toolset import ToolResult, Toolset


class AdderConfig(ToolConfig):
    type: Literal["adder"]
    amount: int = Field(default=1, ge=0, le=9, description="that is added")


class Adder(Toolset):
    schemas: Sequence[Mapping[str, Any]] = [
        {
            "type": "function",
            "function": {
                "name": "add",
                "description": "Adds to a number.",
                "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
            },
        }
    ]

    @classmethod
    def of(cls, config: AdderConfig, context: StageContext) -> Adder:
        return cls(config.amount)

    def __init__(self, amount: int) -> None:
        self.amount = amount

    def new(self) -> Adding:
        return Adding(self.amount)

    def close(self) -> None: ...


class Adding:
    def __init__(self, amount: int) -> None:
        self._amount = amount

    async def reset(self, row: Mapping[str, Any], seed: int) -> None: ...

    async def call(self, name: str, arguments: Any) -> ToolResult:
        if not isinstance(arguments.get("number"), int):
            return ToolResult("Error: a number is missing", "wrong_arguments")
        return ToolResult(str(arguments["number"] + self._amount))

    def close(self) -> None: ...


ADDER = ToolEntry(AdderConfig, "alignment_example.tool:Adder")
