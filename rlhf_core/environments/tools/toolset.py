"""Toolsets: tools of one kind, for a stage and for each episode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol


@dataclass(frozen=True, slots=True)
class ToolResult:
    text: str
    # Counted: arguments do not fit the schema, or the tool raised or was stopped.
    problem: Literal["wrong_arguments", "tool_errors"] | None = None


class EpisodeTools(Protocol):
    """The tools of one episode.

    Failures that are not the policy's raise EpisodeError, whose message is the cause alone.
    """

    async def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        """Start the episode. seed: of its random generators."""

    async def call(self, name: str, arguments: Any) -> ToolResult:
        """Call a tool. arguments: JSON, of any type."""

    def close(self) -> None:
        """End the episode. Idempotent."""


class Toolset(ABC):
    schemas: Sequence[Mapping[str, Any]]  # as the OpenAI API has them

    @abstractmethod
    def new(self) -> EpisodeTools: ...

    @abstractmethod
    def close(self) -> None:
        """End all processes and connections that it has started."""
