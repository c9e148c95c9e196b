"""Settings of rewards. A reward is used for training; a score (0-1) for filtering and evaluation.

`REWARDS` lists all. A new one is a file in rlhf_core/rewards, its config class, and one line there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from rlhf_core.config.base import Reads, operational, result_settings, since_default
from rlhf_core.config.engines.placement import ModelPlacement, require_others
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.numbers import BatchSize, GroupSize, PartialShare, Reward, Seconds
from rlhf_core.config.plugins import Table
from rlhf_core.config.rewards.judges import JudgeConfig, PairJudgeConfig
from rlhf_core.config.rewards.rubrics import RubricConfig
from rlhf_core.config.rewards.verifiers import VerifierConfig
from rlhf_core.config.servers import CompletionTemplate, ServerConfig
from rlhf_core.config.texts import NonEmpty
from rlhf_core.config.typed import TypedConfig
from rlhf_core.config.user_code import CalledBeforeJob, check_options


class RewardConfig(TypedConfig):
    """Base of every reward that may train."""

    family: ClassVar[str] = "reward"
    gives_steps: ClassVar[bool] = False  # always rewards single steps; a function or a server may do so as well

    weight: Reward = Field(default=1.0, description="weight of this reward in the sum; a scorer has none")

    @classmethod
    def table(cls) -> Table[Any]:
        return REWARDS

    @property
    def row_columns(self) -> tuple[str, ...]:
        """Columns required in every row that it judges."""
        return ()

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Its lowest and highest value, without `weight`; None if not known in advance."""
        return None


class CompletionReward(RewardConfig):
    """A reward of a single completion of a prompt, without an episode."""

    family: ClassVar[str] = "reward of a completion"


class Scorer(RewardConfig):
    """A reward that also returns scores, for evaluation."""

    family: ClassVar[str] = "scorer"

    @property
    def may_give_scores(self) -> bool:
        """True if it can return scores; functions and servers may return them or not."""
        return True

    @property
    def gives_scores(self) -> bool:
        """True if it always returns scores."""
        return False


ANSWER_PLACE = "{answer}"


def _has_an_answer(text: str) -> str:
    if ANSWER_PLACE not in text:
        raise ValueError(f"{text[:80]!r} must have {ANSWER_PLACE}, where the row's answer is written")
    return text


class TextReward(CompletionReward, Scorer):
    """A reward of the text of completions. Its implementation is a rewards.base.Reward."""

    family: ClassVar[str] = "reward of text"
    tolerated_failures: PartialShare = Field(
        default=0.0,
        description="share of a step's completions that may fail to get this reward; their prompts are dropped from "
        "the step and counted",
    )
    check: Literal[False] | Annotated[str, AfterValidator(_has_an_answer)] | None = operational(
        None,
        description=f"a right completion, in which {ANSWER_PLACE} is the row's `answer`: with another row's answer it "
        "must be worth less, before anything is trained; none: usual forms, which a verifier must tell apart; false: "
        "not checked",
    )


class GroupReward(RewardConfig):
    """A reward of text that sees all completions of a prompt together. Its implementation is a
    rewards.base.GroupReward.
    """

    family: ClassVar[str] = "reward of a group"
    tolerated_failures: PartialShare = Field(
        default=0.0,
        description="share of a step's completions that may fail to get this reward; their prompts are dropped from "
        "the step and counted",
    )

    @property
    def least_group(self) -> int:
        """Completions of a prompt that it needs at least."""
        return 1


class EpisodeReward(RewardConfig):
    """A reward of whole trajectories. Its implementation is a rewards.base.TrajectoryReward."""

    family: ClassVar[str] = "reward of episodes"


class ModelReward(CompletionReward):
    """A reward model's output on tokens. Its implementation is made by rewards.model.RewardReader.reward."""

    family: ClassVar[str] = "reward of a model"

    model: Annotated[str | None, Reads("reward_model")] = Field(
        default=None, description="stage of the reward model; none: the last one above that makes one"
    )
    engine: EngineConfig | None = Field(
        default=None, description="engine settings of the reward model; none: the stage's `engine`"
    )
    placement: ModelPlacement | None = operational(
        None, description="resources of the reward model's own workers; none: in RL it runs on the policy's"
    )
    offload: bool = operational(
        False, description="in RL: keep the reward model's weights in host memory, except while it computes"
    )
    normalize: bool = Field(
        default=True, description="subtract the stored mean of the rewards and divide by their standard deviation"
    )

    @model_validator(mode="after")
    def _offload_frees_something(self) -> ModelReward:
        require_others(self.offload, self.placement, "reward model")
        return self


class RewardModelReward(ModelReward):
    """A reward model, read at the last token; `normalize` uses its rewards of held-out completions."""

    type: Literal["reward_model"]


class ProcessRewardModelReward(ModelReward):
    """A reward model, read at the last token of each step of a completion: one reward per step."""

    gives_steps: ClassVar[bool] = True

    type: Literal["process_reward_model"]
    separator: str = Field(default="\n", min_length=1, description="text that ends a step")


