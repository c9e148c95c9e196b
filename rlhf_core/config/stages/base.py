"""What the settings of a stage answer about the stage, so that nothing else guesses it from their names."""

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
from rlhf_core.config.stages.checkpoint import CheckpointConfig

# Of a model in bfloat16, a merge has the weights in float32 and, while it saves, in bfloat16 again.
MERGE_COPIES = 4.0


@dataclass(frozen=True, slots=True)
class RowLimit:
    """How long a row of a dataset may be for the stage that reads it."""

    setting: str  # that bounds a sequence, in tokens
    tokens: int
    completion_setting: str = ""  # that keeps a part of it for the completion, where the rows are prompts
    completion_tokens: int = 0
    splits: bool = False  # a longer row is split in several sequences, unless its dataset says what becomes of it

    @property
    def room(self) -> int:
        """Tokens that a row itself may have."""
        return self.tokens - self.completion_tokens


@dataclass(frozen=True, slots=True)
class JudgedBy:
    """A reward, scorer or environment: the setting that has it, and the input whose rows it reads."""

    setting: str
    judge: RewardConfig | AnyEnvironment
    dataset: str


@dataclass(frozen=True, slots=True)
class HeldModel:
    """A model that the workers of a stage hold in memory."""

    start: str  # the input that it starts from
    engine: EngineConfig
    placement: Placement
    trained: bool = False
    adapter_rank: int | None = None  # of the adapter that is trained; None: all weights are


class StageConfig(Config):
    """Settings of one stage."""

    made_format: ClassVar[str | None] = None  # of the dataset that it makes, where all of its datasets have one

    @property
    def prompts_of(self) -> str | None:
        """The dataset whose prompts are in the dataset that it makes: who reads that trains or tests on these."""
        return None

    @property
    def makes(self) -> Role | None:
        """The role in which other stages can read its result; None: in none."""
        return None

    @property
    def adapter_targets(self) -> Literal["all-linear"] | tuple[str, ...] | None:
        """The layers of the adapter that is its result, to be merged before it can serve as a model; None: its result
        is no adapter."""
        return None

    @property
    def model_dtype(self) -> Dtype | None:
        """Of the weights of the model that it trains or makes; None: that of its input `model`."""
        return None

    @property
    def compares_overlap(self) -> bool:
        """True for a dataset that is compared with what the recipe tests on, before anything is trained on it."""
        return False

    @property
    def checkpoints(self) -> CheckpointConfig | None:
        """How it keeps checkpoints; None: it keeps none."""
        return None

    @property
    def job_processes(self) -> int:
        """How many processes compute where it computes in its job."""
        return 1

    @property
    def input_copies(self) -> float:
        """Host memory that its job's own process needs, in sizes of its inputs."""
        return 0.0

    def reserves(self) -> Reservation:
        """What its actors reserve; nothing where it computes in its job's own process."""
        return Reservation()

    def held_models(self) -> Sequence[Sequence[HeldModel]]:
        """The models that its workers hold at the same time, one group after another."""
        return ()

    def num_steps(self, rows: int | None) -> int | None:
        """Steps on a dataset of so many rows, before those are dropped that cannot be used; None: it has no steps, or
        `rows` is None and they depend on it."""
        return None

    def rows_read(self, rows: int) -> int | None:
        """Rows that it trains on in all its steps, of a dataset of so many; None: not known before it runs."""
        return None

    def seed_of(self, of_recipe: int) -> int | None:
        """The seed of its random numbers; None: it draws none."""
        return None

    def splits_by_prompt(self, dataset: str) -> bool:
        """True if it holds out some prompts of the input `dataset`, and trains on the rows of the others."""
        return False

    def sequence_lengths(self) -> Mapping[str, int]:
        """Longest sequences in tokens, by setting: none may exceed the model's context."""
        return {}

    @property
    def engines(self) -> RolloutEngineConfig | None:
        """The engines that serve its input `model`; None: it starts none."""
        return None

    @property
    def token_readers(self) -> Mapping[str, tuple[str, str]]:
        """Models that read the tokens of its input `model`: the setting that names each, its input, and what to do
        where it cannot read them."""
        return {}

    @property
    def text_readers(self) -> tuple[str, ...]:
        """Settings by which something reads text alone, where the stage itself reads images: its rows may have none."""
        return ()

    def text_readers_of(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """`text_readers`, and what reads this row as text alone. Raises RecipeError if the row cannot be read."""
        return self.text_readers

    def row_limit(self, dataset: str) -> RowLimit | None:
        """Of the rows of the input `dataset`; None: rows of any length can be used."""
        return None

    def as_read(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """A canonical row of any of its datasets, with what its format needs to know of these settings.

        Raises ConversationError if the stage cannot use it.
        """
        return row

    def judges(self) -> Iterator[JudgedBy]:
        """Every reward, scorer and environment that it uses."""
        return iter(())

    def moe_coefficients(self) -> Mapping[str, float]:
        """Weights of load-balancing losses, by setting: only a mixture of experts can have one."""
        return {}


class NamedStageConfig(StageConfig):
    """Settings of a stage to which the recipe gives a name."""

    stage: str | None = operational(None, description="which stage this is; none: the one that it is named after")


class SeededConfig(StageConfig):
    """A stage that draws random numbers, at least with some settings. Only such a stage has a seed in its key, and can
    read one."""

    seed: Seed | None = operational(None, description="of the stage's random numbers; none: the recipe's `seed`")

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
            raise ValueError("seed: nothing is drawn at random here; leave it out")
        return self


class EnginesConfig(SeededConfig, NamedStageConfig):
    """A stage whose engines answer the prompts of a dataset. Each subclass declares the dataset with its format."""

    dataset: str
    sampling: SamplingConfig = Field(description="how completions are sampled")
    rollout: RolloutEngineConfig = Field(description="the engines that sample")

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
        """Of a prompt whose completion is sampled as `setting` says."""
        return RowLimit("rollout.max_length", self.rollout.max_length, f"{setting}.max_tokens", sampling.max_tokens)
