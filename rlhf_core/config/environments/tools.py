"""Tools available to the policy. `TOOLS` lists all kinds.

A new kind is a file in rlhf_core/environments, its config class, and one line there.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from rlhf_core.config.base import Config, operational, since_default
from rlhf_core.config.environments.runtimes import RuntimeConfig, SandboxRuntime
from rlhf_core.config.numbers import Characters, GiB, Seconds, Turns
from rlhf_core.config.plugins import Table
from rlhf_core.config.servers import check_url
from rlhf_core.config.texts import HeaderVariable, NonEmpty, Variable, Visible
from rlhf_core.config.typed import TypedConfig
from rlhf_core.config.user_code import UserProgram


class CallsTools(Config):
    """An environment with tool calls."""

    call_marker: Visible | None = Field(
        default=None,
        description="marker text of a call: a reply with it and without a valid call is malformed; none: the parser's "
        "own, if it declares one",
    )
    max_malformed_replies: Turns = Field(
        default=3, description="maximum number of replies with malformed calls; the last one ends the episode"
    )
    max_result_characters: Characters = Field(
        default=4000, description="maximum length of a tool result; longer results are truncated with a notice"
    )


class ToolConfig(TypedConfig):
    """Base of every kind of tools."""

    family: ClassVar[str] = "tool"

    @classmethod
    def table(cls) -> Table[Any]:
        return TOOLS

    @property
    def per_episode(self) -> bool:
        """True if each episode has processes of its own."""
        return False


class FunctionTool(ToolConfig, UserProgram):
    """A function of the user's Python file, or a class whose public methods are tools.

    Parameters are annotated; the docstring describes the tool to the policy. Each episode has a process of its own, and
    an object of the class, which may have `reset(row)`.
    """

    type: Literal["function"]
    function: str = Field(description="name of the function or class in the Python file")
    options: dict[str, Any] = Field(default={}, description="keyword arguments of the class")
    timeout_seconds: Seconds = operational(
        60.0, description="time limit of a call; with a later answer the episode fails"
    )
    memory_gib: GiB = operational(4.0, description="memory limit of an episode beyond what the file has loaded, GiB")

    @property
    def per_episode(self) -> bool:
        return True


class PythonTool(ToolConfig):
    """A tool `python` that runs code and returns its output, and the value of a last expression.

    Each call is a fresh interpreter without network, processes, threads, the job's variables, and files outside of an
    empty folder of its own and the Python installation.
    """

    type: Literal["python"]
    timeout_seconds: Seconds = Field(default=5.0, description="time limit of a run of code")
    memory_gib: GiB = Field(default=0.5, description="memory limit of a run of code beyond `modules`, GiB")
    modules: tuple[str, ...] = Field(
        default=(), description="modules that are preloaded for fast imports, such as sympy"
    )


class BashTool(ToolConfig):
    """A tool `bash` that runs commands in a runtime of the episode, and with `edits` a tool `edit` for its files.

    Files are kept between commands; the processes of a command end with it.
    """

    type: Literal["bash"]
    runtime: RuntimeConfig = Field(default=SandboxRuntime(), description="where commands run")
    timeout_seconds: Seconds = Field(default=30.0, description="time limit of a command, whose processes are killed")
    edits: bool = Field(default=False, description="whether there is a tool `edit`, which replaces a text in a file")

    @property
    def per_episode(self) -> bool:
        return True


class McpTool(ToolConfig):
    """The tools of a server of the Model Context Protocol: a program that speaks it by standard input and output, or a
    server with a URL, which speaks it by streamable HTTP.

    Its tools are looked up when the run is planned, and are part of the stage's key.
    """

    type: Literal["mcp"]
    command: tuple[NonEmpty, ...] = Field(
        default=(),
        description="the program and its arguments, such as [python, server.py]; it runs in a folder with `files`",
    )
    url: str | None = since_default(None, description="URL of a server that runs already, in place of a program")
    header_variable: HeaderVariable | None = since_default(
        None,
        description="with `url`: environment variable `ALIGNMENT_HEADER_…` with a header to send, as `Authorization: "
        "Bearer abc`",
    )
    files: tuple[NonEmpty, ...] = Field(
        default=(), description="the user's files that it needs; relative paths start at the recipe's folder"
    )
    only: tuple[NonEmpty, ...] = Field(default=(), description="its tools that the policy may call; none: all")
    shared: bool = Field(
        default=False,
        description="one server for all episodes, which must keep them apart itself; false: each starts one, or "
        "has a session of its own at `url`",
    )
    variables: tuple[Variable, ...] = operational(
        (), description="environment variables used by it, such as one with a token"
    )
    start_seconds: Seconds = operational(30.0, description="time limit in which it must have listed its tools")
    timeout_seconds: Seconds = operational(
        60.0, description="time limit of a call; with a later answer the episode fails"
    )

    @model_validator(mode="after")
    def _program_or_url(self) -> McpTool:
        if bool(self.command) == (self.url is not None):
            raise ValueError("give either `command` or `url`")
        if self.url is not None:
            check_url(self.url)
        if self.url is not None and (self.files or self.variables):
            raise ValueError("`files` and `variables` are of a `command`: leave them out beside `url`")
        if self.url is None and self.header_variable is not None:
            raise ValueError("`header_variable` is sent to a `url`: leave it out beside `command`")
        return self

    @property
    def per_episode(self) -> bool:
        return not self.shared

    @property
    def name(self) -> str:
        """The server in messages."""
        return self.url or " ".join(self.command)

    @property
    def pin_name(self) -> str:
        """The server among the sources whose content is part of a key."""
        return f"mcp:{self.name}"

    def named_files(self) -> tuple[str, ...]:
        return self.files

    def named_variables(self) -> tuple[str, ...]:
        return self.variables if self.header_variable is None else (self.header_variable,)

    @field_validator("files")
    @classmethod
    def _below_the_recipe(cls, files: tuple[str, ...]) -> tuple[str, ...]:
        for file in files:
            if posixpath.isabs(file) or posixpath.normpath(file).partition("/")[0] in ("", ".", ".."):
                raise ValueError(f"`{file}` must be a file in the recipe's folder, or in one below it")
        return files


@dataclass(frozen=True, slots=True)
class ToolEntry:
    config: type[ToolConfig]
    implementation: str  # "package.module:Class" of an environments.toolset.Toolset, made by `of(config, context)`


TOOLS: Table[ToolEntry] = Table("tools", ToolEntry, {
    "function": ToolEntry(FunctionTool, "rlhf_core.environments.function:FunctionTools"),
    "python": ToolEntry(PythonTool, "rlhf_core.environments.tools.python_tool:PythonTools"),
    "mcp": ToolEntry(McpTool, "rlhf_core.environments.tools.mcp_tools:McpTools"),
    "bash": ToolEntry(BashTool, "rlhf_core.environments.tools.runtime_tools:RuntimeTools"),
})  # fmt: skip
