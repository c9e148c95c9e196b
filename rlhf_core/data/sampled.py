"""What is made of completions with rewards: preference pairs, labelled completions, and the best of each prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from rlhf_core.data.formats import Row, row_id
from rlhf_core.data.formats.base import is_blank
from rlhf_core.errors import StageError

Entry = Mapping[str, Any]


def distinct(row: Mapping[str, Any], counts: Counter[str]) -> list[Entry]:
    """The row's completions that can be used: of equal texts the first, none that is empty.

    Raises StageError if one has no reward. counts: of what is left out.
    """
    seen: dict[str, Entry] = {}
    for entry in row["completions"]:
        if "reward" not in entry:
            raise StageError(f"row {row['id']} has a completion without `reward`: give the stage `generate` rewards")
        text = entry["text"].strip()
        if is_blank(text):
            counts["empty_completions"] += 1
        elif text in seen:
            counts["equal_completions"] += 1
        else:
            seen[text] = entry
    return list(seen.values())


def pairs_of(row: Mapping[str, Any], *, every: bool, margin: float, counts: Counter[str]) -> Iterator[Row]:
    """Preference rows of a row of completions.

    every: all pairs, else that of the highest and the lowest reward, the first of equal ones. Pairs whose rewards are
    not more than `margin` apart are ties, which are counted and left out.
    """
    entries = distinct(row, counts)
    found = False
    for one, other in combinations(entries, 2) if every else _extremes(entries):
        better, worse = (one, other) if one["reward"] >= other["reward"] else (other, one)
        if better["reward"] - worse["reward"] <= margin:
            counts["ties"] += 1
            continue
        found = True
        yield _with_id(row, {"prompt": row["prompt"], "chosen": better["text"], "rejected": worse["text"]})
    counts["prompts_without_pair"] += not found


def labelled(row: Mapping[str, Any], *, threshold: float, margin: float, counts: Counter[str]) -> Iterator[Row]:
    """A row of the format `unpaired` for each completion: good if its reward is the threshold or more.

    Rewards less than `margin` from the threshold are counted and left out.
    """
    for entry in distinct(row, counts):
        above = float(entry["reward"]) - threshold
        if abs(above) < margin:
            counts["near_threshold"] += 1
            continue
        label = above >= 0
        counts["desirable" if label else "undesirable"] += 1
        yield _with_id(row, {"prompt": row["prompt"], "completion": entry["text"], "label": label})


def best_of(row: Mapping[str, Any], *, least_reward: float | None, counts: Counter[str]) -> Iterator[Row]:
    """The conversation with the completion of the highest reward, the first of equal ones; none below least_reward."""
    entries = distinct(row, counts)
    best = max(entries, key=lambda entry: float(entry["reward"]), default=None)
    if best is None or (least_reward is not None and best["reward"] < least_reward):
        counts["prompts_left_out"] += 1
        return
    reply = {"role": "assistant", "content": best["text"]}
    yield _with_id(row, {"messages": [*row["prompt"], reply]})


def _extremes(entries: Sequence[Entry]) -> Iterator[tuple[Entry, Entry]]:
    if len(entries) > 1:
        rewards = [float(entry["reward"]) for entry in entries]
        high, low = rewards.index(max(rewards)), rewards.index(min(rewards))
        yield (entries[high], entries[low]) if high != low else (entries[0], entries[1])


def _with_id(row: Mapping[str, Any], made: Row) -> Row:
    made |= {"tools": row["tools"]} if "tools" in row else {}
    return {"id": row_id(made), **made}
