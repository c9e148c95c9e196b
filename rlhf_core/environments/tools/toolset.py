"""What runs the policy's calls: tools of one kind, and those of one episode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol


@dataclass(frozen=True, slots=True)
class ToolResult:
    text: str
    # That is counted: arguments do not fit the schema, or the tool raised or was stopped.
    problem: Literal["wrong_arguments", "tool_errors"] | None = None


class EpisodeTools(Protocol):
    """Of one episode. What is not the policy's fault raises EpisodeError, whose message is the cause alone."""

    async def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        """seed: of its random numbers."""

    async def call(self, name: str, arguments: Any) -> ToolResult:
        """arguments: JSON, of any type."""

    def close(self) -> None:
        """The episode is over. Idempotent."""


class Toolset(ABC):
    schemas: Sequence[Mapping[str, Any]]  # as the OpenAI API has them

    @abstractmethod
    def new(self) -> EpisodeTools: ...

    @abstractmethod
    def close(self) -> None:
        """Ends all that it has started."""
