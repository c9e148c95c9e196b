"""Tokenizers and chat templates with the difficult properties of real model families.

Import it as tests.rlhf_core.chat.families.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlhf_core.chat.encoding import encode_conversation

SPECIAL = ("<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|eom|>")


def byte_level(template: str | None = None, *, bos: bool = False) -> PreTrainedTokenizerFast:
    """Bytes, with merges of newlines and of a space before a letter; bos: whether texts begin with <bos>."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("Ġ", "a"), ("Ċ", "Ġ"), ("a", "b")]
    pieces = [*SPECIAL, *letters, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return _wrapped(tokenizer, template)


def space_before_text(template: str) -> PreTrainedTokenizerFast:
    """Characters, with a space put before every text, as SentencePiece does."""
    characters = ["▁", "\n", *map(chr, range(33, 127))]
    merges = [("▁", "a"), ("▁", "b")]
    pieces = [*SPECIAL, *characters, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return _wrapped(tokenizer, template)


def _wrapped(tokenizer: Tokenizer, template: str | None) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>",
        additional_special_tokens=list(SPECIAL[2:]), clean_up_tokenization_spaces=False,
    )  # fmt: skip
    wrapped.chat_template = template
    return wrapped


def one_line(template: str) -> str:
    return "".join(line.strip() for line in template.splitlines())


# Turns end with <|im_end|>, which is not EOS, and a newline.
TURNS = one_line(r"""
    {% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""")

DEFAULT_SYSTEM = (
    one_line(r"""
    {% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe of use.<|im_end|>\n' }}{% endif %}""")
    + TURNS
)

# Reasoning is kept in what follows the last user turn, and stripped before it.
STRIPS_REASONING = one_line(r"""
    {% set ns = namespace(last=-1) %}
    {% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
    {% for m in messages %}{% set content = m.content %}
    {% if m.role == 'assistant' and loop.index0 < ns.last %}
    {% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
    {{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{% endfor %}
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""")

# The system turn becomes part of the first user turn; turns must alternate; contents are trimmed.
MERGES_SYSTEM = one_line(r"""
    {% set turns = messages %}{% set system = '' %}
    {% if messages[0].role == 'system' %}{% set turns = messages[1:] %}
    {% set system = '<<' + messages[0].content + '>>\n\n' %}{% endif %}
    {{ bos_token }}{% for m in turns %}
    {% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns must alternate') }}{% endif %}
    {% if m.role == 'user' %}{{ '[Q] ' + (system if loop.first else '') + m.content | trim + ' [/Q]' }}
    {% else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}""")

REFUSES_SYSTEM = one_line(r"""
    {{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
    {% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}
    {{ '<|im_start|>' + role + '\n' + m.content | trim + '<|im_end|>\n' }}{% endfor %}
    {% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}""")

ENDS_LAST_TURN_ONLY = one_line(r"""
    {% for m in messages %}{{ m.role + ': ' + m.content }}
    {{ eos_token if loop.last and m.role == 'assistant' else '\n' }}{% endfor %}
    {% if add_generation_prompt %}assistant: {% endif %}""")

ENDS_NO_TURN = one_line(r"""
    {% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}
    {% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}""")

# Every turn ends with <|im_end|>, and the whole conversation with EOS.
ENDS_TWICE = TURNS.replace("{% endfor %}", "{% if loop.last and m.role == 'assistant' %}<eos>{% endif %}{% endfor %}")

DATED = r"{{ '<|im_start|>system\nToday is ' + strftime_now('%d %b %Y %H:%M:%S.%f') + '<|im_end|>\n' }}" + TURNS

WITH_TOOLS = one_line(r"""
    {% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}
    {% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
    {% if m.tool_calls %}{% for call in m.tool_calls %}{{ 'call ' + call.function | tojson }}{% endfor %}{{ '<|eom|>' }}
    {% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""")


def tagged(inside: str, before: str = "", after: str = "") -> str:
    """TURNS, with `inside` of an assistant turn between the tags; all three are Jinja."""
    return (
        r"{% for m in messages %}{% if m.role == 'assistant' %}"
        f"{before}{{% generation %}}{inside}{{% endgeneration %}}{after}"
        r"{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


# Every template that takes conversations of user and assistant turns.
TEMPLATES: dict[str, str] = {
    "turns": TURNS,
    "default system": DEFAULT_SYSTEM,
    "strips reasoning": STRIPS_REASONING,
    "merges system": MERGES_SYSTEM,
    "refuses system": REFUSES_SYSTEM,
    "ends last turn only": ENDS_LAST_TURN_ONLY,
    "ends no turn": ENDS_NO_TURN,
    "ends twice": ENDS_TWICE,
    "dated": DATED,
    "with tools": WITH_TOOLS,
}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **others}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


TALK = [user("q1"), assistant("r1"), user("q2"), assistant("r2")]


def texts(tokenizer: PreTrainedTokenizerFast, messages: Any, tools: Any = None) -> list[str]:
    """Each sequence as text, what is trained in brackets."""
    shown = []
    for ids, mask in encode_conversation(tokenizer, messages, tools):
        text = ""
        for index, (token, trained) in enumerate(zip(ids, mask, strict=True)):
            before = index > 0 and mask[index - 1]
            text += ("⟦" if trained and not before else "⟧" if before and not trained else "") + tokenizer.decode(token)
        shown.append(text + ("⟧" if mask[-1] else ""))
    return shown
