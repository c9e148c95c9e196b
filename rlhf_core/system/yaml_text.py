"""YAML text parsed into JSON values: text, finite numbers, true/false, null, lists, and mappings with text keys.

YAML 1.2 is read: 1e-4 is a number, `no` is a word. A date stays text. Every mistake is a YAMLTextError.
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, ReusedAnchorWarning, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from rlhf_core.errors import reason_of, shortened
from rlhf_core.system.json_text import parse_json

MAX_BYTES = 2**18  # of a recipe: a list of so many bytes takes seconds to parse
_MAX_MERGED = 100_000  # values that `<<` copies
_MAX_SIZE = 2**20  # characters of its JSON
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # as JSON escapes it
_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_KEY_TAGS = {f"{_TAG}str", f"{_TAG}timestamp", f"{_TAG}value", _MERGE}
_DIRECTIVE = re.compile(r"\ufeff?(?:[^\S\n]*(?:#.*)?\n)*(%(?!YAML 1\.2\s).*)")  # before the document

# Meaning of the parser's reasons, and the remedy.
_MEANINGS = {
    "mapping values are not allowed": (
        "`key: value` may not stand here: indent it as its neighbours, or put a text that holds `: ` in quotes"
    ),
    "could not find expected ':'": "a key in this line, or the one above, has no `: ` behind it: write `key: value`",
    "that cannot start any token": "a text that begins so needs quotes",
    "found duplicate": "the key stands twice in one mapping: remove one",
    "could not determine a constructor": "this tag is not read here: write a plain value",
    "for merging, but found": "`<<` takes a mapping, or a list of mappings",
    "undefined alias": "`*name` repeats what `&name` marks above; a text that begins with `*` needs quotes",
    "unexpected end of stream": "a quote is opened here and never closed",
    "<stream end>": "a bracket is opened here and never closed",
    "<document start>": "more text follows where the document ends: is a line indented wrongly, or a key missing?",
}


class YAMLTextError(ValueError):
    """The text names the problem and its line."""


def read_yaml_file(path: Path) -> Any:
    """Return the values of the YAML file. Raises YAMLTextError, also for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise YAMLTextError(f"this file cannot be read ({error.strerror})") from error
    if len(content) > MAX_BYTES:
        raise YAMLTextError(
            f"this file is larger than {MAX_BYTES} bytes, so it is not a recipe; name its data by paths"
        )
    try:
        return read_yaml(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise YAMLTextError(f"line {line}: not UTF-8 text ({error.reason}): save the file as UTF-8") from error


def read_yaml(text: str) -> Any:
    """Return the values of one YAML document; None if it is empty. Raises YAMLTextError."""
    if directive := _DIRECTIVE.match(text):
        raise YAMLTextError(f"the directive `{shortened(directive[1], 40)}` is not read: recipes are YAML 1.2")
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReusedAnchorWarning)  # an alias repeats the anchor last written
            document = yaml.load(text)
    except RecursionError as error:
        raise YAMLTextError("lists and mappings too deep inside each other") from error
    except MarkedYAMLError as error:
        # The start of an unclosed part: the problem is noticed at the end of the text.
        opened = error.context_mark if error.context and "while parsing a flow" in error.context else None
        mark = opened or (error.context_mark if "quoted scalar" in str(error.context) else None) or error.problem_mark
        line = "" if mark is None else f"line {mark.line + 1}: "
        reason = " ".join(str(error.problem or error.context).split())
        raise YAMLTextError(f"{line}not valid YAML: {_explained(reason)}") from error
    except ReaderError as error:
        line = f"line {text[: error.position].count(chr(10)) + 1}: "
        hint = ": is the file UTF-16? save it as UTF-8" if error.character == 0 else ": take it out"
        what = f"the character U+{error.character:04X} may not stand here"
        raise YAMLTextError(f"{line}not valid YAML: {what}{hint}") from error
    except (YAMLError, ValueError, KeyError, IndexError) as error:  # the last three: a value does not fit its tag
        raise YAMLTextError(f"not valid YAML: {reason_of(error)}") from error
    return _plain(document)


def _explained(reason: str) -> str:
    if "'\\t'" in reason:
        return f"a tab stands where only spaces may: replace tabs by spaces ({reason})"
    if "another document" in reason:
        return f"`---` begins a second document, but a recipe is one: take it out ({reason})"
    short = shortened(reason, 100)
    return next((f"{meaning} ({short})" for part, meaning in _MEANINGS.items() if part in reason), short)


class _Constructor(SafeConstructor):
    """Rejects duplicate keys beside `<<` and bounds copies of `<<`, which ruamel's constructor does not."""

    _merged = 0

    def flatten_mapping(self, node: MappingNode) -> None:
        seen: set[str] = set()
        for key, value in () if getattr(node, "merge", None) else node.value:
            if not isinstance(key, ScalarNode) or key.tag not in _KEY_TAGS:
                raise ConstructorError(None, None, "a key must be text: put it in quotes", key.start_mark)
            if key.value in seen:
                raise ConstructorError(None, None, f"found duplicate key `{key.value}`", key.start_mark)
            seen.add(key.value)
            if key.tag == _MERGE:
                for source in value.value if isinstance(value, SequenceNode) else [value]:
                    self._count(source)
        super().flatten_mapping(node)

    def _count(self, source: Node) -> None:
        if isinstance(source, MappingNode):
            self.flatten_mapping(source)
            self._merged += len(source.value)
        if self._merged > _MAX_MERGED:
            raise ConstructorError(None, None, f"`<<` repeats more than {_MAX_MERGED} values", source.start_mark)


_Constructor.add_constructor(f"{_TAG}timestamp", SafeConstructor.construct_yaml_str)


def _plain(document: Any) -> Any:
    """Convert to plain values through JSON, which copies what aliases share."""
    parts: list[str] = []
    size = 0
    try:
        for part in json.JSONEncoder(ensure_ascii=False).iterencode(document):
            size += len(part)
            if size > _MAX_SIZE:
                raise YAMLTextError(f"more than {_MAX_SIZE} characters, once every alias stands for what it repeats")
            parts.append(part)
        # Joins the halves in which JSON in ASCII writes a character beyond U+FFFF.
        text = "".join(parts).encode("utf-16", "surrogatepass").decode("utf-16")
        if _NUL.search(text):
            raise YAMLTextError("a text holds a NUL character")
        return parse_json(text)
    except UnicodeDecodeError as error:
        raise YAMLTextError("a text holds half a surrogate pair") from error
    except RecursionError as error:
        raise YAMLTextError("lists and mappings too deep inside each other") from error
    except (TypeError, ValueError) as error:  # of a set, of bytes, of an alias in itself, of NaN
        raise YAMLTextError(str(error)) from error
