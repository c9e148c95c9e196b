"""Settings of process reward models in token form: the language model itself is read, at a tag after each step."""

from __future__ import annotations

from typing import ClassVar

from pydantic import model_validator

from rlhf_core.config.base import Config, since_default
from rlhf_core.config.texts import Visible


class TokenForm(Config):
    """The reward of a step is p(right) of the two labels as the next token after its tag, arXiv:2312.08935."""

    token_settings: ClassVar[tuple[str, ...]] = ("step_tag", "labels")

    separator: str  # text between two steps
    step_tag: Visible = since_default(
        " ки", description="of the form `token`: text after each step, at whose last token the step is read"
    )
    labels: tuple[Visible, Visible] = since_default(
        ("+", "-"),
        description="of the form `token`: labels of a right and of a wrong step, each the name of a token, such as "
        "`▁+`, or a text of one token",
    )

    @property
    def in_token_form(self) -> bool:
        raise NotImplementedError

    @model_validator(mode="after")
    def _of_the_form_token(self) -> TokenForm:
        for name in self.token_settings:
            if not self.in_token_form and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name}: it applies only to a process reward model with `form: token`; remove it")
        return self
