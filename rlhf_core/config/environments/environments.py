"""Settings of RL environments. `ENVIRONMENTS` lists all.

A new one is a file in rlhf_core/environments, its config class, and one line there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from rlhf_core.config.base import Config, operational, since_default
from rlhf_core.config.engines.rollout import RolloutEngineConfig
from rlhf_core.config.environments.harbor import HarborTask
from rlhf_core.config.environments.nemo_gym import ResourceServers, check_tools
from rlhf_core.config.environments.runtimes import RuntimeConfig, SandboxRuntime
from rlhf_core.config.environments.tools import CallsTools, FunctionTool, ToolConfig
from rlhf_core.config.numbers import GiB, PartialShare, Seconds, Sequences, Turns, no_bool
from rlhf_core.config.plugins import Table
from rlhf_core.config.texts import AnswerPattern, JudgeName, Visible
from rlhf_core.config.typed import TypedConfig
from rlhf_core.config.user_code import CalledBeforeJob, UserProgram, check_options
from rlhf_core.errors import RecipeError, did_you_mean

_ALL = "0.0.0.0"  # noqa: S104 (in a network that the recipe asks for)


class AnyEnvironment(TypedConfig):
    """An environment, or a choice of several."""

    family: ClassVar[str] = "environment"

    @classmethod
    def table(cls) -> Table[Any]:
        return ENVIRONMENTS

    @property
    def most_turns(self) -> int:
        """Maximum number of replies in an episode."""
        raise NotImplementedError

    def of_row(self, row: Mapping[str, Any]) -> EnvironmentConfig:
        """Return the environment of episodes that start from this row. Raises RecipeError if there is none."""
        raise NotImplementedError

    def parts(self) -> Mapping[str, EnvironmentConfig]:
        """All environments that may be used, by their place below this setting."""
        raise NotImplementedError

    @property
    def appends_turns(self) -> bool:
        """True if each turn must continue the tokens of the last one, so that the chat template may only append."""
        return any(part.appends_turns for part in self.parts().values())

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The lowest and highest total reward of an episode; None if not known in advance."""
        each = [part.bounds for part in self.parts().values()]
        bounded = [bounds for bounds in each if bounds is not None]
        return (min(low for low, _ in bounded), max(high for _, high in bounded)) if len(bounded) == len(each) else None

    @property
    def is_program(self) -> bool:
        """True if episodes are driven by programs that request replies themselves."""
        return any(part.is_program for part in self.parts().values())

    @property
    def calls_tools(self) -> bool:
        """True if the chat template must render tools and tool results."""
        return any(part.calls_tools for part in self.parts().values())


class EnvironmentConfig(AnyEnvironment):
    """Base of every environment but a choice of several."""

    family: ClassVar[str] = "environment"

    max_turns: Turns = Field(default=4, description="maximum number of replies in an episode")

    @property
    def row_columns(self) -> tuple[str, ...]:
        """Columns required in every row that an episode starts from."""
        return ()

    @property
    def most_turns(self) -> int:
        return self.max_turns

    def of_row(self, row: Mapping[str, Any]) -> EnvironmentConfig:
        return self

    def parts(self) -> Mapping[str, EnvironmentConfig]:
        return {"": self}

    @property
    def bounds(self) -> tuple[float, float] | None:
        return None

    def code(self) -> Mapping[str, CodeEnvironment | FunctionTool]:
        """Its code in the user's files, by its place below this setting."""
        return {}

    @property
    def appends_turns(self) -> bool:
        return self.max_turns > 1

    @property
    def is_program(self) -> bool:
        return False

    @property
    def calls_tools(self) -> bool:
        return False

    @property
    def reads_images(self) -> bool:
        """True if an episode can show the policy the images of its row."""
        return True


class ToleratesFailures(Config):
    """An environment with episodes that may fail."""

    tolerated_failures: PartialShare = Field(
        default=0.0,
        description="share of a step's episodes that may fail; their prompts are dropped from the step and counted",
    )


class TimedEpisodes(EnvironmentConfig):
    """An environment with a time limit per turn."""

    episode_seconds: Seconds | None = operational(
        None,
        description="time limit of the environment for all turns of an episode together, without the policy's "
        "replies; beyond it the episode fails; none: only the limit of each turn",
    )


class EpisodeProcesses(EnvironmentConfig):
    """An environment with a process per episode."""

    parallel_episodes: Sequences = operational(
        256, description="number of concurrent episodes, each in a process of its own"
    )


