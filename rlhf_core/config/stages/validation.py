"""Settings of validation during training, and of the choice of the resulting weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, model_validator

from rlhf_core.config.base import Config, Reads
from rlhf_core.config.engines.rollout import SamplingConfig, require_different
from rlhf_core.config.numbers import Samples, Steps
from rlhf_core.config.rewards.scorers import ScorerConfig
from rlhf_core.config.texts import JudgeName

V = TypeVar("V")

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_NAMED = "by a name of yours: further sets, measured at the same steps as `validation/NAME/…`"
MAIN = ""  # the name of a validation's own set, beside those in `also`


def path_of_set(name: str) -> str:
    """Return the setting of the validation set `name`, below the stage's section."""
    return "validation" if name == MAIN else f"validation.also.{name}"


def counts_prefix(name: str) -> str:
    """Return the prefix of the row counts of the set `name` in a stage's manifest."""
    return "validation_" if name == MAIN else f"validation_{name}_"


def named(name: str, metrics: Mapping[str, V]) -> dict[str, V]:
    """Return `metrics` of the set `name` under their names among all sets."""
    return {metric if name == MAIN else f"{name}/{metric}": value for metric, value in metrics.items()}


class _Validation(Config):
    """Validation every `every_steps` steps; subclasses have the main set, and the class of those in `also`."""

    every_steps: Steps = Field(description="steps between two validations; the last step is validated too")
    metric: str
    keep: Literal["best", "last"] = Field(
        default="best", description="weights in the stage's result: the best by validation, or the last"
    )
    also: dict[str, Any] = Field(default={}, description=_NAMED)

    def unused_fields(self) -> frozenset[str]:
        return frozenset() if self.also else frozenset({"also"})

    @model_validator(mode="after")
    def _names_are_parts_of_others(self) -> Self:
        """Check set names, which become part of metrics (`validation/NAME/loss`) and of inputs
        (`validation.also.NAME.dataset`).
        """
        for name in self.also:
            if not _NAME.fullmatch(name):
                raise ValueError(f"validation.also: `{name}` is not a name of letters, digits, `_` and `-`")
        return self


def _require_measured(metric: str, measured: Iterable[str]) -> None:
    metrics = list(measured)
    if metric not in metrics:
        raise ValueError(f"validation.metric is `{metric}`; these settings measure {', '.join(metrics)}")


class ValidationSet(Config):
    """Held-out prompts, answered by the sampling engines and scored as in `evaluation`."""

    dataset: Annotated[str, Reads("dataset", format="prompts", held_out=True)] = Field(
        description="name of an entry of the recipe's `data`, format prompts"
    )
    scorers: dict[JudgeName, ScorerConfig] = Field(
        min_length=1, description="scorers by name, each from 0 to 1; the first is the main one"
    )
    samples: Samples = Field(
        default=0, description="sampled completions per prompt, besides the greedy one; 0: greedy only"
    )
    sampling: SamplingConfig | None = Field(
        default=None, description="settings of sampled completions, and `max_tokens` of all; none: as in the rollouts"
    )

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        if self.sampling is not None:
            require_different(self.samples, self.sampling)
        return self

    @property
    def pass_at(self) -> tuple[int, ...]:
        return (1, self.samples) if self.samples > 1 else (1,)

    @property
    def measured(self) -> list[str]:
        """The metrics that can be maximised."""
        names = ["mean_score", *(f"pass@{k}" for k in self.pass_at)]
        if self.samples:
            names += ["sampled_mean_score", "sampled_pass@1"]
        return [*names, *(f"{scorer}/{name}" for scorer in list(self.scorers)[1:] for name in names)]


class ValidationConfig(_Validation, ValidationSet):
    """Held-out prompts, answered by the sampling engines with the last published weights, scored as in `evaluation`."""

    metric: str = Field(
        default="mean_score",
        description="the metric to maximise: `mean_score` or `pass@1` of greedy completions, `sampled_mean_score`, "
        "`sampled_pass@1` or, with N samples, `pass@N`; for another scorer than the main one, `SCORER/…`; for a set "
        "in `also`, `NAME/…`",
    )
    also: dict[str, ValidationSet] = Field(default={}, description=_NAMED)

    @property
    def sets(self) -> Mapping[str, ValidationSet]:
        """All sets by name, the main one (MAIN) first."""
        return {MAIN: self, **self.also}

    @model_validator(mode="after")
    def _metrics_have_one_meaning(self) -> ValidationConfig:
        for name in self.also:
            if name in self.scorers:
                raise ValueError(f"validation.also.{name} has the name of a scorer of validation: rename one of them")
        measured = [metric for name, one in self.sets.items() for metric in named(name, dict.fromkeys(one.measured))]
        _require_measured(self.metric, measured)
        return self


