"""Base of stage settings: the properties of a stage that the rest of the code queries, independent of its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlhf_core.config.base import Config, Dtype, Role, operational
from rlhf_core.config.engines.placement import Placement, Reservation
from rlhf_core.config.engines.rollout import RolloutEngineConfig, SamplingConfig
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.environments.environments import AnyEnvironment
from rlhf_core.config.numbers import Seed
from rlhf_core.config.rewards.rewards import RewardConfig
from rlhf_core.config.stages.checkpoint import PartialResultsConfig

# Merging a model in bfloat16 holds the weights in float32 and, while it saves, in bfloat16 again.
MERGE_COPIES = 4.0

Quantisation = Literal["nf4"]  # of the frozen base of an adapter


@dataclass(frozen=True, slots=True)
class RowLimit:
    """Maximum length of a dataset's rows for the stage that reads it."""

    setting: str  # that bounds a sequence, in tokens
    tokens: int
    completion_setting: str = ""  # that keeps a part of it for the completion, where the rows are prompts
    completion_tokens: int = 0
    splits: bool = False  # a longer row is split in several sequences, unless its dataset sets another treatment

    @property
    def room(self) -> int:
        """Maximum number of tokens of the row itself."""
        return self.tokens - self.completion_tokens


@dataclass(frozen=True, slots=True)
class JudgedBy:
    """A reward, scorer or environment: its setting, and the input with its rows; empty: the stage makes them."""

    setting: str
    judge: RewardConfig | AnyEnvironment
    dataset: str


@dataclass(frozen=True, slots=True)
class HeldModel:
    """A model held in memory by a stage's workers."""

    start: str  # the input that it starts from
    engine: EngineConfig
    placement: Placement
    trained: bool = False
    adapter_rank: int | None = None  # of the adapter that is trained; None: all weights are
    quantised: bool = False  # the linear layers below an adapter are in 4 bits


