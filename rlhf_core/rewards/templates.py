"""Texts for servers, rendered by the recipe's Jinja templates in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlhf_core.chat.hints import Hint
from rlhf_core.errors import ConversationError, RewardError, reason_of


def hint_of(template: str) -> Hint:
    """Return the renderer of `teacher.hint`. Raises ConversationError if the row lacks a field of the template."""
    written = TextTemplate(template)

    def hint(row: Mapping[str, Any]) -> str:
        try:
            return written(row, prompt=row["prompt"][-1]["content"])
        except RewardError as error:
            raise ConversationError(f"teacher.hint: {error}") from error

    return hint


class TextTemplate:
    def __init__(self, text: str) -> None:
        self._template = ImmutableSandboxedEnvironment(undefined=StrictUndefined).from_string(text)

    def __call__(self, row: Mapping[str, Any], **texts: str) -> str:
        """Render with `row` and `texts` by name; `messages` is the row's prompt, or `texts["prompt"]` as a user's turn.

        Raises RewardError if the template uses a missing name.
        """
        prompt = row.get("prompt")
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": texts["prompt"]}]
        try:
            return self._template.render(row=row, messages=messages, **texts)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise RewardError(f"the template cannot be written for row {row.get('id')}: {reason_of(error)}") from error