class VerifierReward(VerifierConfig, TextReward):
    """`exact`: the completion's answer equals the row's `answer`. `math`: it is equivalent to that. `code_tests`: the
    completion's code passes the row's `tests`. `reasoning_gym`: the task's own scorer.
    """

    type: Literal["verifier"]

    @property
    def gives_scores(self) -> bool:
        return True

    @property
    def row_columns(self) -> tuple[str, ...]:
        return self.verifier.row_columns

    @property
    def bounds(self) -> tuple[float, float]:
        return 0.0, 1.0


class FunctionReward(TextReward, CalledBeforeJob):
    """`function(completions, prompts, rows, **options)` of a Python file, called with these names; returns a float or
    {reward, score, ...} for each. It may be `async`. Other forms are functions of TRL, OpenRLHF and verl.
    """

    parameters: ClassVar[tuple[str, ...]] = ("completions", "prompts", "rows")

    type: Literal["function"]
    function: str = Field(default="reward", description="its name in the Python file")
    form: Literal["alignment", "openrlhf", "trl", "trl_conversational", "verl"] = since_default(
        "alignment",
        description="how it is called: as here; reward_func(queries, prompts, labels); f(prompts, completions, "
        "**columns) with texts, or with lists of messages; compute_score(data_source, solution_str, ground_truth, "
        "extra_info)",
    )
    options: dict[str, Any] = Field(default={}, description="further keyword arguments")
    timeout_seconds: Seconds = Field(default=60.0, description="time limit of a call; a later answer is an error")
    batch_size: BatchSize = Field(default=4096, description="maximum number of completions in a call")
    separator: str = Field(default="\n", min_length=1, description="text that ends a step, if it returns `steps`")

    @model_validator(mode="after")
    def _options_are_its_own(self) -> FunctionReward:
        if self.form == "alignment":
            check_options(self.options, self.parameters, self.function)
        return self


class HTTPReward(ServerConfig, TextReward):
    """A server: POST {completions, prompts, rows} as JSON, answered by {rewards}, and optionally scores and extra.

    The form `openrlhf` is {query, prompts, labels}, answered by {rewards, scores, extra_logs}.
    """

    type: Literal["http"]
    form: Literal["alignment", "openrlhf"] = Field(default="alignment", description="form of requests and responses")
    query: CompletionTemplate | None = Field(
        default=None,
        description="`query` of the form openrlhf: Jinja with `prompt`, `completion`, `messages` and `row`; none: the "
        "prompt followed by the completion",
    )
    batch_size: BatchSize = Field(default=4096, description="maximum number of completions in a request")

    @model_validator(mode="after")
    def _query_is_sent(self) -> HTTPReward:
        if self.query is not None and self.form == "alignment":
            raise ValueError("`query` is sent in the form `openrlhf` only: set form: openrlhf, or remove it")
        return self


class JudgeReward(JudgeConfig, TextReward):
    """The verdict of another model on each completion, through an OpenAI-compatible endpoint at temperature 0."""

    type: Literal["judge"]
    template: CompletionTemplate = Field(
        description="the judge's prompt, as a user's turn: Jinja with `prompt`, `completion`, `messages` and `row`"
    )
    verdicts: dict[str, Reward] = Field(
        default={}, description="reward of each possible verdict; none: the verdict is a number, the reward"
    )
    range: tuple[Reward, Reward] | None = Field(
        default=None, description="lowest and highest reward of a verdict, which scale it to a score; none: no score"
    )

    @model_validator(mode="after")
    def _range_rises(self) -> JudgeReward:
        if self.range is not None and not self.range[0] < self.range[1]:
            raise ValueError(f"range: {self.range[0]:g} must be less than {self.range[1]:g}")
        return self

    @model_validator(mode="after")
    def _verdicts_differ(self) -> JudgeReward:
        values = set(self.verdicts.values())
        if len(self.verdicts) > 1 and len(values) == 1:
            raise ValueError(
                f"verdicts: {', '.join(self.verdicts)} all have the reward {values.pop():g}, so nothing is "
                "judged: give them different ones"
            )
        return self

    @model_validator(mode="after")
    def _verdicts_are_in_range(self) -> JudgeReward:
        low, high = self.range or (-math.inf, math.inf)
        for verdict, reward in self.verdicts.items():
            if not low <= reward <= high:
                raise ValueError(
                    f"verdicts.{verdict} is {reward:g}, which is not from {low:g} to {high:g} (`range`): correct one"
                )
        return self

    @property
    def may_give_scores(self) -> bool:
        return self.range is not None

    @property
    def bounds(self) -> tuple[float, float] | None:
        if self.verdicts:
            return min(self.verdicts.values()), max(self.verdicts.values())
        return self.range