class StageConfig(Config):
    """Settings of one stage."""

    made_format: ClassVar[str | None] = None  # of the dataset that it makes, where all of its datasets have one

    @property
    def prompts_of(self) -> str | None:
        """The input dataset whose prompts are contained in the stage's result dataset, for overlap checks."""
        return None

    @property
    def makes(self) -> Role | None:
        """The role in which other stages can read its result; None: in none."""
        return None

    @property
    def adapter_targets(self) -> Literal["all-linear"] | tuple[str, ...] | None:
        """The target layers if the result is an adapter, which must be merged before it can be used as a model; else
        None.
        """
        return None

    @property
    def quantised(self) -> Quantisation | None:
        """Quantisation of the base of the adapter that is trained on its input `model`; None: none."""
        return None

    @property
    def model_dtype(self) -> Dtype | None:
        """The dtype of the weights of its resulting model; None: that of its input `model`."""
        return None

    @property
    def compares_overlap(self) -> bool:
        """True if it is a dataset that is compared with the recipe's held-out data before anything trains on it."""
        return False

    @property
    def checkpoints(self) -> PartialResultsConfig | None:
        """Checkpoint settings; None: it writes none."""
        return None

    @property
    def job_processes(self) -> int:
        """Number of processes of a stage that computes in its job."""
        return 1

    @property
    def input_copies(self) -> float:
        """Host memory of its job's own process, as a multiple of the size of its inputs."""
        return 0.0

    def reserves(self) -> Reservation:
        """Resources of its actors; none if it computes in its job's own process."""
        return Reservation()

    def reservations(self) -> Mapping[str, Reservation]:
        """Return the resources of each group of its actors by name, if models are in groups of their own."""
        return {}

    def held_models(self) -> Sequence[Sequence[HeldModel]]:
        """Models that its workers hold at the same time, in groups that follow each other."""
        return ()

    def num_steps(self, rows: int | None) -> int | None:
        """Return the number of steps on a dataset of `rows` rows, before unusable ones are dropped; None if it has no
        steps, or if `rows` is None and they depend on it.
        """
        return None

    def rows_read(self, rows: int) -> int | None:
        """Return the rows of a dataset of `rows` that it trains on in all its steps; None if not known in advance."""
        return None

    def seed_of(self, of_recipe: int) -> int | None:
        """Return the seed of its random numbers; None if it draws none."""
        return None

    def splits_by_prompt(self, dataset: str) -> bool:
        """Return whether it holds out some prompts of the input `dataset`, and trains on the rows of the others."""
        return False

    def sequence_lengths(self) -> Mapping[str, int]:
        """Maximum sequence lengths in tokens, by setting: none may exceed the model's context."""
        return {}

    @property
    def engines(self) -> RolloutEngineConfig | None:
        """Settings of the engines that serve its input `model`; None: it starts none."""
        return None

    @property
    def libraries(self) -> tuple[str, ...]:
        """Optional libraries that compute its result, whose versions are part of its key."""
        return ()

    @property
    def token_readers(self) -> Mapping[str, tuple[str, str]]:
        """Models that read the tokens of its input `model`, by setting: the input, and the remedy if it cannot read
        them.
        """
        return {}

    @property
    def text_readers(self) -> tuple[str, ...]:
        """Settings that read text only in a stage that reads images: its rows may have none."""
        return ()

    def text_readers_of(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """Return `text_readers` and this row's own readers of text only. Raises RecipeError if the row is invalid."""
        return self.text_readers

    def row_limit(self, dataset: str) -> RowLimit | None:
        """Return the length limit of rows of the input `dataset`; None: rows of any length are accepted."""
        return None

    def as_read(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a canonical row of one of its datasets with the settings that its format needs.

        Raises ConversationError if the stage cannot use it.
        """
        return row

    def judges(self) -> Iterator[JudgedBy]:
        """Yield every reward, scorer and environment that it uses."""
        return iter(())

    def moe_coefficients(self) -> Mapping[str, float]:
        """Coefficients of load-balancing losses, by setting; only valid for mixture-of-experts models."""
        return {}


class NamedStageConfig(StageConfig):
    """Settings of a stage with a name chosen in the recipe."""

    stage: str | None = operational(None, description="type of the stage; none: its name")


class ResumedConfig(StageConfig):
    """A stage that computes rows, and keeps those that are complete until it is done."""

    checkpoint: PartialResultsConfig = operational(
        PartialResultsConfig, description="interval at which complete rows are stored, from which a killed job resumes"
    )

    @property
    def checkpoints(self) -> PartialResultsConfig:
        return self.checkpoint


class SeededConfig(StageConfig):
    """A stage that draws random numbers, at least with some settings. Only such a stage has a seed, in its key and its
    context.
    """

    seed: Seed | None = operational(None, description="seed of the stage's random numbers; none: the recipe's `seed`")

    @property
    def draws(self) -> bool:
        """True if it draws random numbers with these settings."""
        return True

    def seed_of(self, of_recipe: int) -> int | None:
        if not self.draws:
            return None
        return of_recipe if self.seed is None else self.seed

    @model_validator(mode="after")
    def _a_seed_is_used(self) -> Self:
        if self.seed is not None and not self.draws:
            raise ValueError("seed: nothing is drawn at random here; remove it")
        return self


class EnginesConfig(SeededConfig, NamedStageConfig):
    """A stage whose engines answer the prompts of a dataset. Each subclass declares the dataset with its format."""

    dataset: str
    sampling: SamplingConfig = Field(description="sampling settings")
    rollout: RolloutEngineConfig = Field(description="engine settings")

    def reserves(self) -> Reservation:
        return self.rollout.reserves()

    @property
    def engines(self) -> RolloutEngineConfig:
        return self.rollout

    def sequence_lengths(self) -> Mapping[str, int]:
        return {"rollout.max_length": self.rollout.max_length}

    def row_limit(self, dataset: str) -> RowLimit | None:
        return self.prompt_limit(self.sampling, "sampling")

    def prompt_limit(self, sampling: SamplingConfig, setting: str) -> RowLimit:
        """Return the length limit of prompts whose completions are sampled with `sampling`, the setting `setting`."""
        return RowLimit("rollout.max_length", self.rollout.max_length, f"{setting}.max_tokens", sampling.max_tokens)
