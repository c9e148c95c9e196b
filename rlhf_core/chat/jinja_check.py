"""Checks of chat templates: they must be valid Jinja, deterministic, and terminate."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from rlhf_core.errors import StageError
from rlhf_core.processes.lines import ProcessError
from rlhf_core.processes.trial import tried

_TRIAL_SECONDS = 20
_TRIAL_MEMORY = 2**32  # bytes
_CONVERSATION = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "c"},
    {"role": "user", "content": "d"},
]


def check_jinja(text: str) -> None:
    """Raise StageError if `text` is not a Jinja template, or draws random numbers.

    It is compiled here, which computes its constants: call `try_jinja` first for untrusted ones.
    """
    from jinja2 import TemplateSyntaxError

    _parse(text)
    try:
        _environment().compile(text)
    except TemplateSyntaxError as error:
        raise _unreadable(error) from error


def _parse(text: str) -> None:
    from jinja2 import TemplateSyntaxError, nodes

    if text.startswith("\ufeff"):
        raise StageError(
            "the chat template begins with a byte-order mark (BOM), which it would write before every conversation: "
            "save its file as UTF-8 without one"
        )
    try:
        tree = _environment().parse(text)
    except TemplateSyntaxError as error:
        raise _unreadable(error) from error
    names = {node.name for node in tree.find_all(nodes.Filter)} | {node.name for node in tree.find_all(nodes.Name)}
    for name in sorted(names & {"random", "lipsum"}):
        raise StageError(f"the chat template uses `{name}`, which writes something else every time")


def _unreadable(error: Any) -> StageError:
    return StageError(f"syntax error in line {error.lineno} of the chat template: {error.message}")


@lru_cache(maxsize=32)
def try_jinja(text: str) -> None:
    """Run check_jinja in a process of its own; also raise StageError if the template hangs, or needs gigabytes, for
    four short turns.
    """
    _parse(text)
    try:
        tried(_TRIAL_SECONDS, _TRIAL_MEMORY, render_turns, text)
    except TimeoutError:
        raise StageError(
            f"the chat template does not end within {_TRIAL_SECONDS} s for four short turns: correct its loops"
        ) from None
    except MemoryError:
        raise StageError(
            f"the chat template needs over {_TRIAL_MEMORY // 2**30} GiB of memory for four short turns: correct it"
        ) from None
    except ProcessError as error:
        raise StageError(f"the chat template could not be rendered (its process {error})") from error


def _environment() -> Any:
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

        def parse(self, parser: Parser) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )


def render_turns(text: str) -> None:
    """Render the template, which may raise without the context of a tokenizer. Raises StageError for invalid syntax."""
    from jinja2 import TemplateSyntaxError

    try:
        template = _environment().from_string(text)
        for add_generation_prompt in (True, False):
            template.render(messages=_CONVERSATION, add_generation_prompt=add_generation_prompt)
    except MemoryError:
        raise
    except TemplateSyntaxError as error:
        raise _unreadable(error) from error
    except Exception:  # a template is a program: it may raise anything, also on purpose, and while it is compiled
        return
