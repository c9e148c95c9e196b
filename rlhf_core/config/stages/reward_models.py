"""Settings of reward-model training: on pairs, on target rewards, on labels of single steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rlhf_core.config.base import Reads, Role, since_default
from rlhf_core.config.numbers import LARGEST_REWARD, Coefficient
from rlhf_core.config.stages.base import MERGE_COPIES
from rlhf_core.config.stages.token_form import TokenForm
from rlhf_core.config.stages.trained import LoraConfig, SupervisedConfig
from rlhf_core.config.stages.validation import CompletionsValidation, PairsValidation, StepwiseValidation
from rlhf_core.errors import ConversationError


def _dataset(data_format: str) -> Any:
    return Field(description=f"name of an entry of the recipe's `data`, format {data_format}")


def _validation(judged: str) -> Any:
    return Field(
        default=None,
        description="validation on held-out rows during training, which also normalise the rewards; none: the result "
        f"is the last weights, evaluated on 5 % of the {judged}, which are not trained on",
    )


def held_out_rows(rows: int) -> int:
    """Return the number of held-out rows of a reward model without `validation`: 5 %, at least 2, the minimum for a
    standard deviation, and at most 2000, enough to measure an accuracy to a percent.
    """
    return max(2, math.ceil(min(0.05 * rows, 2000)))


class SupervisedRewardConfig(SupervisedConfig):
    """A supervised run whose result is a reward model."""

    lora: LoraConfig | None = Field(default=None, description="train an adapter, merged at the end; none: all weights")

    @property
    def makes(self) -> Role:
        return "reward_model"

    @property
    def adapter(self) -> LoraConfig | None:
        return self.lora

    def num_steps(self, rows: int | None) -> int | None:
        held_out = held_out_rows(rows) if rows is not None and self.validation is None else 0
        return super().num_steps(None if rows is None else rows - held_out)

    def splits_by_prompt(self, dataset: str) -> bool:
        return self.validation is None and dataset == "dataset"

    @property
    def input_copies(self) -> float:
        return MERGE_COPIES if self.lora is not None else 0.0


class RewardModelConfig(SupervisedRewardConfig):
    """Preference pairs, Bradley-Terry: -log sigmoid of the difference of rewards, also called logexp.

    `batch_size` counts pairs.
    """

    dataset: Annotated[str, Reads("dataset", format="preferences")] = _dataset("preferences")
    validation: PairsValidation | None = _validation("pairs")
    language_model_coefficient: Coefficient = Field(
        default=0.0, description="weight of the language-model loss on chosen completions"
    )
    centring_coefficient: Coefficient = Field(
        default=0.0, description="weight of (chosen reward + rejected reward)^2, which keeps the mean reward near 0"
    )


class RewardRegressionConfig(SupervisedRewardConfig):
    """Regression on rewards of completions: the mean of (reward - given reward)^2, as in HelpSteer2, arXiv:2406.08673.
    `batch_size` counts completions.
    """

    LABELLED: ClassVar[str] = "completion has the reward"

    dataset: Annotated[str, Reads("dataset", format="completions")] = _dataset("completions")
    validation: CompletionsValidation | None = _validation("prompts")

    def as_read(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        if any("reward" not in completion for completion in row["completions"]):
            raise ConversationError("a completion has no `reward` to learn")
        rewards = [abs(completion["reward"]) for completion in row["completions"]]
        if (largest := max(rewards, default=0.0)) > LARGEST_REWARD:
            raise ConversationError(
                f"a completion has the reward {largest:g}, and no reward is larger than {LARGEST_REWARD:,.0f}: scale "
                "rewards down"
            )
        return row


class ProcessRewardModelConfig(SupervisedRewardConfig, TokenForm):
    """Completions with labelled steps, right or wrong or a probability, arXiv:2305.20050 and 2312.08935.

    With r the reward at the last token of a step and y its label: -y log sigmoid(r) - (1 - y) log sigmoid(-r), the mean
    over all labelled steps of the batch. In token form r is the log-odds of `labels` after the step's tag.
    `batch_size` counts completions.
    """

    LABELLED: ClassVar[str] = "step has the label"

    dataset: Annotated[str, Reads("dataset", format="stepwise")] = _dataset("stepwise")
    validation: StepwiseValidation | None = _validation("rows")
    separator: str = Field(
        default="\n", min_length=1,
        description="separator of the steps; a reward `process_reward_model` must have the same",
    )  # fmt: skip

    form: Literal["score", "token"] = since_default(
        "score", description="what gives the reward: a score head at the last token of a step; or the language model, "
        "as the probability of a label after a tag, which other frameworks read too",
    )  # fmt: skip

    @property
    def in_token_form(self) -> bool:
        return self.form == "token"

    def as_read(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the row with the separator and, in token form, the tag, which are settings and no columns."""
        return {**row, "separator": self.separator, **({"step_tag": self.step_tag} if self.in_token_form else {})}
