"""Settings of judges: models behind an OpenAI-compatible endpoint that return verdicts."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rlhf_core.config.numbers import Share, Tokens
from rlhf_core.config.servers import PairTemplate, ServerConfig
from rlhf_core.config.texts import AnswerPattern, NonEmpty


class ChatConfig(ServerConfig):
    """`url` is the endpoint's base, such as http://127.0.0.1:8000/v1: `/chat/completions` is appended."""

    model: NonEmpty = Field(description="model name at the endpoint")
    system: str | None = Field(default=None, description="system message; none: no system message")
    max_tokens: Tokens = Field(default=512, description="maximum length of a reply")


class JudgeConfig(ChatConfig):
    """A judge whose verdict a pattern finds in its reply."""

    pattern: AnswerPattern = Field(
        description="regular expression; group 1 of its last match in the reply is the verdict"
    )


class PairJudgeConfig(JudgeConfig):
    """A judge that chooses the better of two completions, queried twice, in both orders."""

    template: PairTemplate = Field(
        description="the judge's prompt, as a user's turn: Jinja with `prompt`, `first`, `second`, `messages` and `row`"
    )
    first: NonEmpty = Field(default="A", description="verdict: the first completion is better")
    second: NonEmpty = Field(default="B", description="verdict: the second completion is better")
    tie: NonEmpty | None = Field(default=None, description="verdict: they are equally good; none: there are no ties")
    tolerated_failures: Share = Field(
        default=0.0, description="share of the pairs that may fail to get a verdict; they are dropped and counted"
    )

    @model_validator(mode="after")
    def _verdicts_differ(self) -> Self:
        if len({self.first, self.second, self.tie}) < 3:
            raise ValueError("`first`, `second` and `tie` must be three different verdicts")
        return self
