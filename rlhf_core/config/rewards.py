"""Where a reward comes from. A reward is what trains; a score (0-1) is what filters and evaluates."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from rlhf_core.config.base import Config, PositiveFloat, PositiveInt, Reads, operational
from rlhf_core.config.engine import EngineConfig
from rlhf_core.config.placement import Placement

_URL = re.compile(r"https?://(?P<user>[^/@]*@)?[^/@\s]+\S*")


class _Weighted(Config):
    weight: Annotated[float, Field(allow_inf_nan=False)] = Field(
        default=1.0, description="factor of this reward in the sum; a scorer has none"
    )


class _OfModel(_Weighted):
    model: Annotated[str | None, Reads("reward_model")] = Field(
        default=None, description="the stage whose reward model it is; none: the last one above that makes one"
    )
    engine: EngineConfig | None = Field(default=None, description="how the reward model is run; none: as the policy")
    placement: Placement | None = operational(
        None, description="what workers of the reward model's own reserve; none: it is on the policy's"
    )


class RewardModelReward(_OfModel):
    """A reward model, read at the last token; `normalize` is by its rewards of held-out completions."""

    type: Literal["reward_model"]
    normalize: bool = Field(
        default=True, description="subtract the stored mean of the rewards and divide by their standard deviation"
    )


class ProcessRewardModelReward(_OfModel):
    """A reward model, read at the last token of each step of a completion: one reward a step."""

    type: Literal["process_reward_model"]
    normalize: bool = Field(
        default=True, description="subtract the stored mean of the rewards and divide by their standard deviation"
    )
    separator: str = Field(default="\n", min_length=1, description="text that ends a step")


class VerifierReward(_Weighted):
    """`exact`: the answer found in the completion equals the row's `answer`. `reasoning_gym`: the task's own scorer."""

    type: Literal["verifier"]
    kind: Literal["exact", "reasoning_gym"] = Field(
        default="exact", description="compare with the row's `answer`, or ask the task's own scorer"
    )
    pattern: str | None = Field(
        default=None, description="regular expression whose group 1 is the answer; none: the whole text"
    )


class FunctionReward(_Weighted):
    """`function(completions, prompts, rows, **options)` of a Python file; a float or {reward, score, ...} for each."""

    type: Literal["function"]
    path: str = Field(description="a Python file; a relative path starts at the recipe's folder")
    function: str = Field(default="reward", description="its name in the file")
    options: dict[str, Any] = Field(default={}, description="further keyword arguments")
    timeout_seconds: PositiveFloat = Field(default=60.0, description="longest call; a later answer is an error")
    batch_size: PositiveInt = Field(default=4096, description="completions of one call at most")
    separator: str = Field(default="\n", min_length=1, description="text that ends a step, where it gives `steps`")


class HTTPReward(_Weighted):
    """A server: POST {completions, prompts, rows} as JSON, answered by {rewards}, and if it likes scores and extra.

    Nothing secret belongs into a recipe, which is kept with every result: name environment variables instead.
    """

    type: Literal["http"]
    url: str | None = Field(default=None, description="of the server, http:// or https://, without a password")
    url_variable: str | None = Field(default=None, description="environment variable that holds the URL instead")
    header_variable: str | None = Field(
        default=None, description="environment variable that holds a header to send, as `Authorization: Bearer abc`"
    )
    timeout_seconds: PositiveFloat = Field(default=60.0, description="longest wait for an answer; it is not repeated")
    attempts: PositiveInt = operational(
        5, description="tries of one request where there is no connection, or the status is 429 or 5xx"
    )
    batch_size: PositiveInt = Field(default=4096, description="completions of one request at most")

    @model_validator(mode="after")
    def _one_url(self) -> HTTPReward:
        if (self.url is None) == (self.url_variable is None):
            raise ValueError("give either `url` or `url_variable`")
        if self.url is not None:
            check_url(self.url)
        return self


def check_url(url: str) -> None:
    """Raise ValueError if it is no URL of a server, or holds a user or a password."""
    found = _URL.fullmatch(url)
    if found is None:
        raise ValueError("the URL must begin with http:// or https:// and name a host")
    if found["user"]:
        raise ValueError("the URL holds a user or password: leave it out, and give a header by `header_variable`")


ModelReward = RewardModelReward | ProcessRewardModelReward  # given by a reward model, which reads tokens
TextReward = VerifierReward | FunctionReward | HTTPReward  # given by what reads text


def _without_weight(scorer: TextReward) -> TextReward:
    if scorer.weight != 1.0:
        raise ValueError("a scorer is never summed with another: leave `weight` out")
    return scorer


RewardConfig = Annotated[ModelReward | TextReward, Field(discriminator="type")]
ScorerConfig = Annotated[TextReward, Field(discriminator="type"), AfterValidator(_without_weight)]
