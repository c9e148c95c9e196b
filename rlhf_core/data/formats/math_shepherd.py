"""Rows of Math-Shepherd, arXiv:2312.08935: `input` with a tag after each step, `label` with `+` or `-` in its place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlhf_core.data.formats.base import Row, RowError

COLUMNS = frozenset({"input", "label"})
_LABELS = {"+": True, "-": False}
_FIRST_STEP = re.compile(r"\bStep 1:")


def is_math_shepherd(row: Mapping[str, Any]) -> bool:
    return row.keys() >= COLUMNS and "steps" not in row


def as_steps(row: Mapping[str, Any]) -> Row:
    """Return `prompt`, `steps` and `labels`, without the tags. Raises RowError if the row has another form.

    The tag is found, since it is not in the row: `label` differs from `input` in these words alone.
    """
    texts = row["input"], row["label"]
    if not all(isinstance(text, str) for text in texts):
        raise RowError("`input` and `label` must be text", "`input` or `label` is not text")
    words, labelled = (re.split(r"(\s+)", text.strip()) for text in texts)
    differ = [index for index, pair in enumerate(zip(words, labelled, strict=False)) if pair[0] != pair[1]]
    tags, labels = {words[index] for index in differ}, [labelled[index] for index in differ]
    if len(words) != len(labelled) or len(tags) != 1 or not _LABELS.keys() >= set(labels):
        raise RowError(
            "`label` must be `input` with `+` or `-` in place of each tag, such as `ки`",
            "`label` is not `input` with + and - for tags",
        )
    pieces, start = list[str](), 0
    for index in differ:
        pieces.append("".join(words[start:index]).strip())
        start = index + 1
    begin = _FIRST_STEP.search(pieces[0])
    if begin is None or "".join(words[start:]).strip():
        raise RowError("`input` must be a question, `Step 1:`, and further steps, each with a tag after it")
    question, pieces[0] = pieces[0][: begin.start()].strip(), pieces[0][begin.start() :]
    return {"prompt": question, "steps": pieces, "labels": [_LABELS[label] for label in labels]}
