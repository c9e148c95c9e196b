"""Chat templates of a model folder: none, one, or several by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.rlhf_core.recipes import Problems, model_folder

pytestmark = pytest.mark.parts

GOOD = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            [{"name": "rag", "template": GOOD}, {"name": "tool_use", "template": GOOD}],
            "base.source.path: model: none of the tokenizer's chat templates is called `default`",
        ),
        (5, "base.source.path: model: the tokenizer's chat_template is int, not text: correct it in tokenizer_config"),
        (
            [{"name": "default", "template": GOOD}, {"name": "tool_use", "template": "{{ [1, 2] | random }}"}],
            "base.source.path: model: the chat template uses `random`, which writes something else every time",
        ),
        ([{"name": "default", "template": GOOD}, {"name": "tool_use", "template": GOOD}], None),
    ],
)
def test_templates_in_tokenizer_config(problems: Problems, template: object, expected: str | None) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        recipe["base"]["source"] = {"type": "folder", "path": "model"}
        model_folder(root)
        (root / "model" / "chat_template.jinja").unlink()
        path = root / "model" / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))

    said = problems(change)
    assert len(said) == (expected is not None)
    assert said == [] or said[0].startswith(str(expected))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "chat_template.jinja is a Git LFS pointer"),
        (b"{{ 'caf\xe9' }}", "chat_template.jinja is not UTF-8 text: fetch it again"),
        (b"{{ messages | shout }}", "syntax error in line 1 of the chat template: No filter named 'shout'."),
        (b"{{ 'a' * 10 ** 10 }}", "the chat template needs over 4 GiB of memory for four short turns: correct it"),
    ],
)
def test_a_template_file_that_is_none(problems: Problems, content: bytes, expected: str) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        recipe["base"]["source"] = {"type": "folder", "path": "model"}
        model_folder(root)
        (root / "model" / "chat_template.jinja").write_bytes(content)

    (said,) = problems(change)
    assert said.startswith(f"base.source.path: model: {expected}")
