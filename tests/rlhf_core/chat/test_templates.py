"""Chat templates of a recipe: shipped ones, files, input templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.chat import jinja_check
from rlhf_core.chat.encoding import encode_completion, encode_conversation, encode_prompt, load_tokenizer
from rlhf_core.chat.jinja_check import check_jinja
from rlhf_core.chat.templates import check_templates, with_template, write_template
from rlhf_core.chat.tokenizers import word_level_tokenizer
from rlhf_core.config.stages.base_model import BaseModelConfig
from rlhf_core.errors import StageError
from tests.rlhf_core.chat.families import (
    DATED,
    SPECIAL,
    TEMPLATES,
    assistant,
    byte_level,
    system,
    tagged,
    user,
)  # fmt: skip

pytestmark = pytest.mark.parts

TALK = [system("s"), user("q"), assistant("r")]
LLAMA3 = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add"}}


def base(**settings: Any) -> BaseModelConfig:
    return BaseModelConfig.model_validate_json(json.dumps({"source": {"type": "scratch"}, **settings}))


def written(messages: Any, tools: Any = None, *, bos: bool = False, **settings: Any) -> tuple[str, str]:
    """The one sequence of a conversation as text, and what of it is trained."""
    tokenizer = byte_level(bos=bos)
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL[2:], *LLAMA3]})
    with_template(tokenizer, base(**settings), Path)
    [(ids, mask)] = encode_conversation(tokenizer, messages, tools)
    prompt = encode_prompt(tokenizer, messages[:-1], tools)
    assert ids[: len(prompt)] == prompt
    return tokenizer.decode(ids), tokenizer.decode([t for t, trained in zip(ids, mask, strict=True) if trained])


@pytest.mark.parametrize(
    ("name", "text", "trained"),
    [
        (
            "chatml",
            "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nr<|im_end|>\n",
            "r<|im_end|>",
        ),
        (
            "llama3",
            "<|start_header_id|>system<|end_header_id|>\n\ns<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nq"
            "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nr<|eot_id|>",
            "r<|eot_id|>",
        ),
        ("plain", "### System:\ns\n\n### User:\nq\n\n### Assistant:\nr<eos>\n\n", "r<eos>"),
    ],
)
def test_shipped_templates(name: str, text: str, trained: str) -> None:
    assert written(TALK, chat_template=name) == (text, trained)
    # BOS where the tokenizer begins a text with it, and once.
    assert written(TALK, bos=True, chat_template=name) == (f"<bos>{text}", trained)


def test_chatml_writes_tools_and_calls() -> None:
    messages = [system("s"), user("q"), assistant("so", tool_calls=[CALL, CALL])]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    text, trained = written(messages, [TOOL], chat_template="chatml")
    assert trained == f"so\n{call}\n{call}<|im_end|>"
    assert text == (
        '<|im_start|>system\ns\n\nTools, one JSON schema a line:\n<tools>\n{"type": "function", "function": '
        '{"name": "add"}}\n</tools>\nCall one by writing:\n<tool_call>\n{"name": NAME, "arguments": {...}}\n'
        f"</tool_call><|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n{trained}\n"
    )
    assert written([user("q"), assistant("", tool_calls=[CALL])], chat_template="chatml")[1] == f"{call}<|im_end|>"


@pytest.mark.parametrize("name", ["llama3", "plain"])
def test_shipped_templates_without_a_form_for_tools_say_so(name: str) -> None:
    with pytest.raises(StageError, match="no form for tools; chatml has one"):
        written([user("q"), assistant("", tool_calls=[CALL])], chat_template=name)
    with pytest.raises(StageError, match="does not write `tools`"):
        written(TALK, [TOOL], chat_template=name)


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("{prompt}\n", "q\n"),
        ("Question: {prompt}\nAnswer:", "Question: q\nAnswer:"),
        ("\"{'}} %} {{ \\n é 😀 {prompt}\t{% raw %}", "\"{'}} %} {{ \\n é 😀 q\t{% raw %}"),
    ],
)
def test_an_input_template_is_a_prompt_its_completion_and_eos(template: str, prompt: str) -> None:
    assert written([user("q"), assistant("r")], input_template=template) == (f"{prompt}r<eos>", "r<eos>")
    assert written([user("q"), assistant("r")], bos=True, input_template=template)[0] == f"<bos>{prompt}r<eos>"


@pytest.mark.parametrize(
    ("messages", "place"),
    [(TALK, "system"), ([user("q"), assistant("", tool_calls=[CALL])], "tool calls")],
)
def test_an_input_template_has_no_place_for_other_turns(messages: Any, place: str) -> None:
    with pytest.raises(StageError, match=f"a place for user and assistant turns alone, not for {place}"):
        written(messages, input_template="{prompt}\n")


def test_a_shipped_template_adds_no_special_token() -> None:
    tokenizer = word_level_tokenizer(("<|im_start|>",), 64)  # a word is no special token
    with pytest.raises(
        StageError, match=r"lacks <\|im_start\|>, <\|im_end\|>, special tokens of .* `chatml`; take `pl"
    ):
        with_template(tokenizer, base(chat_template="chatml"), Path)
    with_template(tokenizer, base(chat_template="plain"), Path)
    assert encode_completion(tokenizer, [user("q")], "r")[0][-3:] == [
        tokenizer.eos_token_id,
        *tokenizer("\n\n")["input_ids"][1:],
    ]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"chat_template": "chatlm"},
            "base.chat_template: there is no template `chatlm` (did you mean `chatml`?); there",
        ),
        ({"chat_template": "none.jinja"}, "none.jinja: there is no such file"),
        (
            {"chat_template": "wrong.jinja"},
            "wrong.jinja: syntax error in line 2 of the chat template: Unexpected end of",
        ),
        ({"chat_template": "filter.jinja"}, "syntax error in line 1 of the chat template: No filter named 'to_jsn'."),
        ({"chat_template": "random.jinja"}, "the chat template uses `random`, which writes something else every time"),
        ({"chat_template": "loop.jinja"}, "loop.jinja: the chat template does not end within 1 s for four short turns"),
        ({"chat_template": "huge.jinja"}, "huge.jinja: the chat template needs over 4 GiB of memory for four short"),
        ({"chat_template": "bytes.jinja"}, "bytes.jinja: this file cannot be read (it is not UTF-8)"),
        ({"chat_template": "plain", "input_template": "{prompt}"}, "are both set; remove one"),
        (
            {"input_template": "Answer!"},
            "base.input_template is 'Answer!'; it must hold {prompt} exactly once, as in \"",
        ),
        ({"input_template": "{prompt}{prompt}"}, "it must hold {prompt} exactly once"),
    ],
)
def test_what_is_wrong_with_a_template_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], problem: str
) -> None:
    if settings.get("chat_template") == "loop.jinja":
        monkeypatch.setattr(jinja_check, "_TRIAL_SECONDS", 1)
    (tmp_path / "loop.jinja").write_text(
        "{% for i in range(99999) %}{% for j in range(99999) %}a{% endfor %}{% endfor %}"
    )
    (tmp_path / "huge.jinja").write_text("{% set ns = messages[0].role[:1] %}{{ (ns * 9000000000) | length }}")
    (tmp_path / "wrong.jinja").write_text("{% for m in messages %}\n{{ m.content }}")
    (tmp_path / "filter.jinja").write_text("{{ messages | to_jsn }}")
    (tmp_path / "random.jinja").write_text("{{ messages | random }}")
    (tmp_path / "bytes.jinja").write_bytes(b"\xff")
    [found] = check_templates(base(**settings), tmp_path, "base")
    assert problem in found
    assert "\n" not in found


@pytest.mark.parametrize("template", [*TEMPLATES.values(), tagged("{{ m.content }}"), "{% break %}{{ 1 | tojson }}"])
def test_templates_of_the_families_are_valid(template: str) -> None:
    check_jinja(template.replace("{% break %}", "{% for a in [1] %}{% break %}{% endfor %}"))


def test_a_template_file_takes_the_place_of_the_tokenizers_own(tmp_path: Path) -> None:
    byte_level(DATED).save_pretrained(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": DATED}))
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}\n")
    tokenizer = with_template(load_tokenizer(tmp_path), base(chat_template="own.jinja"), tmp_path.joinpath)
    write_template(tmp_path, str(tokenizer.chat_template))
    assert load_tokenizer(tmp_path).chat_template == "{{ messages[0].content }}\n"
    assert "chat_template" not in json.loads(config.read_text())
