"""Broken data files: rows with wrong parts, in any kind of file, with bytes changed, truncated or compressed.

Import it as tests.rlhf_core.data.mutations.
"""

from __future__ import annotations

import bz2
import copy
import csv
import gzip
import io
import json
import lzma
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

USER = {"role": "user", "content": "2+2?"}
FOUR = {"role": "assistant", "content": "4"}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLING = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "4"}, FOUR]
ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": "a b c"}, {"text": "é\n"}, {"text": "x" * 50, "other": 1}],
    "conversations": [
        {"messages": [USER, FOUR]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
        {"prompt": "q", "completion": "a"},
        {"messages": CALLING, "tools": [TOOL]},
    ],
    "preferences": [
        {"prompt": "q", "chosen": "a", "rejected": "b", "margin": 0.5},
        {"chosen": [USER, FOUR], "rejected": [USER, {**FOUR, "content": "5"}]},
    ],
    "prompts": [
        {"prompt": "q", "answer": "a", "task": "t", "metadata": {"k": [1, {"x": None}]}},
        {"messages": [{"role": "system", "content": "s"}, USER], "level": 3},
        {"question": "q2", "tools": [TOOL]},
    ],
}
VALUES: list[Any] = [
    None, "", " ", "\n", "x", 0, 1, -1, 10**400, 1.5, float("nan"), float("inf"), True, [], {}, [[]], [None],
    {"": None},
    "\0", "a\ud800", "<|im_end|>", "<|im_start|>system\n", "<eos>", "{{ 1 }}", "[]", '[{"role": "user"}]', "é" * 20,
    {"role": "user", "content": "x"}, [{"type": "text", "text": "t"}], [{"type": "image_url"}], "assistant", "user",
    "function_call", '{"name": "f", "arguments": {}}', [CALL], {"name": "f"}, "\ufdd0", "\u2028", "\x1b[0m",
]  # fmt: skip
KEYS = [
    "messages", "conversations", "prompt", "question", "completion", "answer", "chosen", "rejected", "margin", "system",
    "tools", "task", "metadata", "text", "id", "role", "content", "from", "value", "tool_calls", "function_call",
    "name", "reasoning_content", "weight", "tool_call_id", "", "a b", "\ud800", "x\ny",
]  # fmt: skip
PIECES = [
    b"", b"\n", b"\r\n", b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\0", b"\xff", b"\xef\xbb\xbf",
    b"NaN", b"\\ud800", b"'",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class MutatedFile:
    data_format: str
    name: str
    content: bytes


def mutated_file(seed: int) -> MutatedFile:
    """The same file for the same seed; about a third are whole."""
    draw = random.Random(seed)
    data_format = draw.choice(list(ROWS))
    rows = json.loads(json.dumps(draw.choices(ROWS[data_format], k=draw.randint(1, 6))))
    for _ in range(draw.choice((0, 0, 1, 1, 2, 4))):
        _change_part(draw, draw.choice(rows))
    kind = draw.choice(list(_WRITERS))
    try:
        content = _WRITERS[kind](rows)
    except (pa.ArrowException, UnicodeError, ValueError, TypeError, OverflowError, RecursionError):
        kind, content = "d.jsonl", _lines(rows)  # this kind of file cannot hold such rows
    for _ in range(draw.choice((0, 0, 0, 1, 3))):
        content = _changed_bytes(draw, content)
    ending = draw.choice(("", "", "", *_COMPRESS))
    if ending and kind != "d.parquet":
        content = _COMPRESS[ending](content)
        if draw.random() < 0.3:
            content = _changed_bytes(draw, content)
        kind += ending
    return MutatedFile(data_format, kind, content)


def _change_part(draw: random.Random, value: Any) -> None:
    """Change, add, take away, repeat or nest something at a random place below `value`, a mapping or a list."""
    places = list(value) if isinstance(value, dict) else list(range(len(value)))
    if places and draw.random() < 0.6:
        below = value[draw.choice(places)]
        if isinstance(below, dict | list):
            _change_part(draw, below)
            return
    kind = draw.randrange(5)
    if kind == 0 and places:
        value[draw.choice(places)] = copy.deepcopy(draw.choice(VALUES))
    elif kind == 1 and places:
        del value[draw.choice(places)]
    elif kind == 2 and places:
        place = draw.choice(places)
        for _ in range(draw.choice((1, 3, 150, 300))):
            value[place] = [value[place]]
    elif isinstance(value, dict):
        value[draw.choice(KEYS)] = copy.deepcopy(draw.choice(VALUES))
    else:
        value.insert(draw.randint(0, len(value)), copy.deepcopy(draw.choice([*VALUES, *value])))


def _changed_bytes(draw: random.Random, content: bytes) -> bytes:
    start, length = draw.randint(0, len(content)), draw.choice((0, 1, 1, 5, 50))
    match draw.randrange(6):
        case 0:
            return content[:start]
        case 1:
            return content[:start] + bytes(draw.randrange(256) for _ in range(length)) + content[start + length :]
        case 2:
            return content.decode("utf-8", "replace").encode(draw.choice(("utf-16", "utf-32", "latin-1")), "replace")
        case 3:
            return content + content[start:]
        case _:
            return content[:start] + draw.choice(PIECES) + content[start + length :]


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _separated(delimiter: str) -> Callable[[list[dict[str, Any]]], bytes]:
    def write(rows: list[dict[str, Any]]) -> bytes:
        text = io.StringIO(newline="")
        names = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(text, names, delimiter=delimiter)
        writer.writeheader()
        for row in rows:
            writer.writerow({k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()})
        return text.getvalue().encode()

    return write


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    made = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows), made)
    return made.getvalue()


_WRITERS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "d.jsonl": _lines,
    "raw.jsonl": lambda rows: "\r\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode(),
    "list.json": lambda rows: json.dumps(rows).encode(),
    "indented.json": lambda rows: json.dumps(rows, indent=1).encode(),
    "over lines.jsonl": lambda rows: "\n".join(json.dumps(row, indent=1) for row in rows).encode(),
    "d.csv": _separated(","),
    "d.tsv": _separated("\t"),
    "d.parquet": _parquet,
}
_COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
    ".zst": lambda content: pa.Codec("zstd").compress(content, asbytes=True),
}  # fmt: skip
