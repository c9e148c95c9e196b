"""The recipe: one YAML file that describes one run as named stages. docs/guides/recipes.md describes the language."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from rlhf_core.config.base import NULL_WORDS, Config, KeyedConfig, operational
from rlhf_core.config.data.dataset import DatasetConfig
from rlhf_core.config.notify import NotifyConfig
from rlhf_core.config.numbers import Seed
from rlhf_core.config.prices import PricesConfig
from rlhf_core.config.rl.critic import POLICY_START
from rlhf_core.config.stages.base import NamedStageConfig
from rlhf_core.config.stages.loop import LoopConfig
from rlhf_core.config.stages.outputs import ReportConfig
from rlhf_core.config.tracking import TrackingConfig
from rlhf_core.config.watchdog import WatchdogConfig
from rlhf_core.contract import Stage
from rlhf_core.errors import did_you_mean
from rlhf_core.recipe.methods import method_hint
from rlhf_core.stages.table import STAGES

_RECIPE_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,99}")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,99}")
_DATASET_NAME = re.compile(r"\w[\w-]{0,99}", re.ASCII)


def _recipe_name(name: str) -> str:
    if not _RECIPE_NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not a name: write up to 100 lower-case letters, digits, `_`, `.`, `-`, a letter or digit "
            "first"
        )
    return name


def _dataset_name(name: str) -> str:
    if not _DATASET_NAME.fullmatch(name):
        raise ValueError("the name of a dataset has up to 100 letters, digits, `_` and `-`")
    return name


def _no_stage(merge: Any) -> Any:
    if isinstance(merge, Mapping):
        raise ValueError("true, false or null; a merge of your own is a stage with a name: `merged: {stage: merge, …}`")
    return merge


class Recipe(KeyedConfig):
    """Every further key is a stage: its name, which is also its type unless it has a key `stage`."""

    name: Annotated[str, AfterValidator(_recipe_name)] = Field(description="lower-case letters, digits, `_`, `.`, `-`")
    description: str = Field(default="", description="one-line description")
    seed: Seed = Field(
        default=0,
        description="seed of all random numbers, in stages without a `seed` of their own; only stages that draw "
        "random numbers have it in their key",
    )
    data: dict[Annotated[str, AfterValidator(_dataset_name)], DatasetConfig] = Field(
        min_length=1, description="datasets by name"
    )
    merge: Annotated[bool | None, BeforeValidator(_no_stage)] = Field(
        default=True, description="merge each trained adapter; false or null: only if a stage reads it"
    )
    loop: LoopConfig | None = Field(default=None, description="run the recipe in rounds; none: a single run")
    report: ReportConfig | None = Field(default=ReportConfig(), description="settings of the HTML report")
    prices: PricesConfig | None = operational(
        None, description="prices of GPUs, cores, memory and judges; none: those of ALIGNMENT_PRICES"
    )
    tracking: TrackingConfig = operational(TrackingConfig, description="trackers besides metrics.jsonl")
    watchdog: WatchdogConfig | None = operational(
        WatchdogConfig, description="when a job has hung, and is started again; null: never"
    )
    notify: NotifyConfig | None = operational(
        NotifyConfig, description="messages about the run to a webhook; null: none"
    )

    @classmethod
    def block_class(cls, key: str, raw: Any) -> type[Config] | None:
        """Return the class of the stage. Raises ValueError for an unknown one, or for one that is set elsewhere."""
        stage = raw.get("stage") if isinstance(raw, Mapping) else None
        if stage is None:
            return STAGES[key].config if key in cls.block_names() else None
        if not isinstance(stage, str):
            raise ValueError(f"`stage` must be text, one of {', '.join(cls.block_names())}")
        if stage not in cls.block_names():
            near = did_you_mean(stage, cls.block_names())
            raise ValueError(
                method_hint(stage)
                or f"there is no stage `{stage}` to write here{near}; there are {', '.join(cls.block_names())}"
            )
        if not _NAME.fullmatch(key):
            raise ValueError(
                "the name of a stage has up to 100 lower-case letters, digits, `_` and `-`, a letter or digit first"
            )
        if key in STAGES and key not in cls.block_names():
            raise ValueError(f"`{key}` is a reserved name of a node: choose another name")
        if key in NULL_WORDS:
            raise ValueError(f'`{key}` is a reserved word that means "no stage": choose another name')
        if key == POLICY_START:
            raise ValueError(f"`{key}` is reserved: `critic.start` calls RL's starting model so; choose another name")
        return STAGES[stage].config

    @classmethod
    def block_names(cls) -> list[str]:
        """The stages with a key of their own; datasets are in `data`, with their overlap, the report is a field, and so
        are the parts of a loop.
        """
        return [name for name in STAGES if name not in ("dataset", "overlap", "report", "round_prompts", "round")]

    @property
    def stages(self) -> Mapping[str, NamedStageConfig]:
        """The stages by name, in order."""
        return self.blocks


def stage_of(name: str, config: NamedStageConfig) -> Stage:
    return STAGES[config.stage or name]
