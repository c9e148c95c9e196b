"""Settings of benchmarks: tasks of lm-evaluation-harness, answered by a model of the recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, model_validator

from rlhf_core.config.base import NamedFolder, operational
from rlhf_core.config.engines.placement import Reservation
from rlhf_core.config.engines.rollout import RolloutEngineConfig
from rlhf_core.config.numbers import GroupSize, Rows, Shots, Tokens
from rlhf_core.config.stages.base import NamedStageConfig, ResumedConfig, SeededConfig
from rlhf_core.config.stages.evaluation import Completions, EvaluatesModels
from rlhf_core.config.texts import NonEmpty

HARNESS = "lm-eval"  # the distribution, whose version is part of the key
TASK_SUFFIXES = (".yaml", ".json", ".jsonl", ".csv", ".parquet", ".txt", ".py")


class BenchmarkConfig(EvaluatesModels, ResumedConfig, SeededConfig, NamedStageConfig):
    """Each of `models` answers the tasks in a separate node, NAME.MODEL. Scores are called TASK.METRIC, as in
    `arc_easy.acc_norm`, or TASK.METRIC.FILTER.
    """

    tasks: tuple[NonEmpty, ...] = Field(
        min_length=1, description="names of tasks, groups or tags, of `task_folder` or of lm-evaluation-harness"
    )
    task_folder: NonEmpty | None = Field(
        default=None,
        description="folder of your own tasks: YAML files of lm-evaluation-harness, and their data and Python files; "
        "none: its own tasks alone, whose data come from the hub",
    )
    num_fewshot: Shots | None = Field(
        default=None, description="solved examples before each question; none: the task's"
    )
    limit: Rows | None = Field(default=None, description="number of rows of each task, from its start; none: all")
    apply_chat_template: bool = Field(
        default=False, description="ask in the model's chat template, examples as turns; false: as plain text"
    )
    max_tokens: Tokens = Field(default=256, description="maximum length of completions of tasks that set none")
    long_prompts: Literal["error", "truncate"] = Field(
        default="error",
        description="a prompt longer than `rollout.max_length` leaves room for: `truncate` drops its start, as "
        "lm-evaluation-harness does",
    )
    unsafe_code: bool = Field(
        default=False,
        description="allow tasks marked `unsafe_code`: these run completions as programs, outside of the sandbox",
    )
    requests_per_call: GroupSize = operational(256, description="number of requests sent to the engines at a time")
    rollout: RolloutEngineConfig = Field(description="engine settings")

    @property
    def libraries(self) -> tuple[str, ...]:
        return (HARNESS,)

    @property
    def engines(self) -> RolloutEngineConfig:
        return self.rollout

    def reserves(self) -> Reservation:
        return self.rollout.reserves()

    def sequence_lengths(self) -> dict[str, int]:
        return {"rollout.max_length": self.rollout.max_length}

    def named_folders(self) -> Iterator[NamedFolder]:
        if self.task_folder is not None:
            yield NamedFolder(self.task_folder, TASK_SUFFIXES, "tasks")

    def score_problem(self, name: str, scorer: str | None, completions: Completions) -> str | None:
        if scorer is not None and "." not in scorer:
            return f"scorer: `{scorer}` is not a score of `{name}`: write TASK.METRIC, as in `{self.tasks[0]}.acc`"
        if completions == "sampled":
            return f"completions: `{name}` has one completion of each prompt: compare greedy"
        return None

    @model_validator(mode="after")
    def _tasks_differ(self) -> BenchmarkConfig:
        if len(set(self.tasks)) != len(self.tasks):
            raise ValueError(f"tasks names one twice: {', '.join(self.tasks)}")
        if self.task_folder is not None and "://" in self.task_folder:
            raise ValueError(f"task_folder: {self.task_folder} is a URL: name a folder beside the recipe")
        if self.max_tokens >= self.rollout.max_length:
            raise ValueError(
                f"max_tokens={self.max_tokens} leaves no room for a prompt in rollout.max_length="
                f"{self.rollout.max_length}"
            )
        return self
