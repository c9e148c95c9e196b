"""Chat templates of a recipe's base model: shipped ones by name, a file, or a plain input template.

A shipped template begins with BOS if the tokenizer prepends one to a text, and needs its special tokens in the
tokenizer: none is added, since a new token would have a random embedding.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.chat.jinja_check import check_jinja, try_jinja
from rlhf_core.config.stages.base_model import BaseModelConfig
from rlhf_core.errors import StageError, did_you_mean
from rlhf_core.models.folders.folder import TEMPLATES
from rlhf_core.system.paths import file_problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEMPLATE_FILE = "chat_template.jinja"
PROMPT_FIELD = "{prompt}"


@dataclass(frozen=True, slots=True)
class ShippedTemplate:
    text: str  # Jinja, without BOS
    tokens: tuple[str, ...]  # special tokens that the tokenizer must have, beside EOS


_CHATML = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
{{- 'Tools, one JSON schema a line:\\n<tools>\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}
{{- '</tools>\\nCall one by writing:\\n<tool_call>\\n{"name": NAME, "arguments": {...}}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first else '' }}
{{- '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

_NO_TOOLS = """\
{%- if message.role == 'tool' or message.tool_calls %}
{{- raise_exception('this template has no form for tools; chatml has one') }}
{%- endif %}"""

_LLAMA3 = f"""\
{{%- for message in messages %}}
{_NO_TOOLS}
{{{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}}}{{% endif %}}"""

_PLAIN = f"""\
{{%- for message in messages %}}
{_NO_TOOLS}
{{{{- '### ' + message.role | capitalize + ':\\n' + message.content }}}}
{{{{- eos_token if message.role == 'assistant' else '' }}}}
{{{{- '\\n\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '### Assistant:\\n' }}}}{{% endif %}}"""

SHIPPED = {
    "chatml": ShippedTemplate(_CHATML, ("<|im_start|>", "<|im_end|>")),
    "llama3": ShippedTemplate(_LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "plain": ShippedTemplate(_PLAIN, ()),
}


def check_templates(base: BaseModelConfig, root: Path, section: str) -> Iterator[str]:
    """Yield the problems of the recipe's templates that need no tokenizer.

    root: the recipe's folder, which contains a template file.
    """
    if base.chat_template is not None and base.input_template is not None:
        yield f"{section}.chat_template and {section}.input_template are both set; remove one"
    if base.input_template is not None and base.input_template.count(PROMPT_FIELD) != 1:
        yield (
            f"{section}.input_template is {base.input_template!r}; it must hold {PROMPT_FIELD} exactly once, "
            r'as in "{prompt}\n"'
        )
    if base.template_file is not None:
        problem = file_problem(root / base.template_file)
        if problem:
            yield f"{section}.chat_template: {base.template_file}: {problem}"
            return
        try:
            try_jinja((root / base.template_file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            yield f"{section}.chat_template: {base.template_file}: this file cannot be read ({reason})"
        except StageError as error:
            yield f"{section}.chat_template: {base.template_file}: {error}"
    elif base.chat_template is not None and base.chat_template not in SHIPPED:
        nearest = did_you_mean(base.chat_template, SHIPPED)
        yield (
            f"{section}.chat_template: there is no template `{base.chat_template}`{nearest}; there are "
            f"{', '.join(SHIPPED)}, or name a file that ends in .jinja"
        )


def with_template(
    tokenizer: PreTrainedTokenizerFast, base: BaseModelConfig, user_file: Callable[[str], Path]
) -> PreTrainedTokenizerFast:
    """Return `tokenizer` with the recipe's template, if it has one.

    user_file: returns the file of a path in the recipe.
    Raises StageError if the template is no Jinja, or the tokenizer lacks its special tokens.
    """
    template = _template(tokenizer, base, user_file)
    if template is not None:
        check_jinja(template)
        tokenizer.chat_template = template
    return tokenizer


def unfit_template(
    base: BaseModelConfig, root: Path, section: str, tokenizer: Callable[[], PreTrainedTokenizerFast]
) -> Iterator[str]:
    """Return the reason why the recipe's template does not fit the tokenizer, which is loaded only if there is one."""
    if base.chat_template is not None:
        try:
            with_template(tokenizer(), base, root.joinpath)
        except StageError as error:
            yield f"{section}.chat_template: {error}"


def write_template(folder: Path, template: str) -> None:
    """Make `template` the only chat template of a model folder."""
    (folder / TEMPLATE_FILE).write_text(template, encoding="utf-8", newline="\n")
    shutil.rmtree(folder / TEMPLATES, ignore_errors=True)
    path = folder / "tokenizer_config.json"
    if path.is_file():
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if settings.pop("chat_template", None) is not None:
            path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _template(
    tokenizer: PreTrainedTokenizerFast, base: BaseModelConfig, user_file: Callable[[str], Path]
) -> str | None:
    if base.template_file is not None:
        return user_file(base.template_file).read_text(encoding="utf-8")
    if base.input_template is not None:
        return _begin(tokenizer) + _input_template(base.input_template)
    if base.chat_template is None:
        return None
    shipped = SHIPPED[base.chat_template]
    lacking = [token for token in shipped.tokens if not _has_special(tokenizer, token)]
    if lacking:
        raise StageError(
            f"the tokenizer lacks {', '.join(lacking)}, special tokens of the chat template `{base.chat_template}`; "
            "take `plain`, which needs none"
        )
    return _begin(tokenizer) + shipped.text


def _input_template(text: str) -> str:
    """Return Jinja for a prompt's text in `text`, then the completion and EOS; for every pair of turns again."""
    before, _, after = text.partition(PROMPT_FIELD)
    return (
        "{%- for message in messages %}"
        f"{{%- if message.role == 'user' %}}{{{{- {before!a} + message.content + {after!a} }}}}"
        "{%- elif message.role == 'assistant' and not message.tool_calls %}{{- message.content + eos_token }}"
        "{%- else %}{{- raise_exception('an input_template has a place for user and assistant turns alone, not for ' "
        "+ (message.role if message.role != 'assistant' else 'tool calls')) }}{% endif %}{% endfor %}"
    )


def _begin(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return BOS if the tokenizer prepends it to a text: a template has to write it itself."""
    bos = tokenizer.bos_token_id
    return "{{- bos_token }}" if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else ""


def _has_special(tokenizer: PreTrainedTokenizerFast, token: str) -> bool:
    return token in {str(added) for added in tokenizer.added_tokens_decoder.values() if added.special}