class Rubric(RubricConfig, RewardConfig):
    """A reward by a rubric: the weights of the criteria that a completion meets, divided by the sum of the positive
    ones and clipped to 0-1; 0 if it misses a required one. The verdict on each is a metric.
    """

    family: ClassVar[str] = "rubric"

    calibration: Annotated[str | None, Reads("calibration", optional=True)] = Field(
        default=None, description="stage that has compared this judge with people, and runs before; none: not compared"
    )

    def judge_settings(self) -> dict[str, Any]:
        """Return the settings that change a verdict, as JSON values: a calibration is of one judge."""
        settings = result_settings(self)
        return {"type": self.type} | {name: settings[name] for name in RubricConfig.model_fields if name in settings}

    @property
    def row_columns(self) -> tuple[str, ...]:
        return () if self.column is None else (self.column,)

    @property
    def bounds(self) -> tuple[float, float]:
        return 0.0, 1.0


class RubricReward(Rubric, TextReward):
    """A rubric's reward of each completion, in a call of its own."""

    type: Literal["rubric"]

    @property
    def gives_scores(self) -> bool:
        return True


class GroupRubricReward(Rubric, GroupReward):
    """A rubric's rewards of all completions of a prompt, in one call that shows the judge all of them."""

    type: Literal["group_rubric"]


class PairwiseReward(GroupReward, PairJudgeConfig):
    """The share of its comparisons that a completion wins by another model's verdict. Each pair is judged in both
    orders; a tie, and a verdict that changes with the order, is half a win for both.
    """

    type: Literal["pairwise"]
    reference: NonEmpty | None = Field(
        default=None,
        description="column with a completion that each is compared with; none: the prompt's others",
    )
    opponents: GroupSize | None = Field(
        default=None,
        description="others that each completion is compared with, drawn at random, in a group of odd size perhaps one "
        "more; none: all others",
    )

    @model_validator(mode="after")
    def _one_kind_of_opponents(self) -> PairwiseReward:
        if self.reference is not None and self.opponents is not None:
            raise ValueError("with `reference` each completion is compared with that alone: remove `opponents`")
        return self

    @property
    def least_group(self) -> int:
        return 2 if self.reference is None else 1

    @property
    def row_columns(self) -> tuple[str, ...]:
        return () if self.reference is None else (self.reference,)

    @property
    def bounds(self) -> tuple[float, float]:
        return 0.0, 1.0


class EnvironmentReward(EpisodeReward, Scorer):
    """The sum of the rewards of the stage's `environment` over an episode."""

    type: Literal["environment"]
    threshold: Reward | None = since_default(
        None,
        description="score 1 for episodes whose sum is at least this, 0 for the others; none: the sum itself, a score "
        "if it is from 0 to 1",
    )
    scored: bool = since_default(
        False, description="the scores are those that agents and executors return; all episodes must have one"
    )

    @model_validator(mode="after")
    def _one_score(self) -> EnvironmentReward:
        if self.scored and self.threshold is not None:
            raise ValueError("threshold makes a score of the reward, and scored reads one beside it: leave one out")
        return self

    @property
    def may_give_scores(self) -> bool:
        return self.threshold is not None or self.scored

    @property
    def gives_scores(self) -> bool:
        return self.may_give_scores

    @property
    def bounds(self) -> tuple[float, float] | None:
        return None if self.threshold is None else (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class RewardEntry:
    config: type[RewardConfig]  # inherits from a class that determines its implementation
    implementation: str  # "package.module:Class"; imported only where it computes


REWARDS: Table[RewardEntry] = Table("rewards", RewardEntry, {
    "reward_model": RewardEntry(RewardModelReward, "rlhf_core.rewards.model:ModelReward"),
    "process_reward_model": RewardEntry(ProcessRewardModelReward, "rlhf_core.rewards.model:ProcessModelReward"),
    "verifier": RewardEntry(VerifierReward, "rlhf_core.rewards.verifier:Verifier"),
    "function": RewardEntry(FunctionReward, "rlhf_core.rewards.function:RewardFunction"),
    "http": RewardEntry(HTTPReward, "rlhf_core.rewards.http:RewardServer"),
    "judge": RewardEntry(JudgeReward, "rlhf_core.rewards.judge:JudgeOfCompletions"),
    "rubric": RewardEntry(RubricReward, "rlhf_core.rewards.rubric:RubricOfCompletions"),
    "group_rubric": RewardEntry(GroupRubricReward, "rlhf_core.rewards.rubric:RubricOfGroups"),
    "pairwise": RewardEntry(PairwiseReward, "rlhf_core.rewards.pairwise:WinRates"),
    "environment": RewardEntry(EnvironmentReward, "rlhf_core.rewards.environment:RewardOfEnvironment"),
})  # fmt: skip


def require_environment(rewards: Mapping[str, RewardConfig], section: str) -> None:
    """Raise ValueError if one of these rewards or scorers is an environment's: the stage has none."""
    for name, reward in rewards.items():
        if isinstance(reward, EnvironmentReward):
            raise ValueError(
                f"{section}.{name} is the reward of an environment, but `environment` is single_turn, which has none: "
                "set another environment, or remove this"
            )
