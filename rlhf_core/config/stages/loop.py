"""Settings of loops: rounds of one recipe, each starting from the last accepted model, on unused prompts."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlhf_core.config.base import Config, Reads, Role
from rlhf_core.config.numbers import Margin, Rows
from rlhf_core.config.stages.base import StageConfig
from rlhf_core.config.stages.evaluation import Completions
from rlhf_core.config.texts import JudgeName

ACCEPTED = "accepted"  # name of the last accepted model in the stages of a loop, and of the alias that points at it


class GateConfig(Config):
    """Accepts a candidate that is not worse than the accepted model, compared prompt by prompt in one evaluation of
    both.
    """

    evaluation: str = Field(default="evaluation", description="the stage that evaluates `accepted` and the candidate")
    scorer: JudgeName | None = Field(default=None, description="scorer to compare; none: the evaluation's first")
    completions: Completions = Field(
        default="greedy", description="the score of each prompt's greedy completion, or the mean of its sampled ones"
    )
    margin: Margin = Field(
        default=0.0,
        description="maximum decrease of the mean score at the lower end of the 95 % interval of the difference; less "
        "than 0: the minimum increase",
    )
    start_margin: Margin | None = Field(
        default=None,
        description="likewise against the model of `loop.start`, which `evaluation` must evaluate too: the bound of "
        "many rounds that each lose a little; none: no bound",
    )


class LoopConfig(Config):
    """The recipe is run in rounds. Its stages refer to the last accepted model as `accepted`."""

    start: str = Field(description="stage of the model that is `accepted` until a candidate is")
    candidate: str = Field(description="stage of a round's candidate model")
    prompts: str = Field(description="an entry of `data`, format prompts; each round takes unused rows")
    prompts_per_round: Rows = Field(description="number of rows per round")
    gate: GateConfig = Field(default=GateConfig(), description="acceptance criterion of candidates")


class RoundPromptsConfig(StageConfig):
    """A round's prompts, taken by the pipeline from the loop's: the first ones not used in an earlier round."""

    dataset: Annotated[str, Reads("dataset", format="prompts")] = Field(description="the loop's prompts")
    previous: Annotated[str | None, Reads("dataset", optional=True)] = Field(
        default=None, description="the previous round's prompts"
    )
    count: Rows = Field(description="number of rows per round")

    @property
    def makes(self) -> Role:
        return "dataset"


class RoundConfig(StageConfig):
    """The end of a round, added by the pipeline: its inputs, and whether its candidate is accepted."""

    accepted: Annotated[str, Reads("model")] = Field(description="the round's initial model")
    candidate: Annotated[str, Reads("model")] = Field(description="its candidate")
    prompts: Annotated[str, Reads("dataset")] = Field(description="its prompts")
    accepted_evaluation: Annotated[str, Reads("evaluation")] = Field(description="evaluation of the accepted model")
    candidate_evaluation: Annotated[str, Reads("evaluation")] = Field(description="evaluation of the candidate")
    start_evaluation: Annotated[str | None, Reads("evaluation", optional=True)] = Field(
        default=None, description="evaluation of the loop's start, where the gate has a `start_margin`"
    )
    gate: GateConfig = Field(description="acceptance criterion of candidates")
