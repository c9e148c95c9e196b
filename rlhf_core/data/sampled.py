"""Datasets from completions with rewards: pairs, labelled completions, the best of each prompt, conditional text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

from rlhf_core.chat.hints import append_to_prompt
from rlhf_core.chat.sampled_tokens import sampled_column
from rlhf_core.config.stages.sampled import REWARD_PLACE
from rlhf_core.config.texts import is_blank
from rlhf_core.data.formats import Row, row_id
from rlhf_core.errors import ConversationError, StageError

Entry = Mapping[str, Any]
# The better of two completions, or the counter of a dropped pair.
Outcome = Literal["one", "other", "ties", "order_dependent", "unjudged"]


def counted_truncated(row: Mapping[str, Any], counts: Counter[str], *, drop: bool) -> Mapping[str, Any]:
    """Return `row` with its truncated completions counted, and removed with `drop`."""
    ended = [entry for entry in row["completions"] if entry.get("finish_reason") != "length"]
    counts["truncated_completions"] += len(row["completions"]) - len(ended)
    return {**row, "completions": ended} if drop else row


def distinct(row: Mapping[str, Any], counts: Counter[str], *, rewarded: bool = True) -> list[Entry]:
    """Return the row's usable completions: the first of equal texts, without empty ones.

    Raises StageError if one has no reward, unless they are not `rewarded`. counts: of dropped ones.
    """
    seen: dict[str, Entry] = {}
    for entry in row["completions"]:
        if rewarded and "reward" not in entry:
            raise StageError(f"row {row['id']} has a completion without `reward`: give the stage `generate` rewards")
        text = entry["text"].strip()
        if is_blank(text):
            counts["empty_completions"] += 1
        elif text in seen:
            counts["equal_completions"] += 1
        else:
            seen[text] = entry
    return list(seen.values())


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two completions of a row, one of which may be better."""

    row: Mapping[str, Any]
    one: Entry
    other: Entry


def comparisons(
    row: Mapping[str, Any], *, every: bool, counts: Counter[str], rewarded: bool = True
) -> Iterator[Comparison]:
    """Yield pairs of the row's completions.

    every: all pairs, which need no rewards if they are not `rewarded`; else that of the highest and the lowest reward,
    the first of equal ones.
    """
    entries = distinct(row, counts, rewarded=rewarded or not every)
    for one, other in combinations(entries, 2) if every else _extremes(entries):
        yield Comparison(row, one, other)


def by_reward(pair: Comparison, margin: float) -> Outcome:
    """Compare by rewards; a difference of at most `margin` is a tie."""
    gap = float(pair.one["reward"]) - float(pair.other["reward"])
    return "ties" if abs(gap) <= margin else "one" if gap > 0 else "other"


def preferences(
    compared: Sequence[Comparison], outcomes: Sequence[Outcome], counts: Counter[str], *, margin: bool = False
) -> Iterator[Row]:
    """Yield a row of the format `preferences` for each comparison with a better one; the others are counted.

    margin: write the difference of the two rewards.
    """
    for pair, outcome in zip(compared, outcomes, strict=True):
        if outcome == "one" or outcome == "other":
            chosen, rejected = (pair.one, pair.other) if outcome == "one" else (pair.other, pair.one)
            pair_row = {"prompt": pair.row["prompt"], "chosen": chosen["text"], "rejected": rejected["text"]}
            if margin:
                pair_row["margin"] = float(chosen["reward"]) - float(rejected["reward"])
            yield _with_id(pair.row, pair_row, chosen=chosen, rejected=rejected)
        else:
            counts[outcome] += 1


def labelled(row: Mapping[str, Any], *, threshold: float, margin: float, counts: Counter[str]) -> Iterator[Row]:
    """Yield a row of the format `unpaired` for each completion: good if its reward is the threshold or more.

    Rewards less than `margin` from the threshold are counted and dropped.
    """
    for entry in distinct(row, counts):
        above = float(entry["reward"]) - threshold
        if abs(above) < margin:
            counts["near_threshold"] += 1
            continue
        label = above >= 0
        counts["desirable" if label else "undesirable"] += 1
        labelled_row = {"prompt": row["prompt"], "completion": entry["text"], "label": label}
        yield _with_id(row, labelled_row, completion=entry)


def best_of(row: Mapping[str, Any], *, least_reward: float | None, counts: Counter[str]) -> Iterator[Row]:
    """Yield the conversation with the completion of the highest reward, the first of equal ones; none below
    least_reward.
    """
    entries = distinct(row, counts)
    best = max(entries, key=lambda entry: float(entry["reward"]), default=None)
    if best is None or (least_reward is not None and best["reward"] < least_reward):
        counts["prompts_left_out"] += 1
        return
    reply = {"role": "assistant", "content": best["text"]}
    yield _with_id(row, {"messages": [*row["prompt"], reply]}, messages=best)


def conditional(
    row: Mapping[str, Any], *, text: str, decimals: int, counts: Counter[str], written: Counter[str]
) -> Iterator[Row]:
    """Yield a conversation for each completion, whose prompt contains its reward. written: counts the rewards as
    text.
    """
    for entry in distinct(row, counts):
        reward = float(entry["reward"])
        written[written_reward(reward, decimals)] += 1
        conditioned = with_reward(row, reward, text=text, decimals=decimals)
        reply = {"role": "assistant", "content": entry["text"]}
        yield _with_id(row, {"messages": [*conditioned["prompt"], reply]}, messages=entry)


def with_reward(row: Mapping[str, Any], reward: float, *, text: str, decimals: int) -> Row:
    """Return the row with `text` appended to the last message of the user in its prompt, `{reward}` replaced by the
    reward.

    Raises StageError if there is no such message.
    """
    new_row = {name: value for name, value in row.items() if name != "id"}
    try:
        new_row["prompt"] = append_to_prompt(
            row["prompt"], text.replace(REWARD_PLACE, written_reward(reward, decimals))
        )
    except ConversationError as error:
        raise StageError(f"row {row['id']}: {error}") from error
    return {"id": row_id(new_row), **new_row}


def written_reward(reward: float, decimals: int) -> str:
    return f"{reward:z.{decimals}f}"  # z: no -0.0


def _extremes(entries: Sequence[Entry]) -> Iterator[tuple[Entry, Entry]]:
    if len(entries) > 1:
        rewards = [float(entry["reward"]) for entry in entries]
        high, low = rewards.index(max(rewards)), rewards.index(min(rewards))
        yield (entries[high], entries[low]) if high != low else (entries[0], entries[1])


def _with_id(row: Mapping[str, Any], new_row: Row, **replies: Entry) -> Row:
    """Return the new row with its `id`, tools and sampled tokens. replies: the completion in each column of
    `new_row`.
    """
    new_row |= {"tools": row["tools"]} if "tools" in row else {}
    new_row |= sampled_column(row, replies)
    return {"id": row_id(new_row), **new_row}