class SingleTurn(EnvironmentConfig):
    """One reply to the row's prompt, scored by the rewards only."""

    type: Literal["single_turn"] = "single_turn"
    max_turns: Annotated[Literal[1], BeforeValidator(no_bool)] = Field(default=1, description="episodes of one reply")

    @property
    def bounds(self) -> tuple[float, float]:
        return 0.0, 0.0


class Retry(EnvironmentConfig):
    """Wrong replies are answered by `feedback`, and the policy tries again. A right one ends the episode with reward 1.

    A reply is right if its answer equals the row's `answer`, as for the reward `verifier`.
    """

    type: Literal["retry"]
    pattern: AnswerPattern | None = Field(
        default=None, description="regular expression whose group 1 is the answer; none: the whole reply"
    )
    feedback: Visible = Field(default="That is wrong. Try again.", description="the user's message after a wrong reply")

    @property
    def row_columns(self) -> tuple[str, ...]:
        return ("answer",)

    @property
    def bounds(self) -> tuple[float, float]:
        return 0.0, 1.0


class CodeEnvironment(EpisodeProcesses, ToleratesFailures, UserProgram):
    """An environment in the user's Python file, with one process per episode."""

    function: str = Field(description="its name in the Python file")
    options: dict[str, Any] = Field(default={}, description="keyword arguments")
    timeout_seconds: Seconds = operational(60.0, description="time limit; a later answer is a failure")
    memory_gib: GiB = operational(4.0, description="memory limit of an episode beyond what the file has loaded, GiB")

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the arguments of `function` beside `options`."""
        return ()

    @model_validator(mode="after")
    def _options_are_its_own(self) -> Self:
        check_options(self.options, self.parameters, self.function)
        return self

    def code(self) -> Mapping[str, CodeEnvironment | FunctionTool]:
        return {"": self}


class FunctionEnvironment(CodeEnvironment, CalledBeforeJob, TimedEpisodes):
    """An object of the user's Python file, created for each episode in a process of its own.

    It has `step(reply)`, which returns {messages, reward, done}, and may have `reset(row)`, which returns the first
    messages to the policy. Both may be `async`.
    """

    type: Literal["function"]
    function: str = Field(
        default="Environment",
        description="its name in the Python file: a class, or a function that returns an object; called for each "
        "episode",
    )
    timeout_seconds: Seconds = operational(
        60.0, description="time limit of `reset` and `step`; a later answer is a failure"
    )


class ProgramConfig(CodeEnvironment):
    """A function of the user that plays whole episodes and requests replies itself."""

    form: str  # how it is called: as here, or as another framework does
    max_turns: Turns = Field(default=8, description="maximum number of replies that it may request in an episode")
    timeout_seconds: Seconds = operational(
        60.0, description="time limit of an episode, without waiting for replies; a longer one is a failure"
    )

    @property
    def appends_turns(self) -> bool:
        return False  # what does not follow begins a sequence of its own

    @property
    def is_program(self) -> bool:
        return True


class AgentNetwork(Config):
    """An address outside of the node, with TLS and a certificate of the run, which `run` gets as `certificate`."""

    listen: str = operational(_ALL, min_length=1, description="address to listen at; 0.0.0.0: all of the node")
    host: str | None = operational(
        None, min_length=1, description="the node's name or address in `base_url`; none: of its default route"
    )


class AgentEnvironment(ProgramConfig):
    """A function of the user that plays an episode by OpenAI's or Anthropic's API, and returns its reward.

    Called for each episode, in a process of its own, as `run(row, base_url, api_key)`; may be `async`. All replies
    requested at `base_url` are recorded and trained on. Other forms are environments of TRL and of verifiers.
    """

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("row", "base_url", "api_key", *(["certificate"] if self.network is not None else []))

    type: Literal["agent"]
    function: str = Field(default="run", description="its name in the Python file; called for each episode")
    form: Literal["alignment", "trl", "verifiers"] = since_default(
        "alignment",
        description="how it is called: as here; TRL's `environment_factory`; `load_environment()` of verifiers",
    )
    tool_parser: str | None = Field(
        default=None,
        min_length=1,
        description="format of the policy's tool calls: the name of one of vLLM's tool parsers, such as hermes; none: "
        "requests in which it may call `tools` are rejected",
    )
    sampling: Literal["request", "run"] = since_default(
        "request",
        description="temperature and top_p of replies: those that a request asks for, or those of the run, whatever a "
        "request asks: for agents that ask for temperature 0",
    )
    network: AgentNetwork | None = operational(
        None, description="where containers and other nodes reach the policy; none: only processes of its node do"
    )

    @model_validator(mode="after")
    def _tools_are_read(self) -> AgentEnvironment:
        if self.form == "trl" and self.tool_parser is None:
            raise ValueError("methods of TRL's environments are tools: set tool_parser")
        return self


class ExecutorEnvironment(ProgramConfig):
    """A function of the user that plays an episode on tokens, and returns its reward, or sequences with it.

    Called for each episode, in a process of its own, as `run(engine, row)`; may be `async`. The other form is an
    AgentExecutor or AgentInstance of OpenRLHF.
    """

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("engine", "row")

    type: Literal["executor"]
    function: str = Field(default="run", description="its name in the Python file; called for each episode")
    form: Literal["alignment", "openrlhf"] = since_default(
        "alignment", description="how it is called: as here; OpenRLHF's classes for `--train.agent_func_path`"
    )

    @property
    def reads_images(self) -> bool:
        return self.form == "alignment"  # OpenRLHF's have a prompt of text


def require_concurrent(environment: AnyEnvironment, rollout: RolloutEngineConfig) -> None:
    """Raise ValueError if programs would have to wait for each other."""
    if environment.is_program and rollout.repeatable:
        raise ValueError(
            f"environment `{environment.type}` requests replies at any time, so its episodes cannot be played in "
            "rounds: set rollout.repeatable to false"
        )


class ToolsEnvironment(TimedEpisodes, EpisodeProcesses, ToleratesFailures, CallsTools):
    """The policy may call tools, whose results are its next messages; its first reply without a call ends the episode.

    A call that is malformed or fails is answered by an error, and so is one whose tool raises.
    """

    type: Literal["tools"]
    tools: dict[JudgeName, ToolConfig] = Field(
        min_length=1, description="tools by name; the policy sees the names of functions, methods and `python`"
    )
    parser: str = Field(
        min_length=1, description="format of the model's calls: the name of one of vLLM's tool parsers, such as hermes"
    )

    def unused_fields(self) -> frozenset[str]:
        return frozenset() if self.runs_per_episode else frozenset({"parallel_episodes"})

    @property
    def runs_per_episode(self) -> bool:
        return any(tool.per_episode for tool in self.tools.values())

    def code(self) -> Mapping[str, CodeEnvironment | FunctionTool]:
        return {f"tools.{name}": tool for name, tool in self.tools.items() if isinstance(tool, FunctionTool)}

    @property
    def calls_tools(self) -> bool:
        return True


class NemoGymEnvironment(TimedEpisodes, ToleratesFailures, CallsTools, ResourceServers):
    """A resource server of NeMo Gym: it runs the policy's calls and verifies the episode, which gives the reward.

    Rows are NeMo Gym's and include the tools of their episodes. The first reply without a call ends an episode.
    """

    type: Literal["nemo_gym"]
    max_turns: Turns = Field(default=8, description="maximum number of replies in an episode; one without a `parser`")
    parser: str | None = Field(
        default=None,
        min_length=1,
        description="format of the model's tool calls: the name of one of vLLM's tool parsers, such as hermes; none: "
        "rows with tools are rejected",
    )

    @property
    def row_columns(self) -> tuple[str, ...]:
        return ("nemo_gym",)

    @property
    def most_turns(self) -> int:
        return self.max_turns if self.calls_tools else 1

    @property
    def appends_turns(self) -> bool:
        return self.most_turns > 1

    @property
    def calls_tools(self) -> bool:
        return self.parser is not None

    def of_row(self, row: Mapping[str, Any]) -> EnvironmentConfig:
        check_tools(row, can_call=self.calls_tools)
        return self


class HarborEnvironment(TimedEpisodes, EpisodeProcesses, ToleratesFailures, CallsTools):
    """A task folder of Harbor: the policy works by the tool `bash` in a runtime, and the task's tests give the reward.

    Rows are those of a source `harbor`. The first reply without a call, or the last one, ends an episode.
    """

    type: Literal["harbor"]
    max_turns: Turns = Field(default=8, description="maximum number of replies in an episode")
    runtime: RuntimeConfig = Field(default=SandboxRuntime(), description="where commands and tests run")
    parser: str = Field(
        min_length=1, description="format of the model's calls: the name of one of vLLM's tool parsers, such as hermes"
    )
    edits: bool = Field(default=False, description="whether there is a tool `edit`, which replaces a text in a file")
    command_seconds: Seconds = Field(
        default=30.0, description="time limit of a command of the policy, whose processes are killed"
    )
    test_seconds: Seconds = Field(
        default=600.0,
        description="time limit of the tests, if that of the task is not lower; without a verdict the reward is 0",
    )
    without_reward: Literal["error", "zero"] = Field(
        default="error",
        description="treatment of tests that end without a reward: the episode fails; or its reward is 0, as for tests "
        "that write one only if they pass",
    )
    check_solution: bool = operational(
        True,
        description="before a run, solve the first task that has a solution, which must earn more than no work; false: "
        "its tests need what only the nodes have",
    )

    @property
    def row_columns(self) -> tuple[str, ...]:
        return ("harbor",)

    @property
    def calls_tools(self) -> bool:
        return True

    def of_row(self, row: Mapping[str, Any]) -> EnvironmentConfig:
        if "harbor" in row:
            task = HarborTask.of(row["harbor"])
            self.runtime.check_image(task.image, task.dockerfile)
        return self


class ByRow(AnyEnvironment, ToleratesFailures):
    """A choice of several environments by a column of the dataset's rows."""

    type: Literal["by_row"]
    column: str = Field(
        default="environment",
        min_length=1,
        description="column of the rows with the name of an environment",
    )
    choices: dict[str, EnvironmentConfig] = Field(
        min_length=1, description="the environments by their names in the rows; each has limits of its own"
    )

    @property
    def most_turns(self) -> int:
        return max(choice.max_turns for choice in self.choices.values())

    def of_row(self, row: Mapping[str, Any]) -> EnvironmentConfig:
        return self.choices[self.name_of(row)].of_row(row)

    def name_of(self, row: Mapping[str, Any]) -> str:
        """Return the environment's name in the row. Raises RecipeError if it is none of the names."""
        names = ", ".join(self.choices)
        if (name := row.get(self.column)) is None:
            raise RecipeError(f"the column `{self.column}` is missing: it names the row's environment, one of {names}")
        if not isinstance(name, str) or name not in self.choices:
            nearest = did_you_mean(str(name), self.choices)
            raise RecipeError(f"`{self.column}` is {name!r}, an unknown environment{nearest}; there are {names}")
        return name

    def parts(self) -> Mapping[str, EnvironmentConfig]:
        return {f"choices.{name}": choice for name, choice in self.choices.items()}

    @model_validator(mode="after")
    def _failures_are_counted_together(self) -> ByRow:
        for name, choice in self.choices.items():
            if isinstance(choice, ToleratesFailures) and choice.tolerated_failures:
                raise ValueError(
                    f"choices.{name}.tolerated_failures: the episodes of all rows are played together, so set it "
                    "beside `choices`, for all of them"
                )
        return self


