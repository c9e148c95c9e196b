"""YAML text as plain values: text, finite numbers, true/false, null, lists, and mappings whose keys are text.

YAML 1.2 is read: 1e-4 is a number, `no` is a word. A date stays text. What aliases share is copied to each place.
Every mistake is a YAMLTextError with its line, also one that would take for ever: a recipe is a small file.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, ReusedAnchorWarning, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from rlhf_core.errors import shortened

MAX_BYTES = 2**18  # of a recipe: a list of so many bytes takes seconds to parse
_MAX_VALUES = 100_000  # after aliases are resolved
_MAX_DEPTH = 50
_TAG = "tag:yaml.org,2002:"
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_PAIRS = re.compile("[\ud800-\udbff][\udc00-\udfff]")  # as JSON escapes a character beyond U+FFFF


# What the parser's reasons mean, and what to do.
_MEANINGS = {
    "mapping values are not allowed": (
        "`key: value` may not stand here: indent it as its neighbours, or put a text that holds `: ` in quotes"
    ),
    "could not find expected ':'": "a key in this line, or the one above, has no `: ` behind it: write `key: value`",
    "that cannot start any token": "a text that begins so needs quotes",
    "undefined alias": "`*name` repeats what `&name` marks above; a text that begins with `*` needs quotes",
    "unexpected end of stream": "a quote is opened here and never closed",
    "<stream end>": "a bracket is opened here and never closed",
    "<document start>": "more text follows where the document ends: is a line indented wrongly, or a key missing?",
}


class YAMLTextError(ValueError):
    """The text says what is wrong, and in which line."""


def read_yaml_file(path: Path) -> Any:
    """The values of the YAML file. Raises YAMLTextError, also for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise YAMLTextError(f"this file cannot be read ({error.strerror})") from error
    if len(content) > MAX_BYTES:
        raise YAMLTextError(f"this file is larger than {MAX_BYTES} bytes, so it is no recipe; name its data by paths")
    try:
        return read_yaml(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise YAMLTextError(f"line {line}: not UTF-8 text ({error.reason}): save the file as UTF-8") from error


def read_yaml(text: str) -> Any:
    """The values of one YAML document; None if it is empty. Raises YAMLTextError."""
    _require_no_directive(text)
    yaml = YAML(typ="safe", pure=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReusedAnchorWarning)  # an alias repeats the anchor last written
            document = yaml.compose(StringIO(text))
        return None if document is None else _Values(yaml.constructor).of(document)
    except RecursionError as error:
        raise YAMLTextError(f"more than {_MAX_DEPTH} lists and mappings inside each other") from error
    except MarkedYAMLError as error:
        # Where what is never closed was opened: the problem is noticed at the end of the text.
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
    except YAMLError as error:
        raise YAMLTextError(f"not valid YAML: {' '.join(str(error).split())}") from error


def _require_no_directive(text: str) -> None:
    """They stand before the document; by one for YAML 1.1, `no` would be a truth value and 010 be eight."""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("%") and line.split() != ["%YAML", "1.2"]:
            raise YAMLTextError(
                f"line {number}: {_short(line)} is a directive, and recipes are YAML 1.2 without any: take it out, "
                "or put a text that begins with `%` in quotes"
            )
        if line.strip() and not line.startswith(("#", "%")):
            return


def _explained(reason: str) -> str:
    if "'\\t'" in reason:
        return f"a tab stands where only spaces may: replace tabs by spaces ({reason})"
    if "another document" in reason:
        return f"`---` begins a second document, but a recipe is one: take it out ({reason})"
    said = shortened(reason, 100)
    return next((f"{meaning} ({said})" for part, meaning in _MEANINGS.items() if part in reason), said)


class _Values:
    """The plain values of a document's nodes."""

    def __init__(self, constructor: SafeConstructor) -> None:
        self._scalars: dict[str, Callable[[ScalarNode], Any]] = {
            "null": lambda node: None,
            "str": lambda node: node.value,
            "timestamp": lambda node: node.value,
            "bool": constructor.construct_yaml_bool,
            "int": constructor.construct_yaml_int,
            "float": constructor.construct_yaml_float,
            "value": lambda node: node.value,  # a lone `=`
        }
        self._count = 0

    def of(self, node: Node, depth: int = 0) -> Any:
        self._count += 1
        if self._count > _MAX_VALUES:
            raise _problem(node, f"more than {_MAX_VALUES} values, once every alias stands for what it repeats")
        if depth > _MAX_DEPTH:
            raise _problem(node, f"more than {_MAX_DEPTH} lists and mappings inside each other, or an alias in itself")
        kind = str(node.tag).removeprefix(_TAG)
        if isinstance(node, MappingNode) and kind == "map":
            return self._mapping(node, depth)
        if isinstance(node, SequenceNode) and kind == "seq":
            return [self.of(item, depth + 1) for item in node.value]
        if isinstance(node, ScalarNode) and kind in self._scalars:
            return self._scalar(node, kind)
        tag = _short(str(node.tag).replace(_TAG, "!!"))
        raise _problem(node, f"the tag {tag} is not read here: write a plain value")

    def _mapping(self, node: MappingNode, depth: int) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        merges = 0
        for key_node, value_node in node.value:
            if key_node.tag == f"{_TAG}merge":
                merges += 1
                if merges > 1:
                    raise _problem(key_node, "`<<` occurs twice in one mapping: write `<<: [*a, *b]`")
                for mapping in self._merged(value_node, depth):
                    merged = mapping | merged  # of several the first counts
                continue
            key = self._key(key_node, depth)
            if key in own:
                raise _problem(key_node, f"the key {_short(key)} occurs twice in one mapping: take one away")
            own[key] = self.of(value_node, depth + 1)
        return merged | own

    def _merged(self, node: Node, depth: int) -> Iterator[dict[str, Any]]:
        for source in node.value if isinstance(node, SequenceNode) else [node]:
            if not isinstance(source, MappingNode):
                raise _problem(source, "`<<` takes a mapping, or a list of mappings")
            yield self.of(source, depth + 1)

    def _key(self, node: Node, depth: int) -> str:
        key = self.of(node, depth + 1)
        if not isinstance(key, str):
            raise _problem(node, f"a key must be text, this is {_shown(node)}: put it in quotes")
        return key

    def _scalar(self, node: ScalarNode, kind: str) -> Any:
        try:
            value = self._scalars[kind](node)
        except (ValueError, KeyError) as error:
            raise _problem(node, f"{_shown(node)} is not a value of the type {kind}") from error
        if isinstance(value, float) and not math.isfinite(value):
            raise _problem(node, f"{_shown(node)} is not a finite number")
        if isinstance(value, str):
            value = _PAIRS.sub(_paired, value)
        if isinstance(value, str) and _NO_TEXT.search(value):
            raise _problem(node, "a text holds a NUL character or half a surrogate pair")
        return value


def _paired(found: re.Match[str]) -> str:
    return found.group().encode("utf-16-le", "surrogatepass").decode("utf-16-le")


def _shown(node: Node) -> str:
    if not isinstance(node, ScalarNode):
        return "a list or a mapping"
    return _short(str(node.value)) if node.value else "empty"


def _short(text: str) -> str:
    return f"`{shortened(text, 40)}`"


def _problem(node: Node, sentence: str) -> YAMLTextError:
    return YAMLTextError(f"line {node.start_mark.line + 1}: {sentence}")