class SupervisedValidationConfig(_Validation):
    """Held-out rows of the stage's own format. A subclass has the main set's `dataset`."""

    MEASURED: ClassVar[tuple[str, ...]] = ("loss",)  # what `metric` may name of each set
    MAXIMISED: ClassVar[frozenset[str]] = frozenset({"accuracy"})

    metric: str = Field(default="loss", description="the metric to minimise: `loss`; for a set in `also`, `NAME/loss`")

    @property
    def maximise(self) -> bool:
        return self.metric.rpartition("/")[2] in self.MAXIMISED

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all sets, the main one (MAIN) first."""
        return (MAIN, *self.also)

    @model_validator(mode="after")
    def _metric_is_measured(self) -> SupervisedValidationConfig:
        of_each = dict.fromkeys(self.MEASURED)
        _require_measured(self.metric, [metric for name in self.names for metric in named(name, of_each)])
        return self


def _held_out(data_format: str) -> Any:
    return Field(description=f"name of an entry of the recipe's `data`, format {data_format}")


class HeldOutText(Config):
    """Documents, split like the training documents."""

    dataset: Annotated[str, Reads("dataset", format="text", held_out=True)] = _held_out("text")


class HeldOutConversations(Config):
    """Conversations; only the tokens of assistant turns count."""

    dataset: Annotated[str, Reads("dataset", format="conversations", held_out=True)] = _held_out("conversations")


class HeldOutPairs(Config):
    """Preference pairs whose prompts may have images."""

    dataset: Annotated[str, Reads("dataset", format="preferences", held_out=True)] = _held_out("preferences")


class HeldOutUnpaired(Config):
    """Labelled completions, whose prompts may have images."""

    dataset: Annotated[str, Reads("dataset", format="unpaired", held_out=True)] = _held_out("unpaired")


class HeldOutCompletions(Config):
    """Completions with rewards."""

    dataset: Annotated[str, Reads("dataset", format="completions", held_out=True)] = _held_out("completions")


class HeldOutSteps(Config):
    """Completions with labelled steps."""

    dataset: Annotated[str, Reads("dataset", format="stepwise", held_out=True)] = _held_out("stepwise")


class TextValidation(SupervisedValidationConfig, HeldOutText):
    """Mean loss per token of held-out documents."""

    also: dict[str, HeldOutText] = Field(default={}, description=_NAMED)


class ConversationsValidation(SupervisedValidationConfig, HeldOutConversations):
    """Mean loss per token of the assistant turns of held-out conversations."""

    also: dict[str, HeldOutConversations] = Field(default={}, description=_NAMED)


class _AccuracyValidation(SupervisedValidationConfig):
    MEASURED: ClassVar[tuple[str, ...]] = ("loss", "accuracy")

    metric: str = Field(
        default="loss",
        description="`loss`, lowest is best, or `accuracy`, highest is best; for a set in `also`, `NAME/…`",
    )


class PairsValidation(_AccuracyValidation, HeldOutPairs):
    """Loss of held-out pairs whose prompts may have images, and the share that is ordered correctly."""

    also: dict[str, HeldOutPairs] = Field(default={}, description=_NAMED)


class UnpairedValidation(_AccuracyValidation, HeldOutUnpaired):
    """Loss of held-out labelled completions, and the share on the right side of the KL."""

    also: dict[str, HeldOutUnpaired] = Field(default={}, description=_NAMED)


class CompletionsValidation(SupervisedValidationConfig, HeldOutCompletions):
    """Mean squared difference to the given rewards over held-out completions."""

    also: dict[str, HeldOutCompletions] = Field(default={}, description=_NAMED)


class StepwiseValidation(_AccuracyValidation, HeldOutSteps):
    """Loss of the steps of held-out completions, and the share of steps classified correctly."""

    also: dict[str, HeldOutSteps] = Field(default={}, description=_NAMED)