@dataclass(frozen=True, slots=True)
class EnvironmentEntry:
    config: type[AnyEnvironment]
    # "package.module:Class", imported only where it computes: an environments.base.Environment made from its config, or
    # an EnvironmentHost made by `of(config, context, tokenizer)`.
    implementation: str


ENVIRONMENTS: Table[EnvironmentEntry] = Table("environments", EnvironmentEntry, {
    "single_turn": EnvironmentEntry(SingleTurn, "rlhf_core.environments.single_turn:SingleTurnEnvironment"),
    "retry": EnvironmentEntry(Retry, "rlhf_core.environments.retry:RetryEnvironment"),
    "tools": EnvironmentEntry(ToolsEnvironment, "rlhf_core.environments.tools.tools:ToolHost"),
    "harbor": EnvironmentEntry(HarborEnvironment, "rlhf_core.environments.harbor:HarborHost"),
    "nemo_gym": EnvironmentEntry(NemoGymEnvironment, "rlhf_core.environments.nemo_gym.environment:NemoGymHost"),
    "by_row": EnvironmentEntry(ByRow, "rlhf_core.environments.by_row:HostByRow"),
    "function": EnvironmentEntry(FunctionEnvironment, "rlhf_core.environments.function:FunctionHost"),
    "agent": EnvironmentEntry(AgentEnvironment, "rlhf_core.environments.agents.agent:AgentHost"),
    "executor": EnvironmentEntry(ExecutorEnvironment, "rlhf_core.environments.agents.executor:ExecutorHost"),
})  # fmt: skip
