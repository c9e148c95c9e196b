"""Errors of libraries and of the user's code inside of ours: in one line, without addresses of objects."""

from __future__ import annotations

import ast
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlhf_core
from rlhf_core.chat.rendering import render
from rlhf_core.chat.tokenizers import word_level_tokenizer
from rlhf_core.errors import ConversationError, reason_of
from rlhf_core.processes.user_code import user_error

ADDRESS = re.compile("0x[0-9a-f]{6}")


class Nothing:
    """Without a text of its own."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(f"cannot identify image file {io.BytesIO()!r}"), "cannot identify image file <_io.BytesIO>"),
        (ValueError(f"{Nothing()}\n  and {max}\tor {Nothing.__init__}"), None),
        (TypeError(), "TypeError"),
        (ValueError("\n"), "ValueError"),
        (ValueError("red\x1b[31m\ntwo   lines"), r"red\x1b[31m two lines"),
        (ValueError("x" * 2000), "x" * 500 + "…"),
        (ValueError("the register 0x7f00beef: read at 0x10"), "the register 0x7f00beef: read at 0x10"),
    ],
)
def test_a_reason_is_one_line_without_addresses_of_objects(error: Exception, said: str | None) -> None:
    found = reason_of(error)
    assert found == said or said is None
    assert found.isprintable()
    assert f"{Nothing()}" not in found


def test_what_the_users_code_raises_has_no_addresses_either() -> None:
    def theirs() -> None:
        raise ValueError(f"no {Nothing()} here")

    with pytest.raises(ValueError, match="no ") as raised:
        theirs()
    said = user_error(raised.value)
    assert said.splitlines()[0].endswith(".Nothing> here")
    assert "in theirs" in said
    assert not ADDRESS.search(said)


def test_a_template_that_writes_an_object_is_told_without_its_address() -> None:
    tokenizer = word_level_tokenizer(["a"], context_length=8)
    tokenizer.chat_template = "{{ raise_exception('no ' ~ joiner()) }}"
    with pytest.raises(ConversationError) as raised:
        render(tokenizer, [{"role": "user", "content": "a"}], None, generation_prompt=True)
    assert str(raised.value).endswith("refuses a conversation: no <jinja2.utils.Joiner>")
    assert not ADDRESS.search(str(raised.value))


STANDALONE = "sandbox_process.py"  # has the standard library alone


def raw(file: Path) -> Iterator[str]:
    """Where an exception of any kind becomes a part of a sentence as it is."""
    for handler in ast.walk(ast.parse(file.read_bytes())):
        if not isinstance(handler, ast.ExceptHandler) or handler.type is None:
            continue
        if not {"Exception", "BaseException"} & {
            node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)
        }:
            continue
        for node in ast.walk(handler):
            if isinstance(node, ast.FormattedValue) and ast.unparse(node.value) == handler.name:
                yield f"{file}:{node.lineno}"


def test_no_exception_of_any_kind_is_shown_as_it_is() -> None:
    folder = Path(rlhf_core.__file__).parent
    assert [place for file in sorted(folder.rglob("*.py")) if file.name != STANDALONE for place in raw(file)] == []
