"""Score: completions or conversations in; the same with a reward of each completion out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import ended_completion
from rlhf_core.chat.image_messages import images_of
from rlhf_core.chat.sampled_tokens import COLUMN, reply_of
from rlhf_core.config.stages.score import ScoreConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.formats import Row
from rlhf_core.data.reading import IMAGES_FOLDER, iterate_rows, write_dataset
from rlhf_core.errors import ConversationError, StageError
from rlhf_core.evaluation.ranking import Ranked, rank
from rlhf_core.evaluation.ranking import flat_metrics as ranking_metrics
from rlhf_core.evaluation.stored import write_evaluation
from rlhf_core.models.folders.folder import read_config
from rlhf_core.models.folders.readers import reader_problem
from rlhf_core.models.vision import RowImages
from rlhf_core.rewards import open_rewards
from rlhf_core.rewards.model import RewardReader
from rlhf_core.rl.rows import completions_row, with_rewards
from rlhf_core.stages.cluster import Cluster
from rlhf_core.stages.partial_rows import PartialRows
from rlhf_core.stages.readers import Readers, reward_counts, totals
from rlhf_core.training.counts import require_counts
from rlhf_core.types import Prompt, SequenceImage, Trajectory

_QUANTILES = {"p05": 0.05, "p50": 0.5, "p95": 0.95}


@dataclass(frozen=True, slots=True)
class _Completion:
    row: Row  # of the format `completions`
    prompt: Prompt  # with the row that rewards see
    entry: Row


def run(config: ScoreConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster) -> Output:
    """Each reward model reads its own chat template and tokens, and the very tokens of completions that a model with
    the same tokenizer and template has sampled.

    Raises StageError for a prompt that is not among `prompts`, and for a completion that a reward model cannot read;
    RewardError where a reward fails.
    """
    with PartialRows(config.checkpoint, context) as kept:
        return _run(config, inputs, context, cluster, kept)


def _run(
    config: ScoreConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster, kept: PartialRows
) -> Output:
    rows = list(_completion_rows(config, inputs))
    completions = _completions(rows, inputs)
    if not completions:
        raise StageError("the dataset has no completion to score")
    judges = {name: _reader(config, name, inputs) for name in config.model_rewards}
    readers = Readers(config, inputs, judges, context, cluster, kept)
    done, total = 0, len(completions) * (bool(config.text_rewards) + readers.passes)

    def report(count: int) -> None:
        nonlocal done
        done += count
        context.progress(done, total, "score")

    report(0)
    judged: dict[str, list[float]] = {name: [] for name in config.rewards}
    with open_rewards(config.text_rewards, context) as scorers:
        for start in range(0, len(completions) if scorers else 0, config.rows_per_call):
            part = [_as_text(each) for each in completions[start : start + config.rows_per_call]]
            for row in kept.rows(f"scored-{start}-{len(part)}", partial(totals, scorers, part)):
                for name, value in row.items():
                    judged[name].append(value)
            report(len(part))

    pictures = inputs[config.rows_input].folder / IMAGES_FOLDER

    def read(name: str) -> list[Trajectory]:
        return [_as_tokens(each, judges[name], pictures, config.max_length) for each in completions]

    judged |= readers.judge(read, report)
    require_counts(reward_counts(len(completions), judged))
    if config.pairs is not None:
        return _ranked(rows, judged, context)
    entries = [
        with_rewards(each.entry, {name: values[n] for name, values in judged.items()}, config.reward_weights)
        for n, each in enumerate(completions)
    ]
    sums, remaining = [entry["reward"] for entry in entries], iter(entries)
    scored = [_scored(row, [next(remaining) for _ in row["completions"]]) for row in rows]
    folder = context.workdir / "dataset"
    images = write_dataset(folder, scored, {"format": config.made_format}, images_from=(pictures,))
    metrics = {"rows": len(rows), "completions": len(completions), **images, **_metrics(sums, judged)}
    context.log(0, {name: float(value) for name, value in metrics.items()})
    return Output(Kind.DATASET, folder, metrics)


def _ranked(rows: Sequence[Row], judged: Mapping[str, Sequence[float]], context: StageContext) -> Output:
    """Write the evaluation of the rewards on `rows`, of the format `reward_bench`."""
    ranked: dict[str, list[Ranked]] = {name: [] for name in judged}
    samples, first = [], 0
    for row in rows:
        middle, last = first + row["chosen"], first + len(row["completions"])
        for name, values in judged.items():
            ranked[name].append(Ranked(row["subset"], values[first:middle], values[middle:last]))
        right = {name: float(each[-1].is_right) for name, each in ranked.items()}
        samples.append({
            "id": row["id"], "prompt": row["prompt"][-1]["content"], "answer": row["completions"][0]["text"],
            "task": row["subset"],
            "completions": [{"text": row["completions"][0]["text"], "scores": right, "finish_reason": "given"}],
            "rewards": {name: values[first:last] for name, values in judged.items()},
        })  # fmt: skip
        first = last
    results = {name: rank(each, context.seed) for name, each in ranked.items()}
    folder = context.workdir / "evaluation"
    write_evaluation(folder, results, samples)
    metrics = {**ranking_metrics(results), "prompts": len(rows), "completions": first}
    context.log(0, {name: float(value) for name, value in metrics.items()})
    return Output(Kind.EVALUATION, folder, metrics)


def _completion_rows(config: ScoreConfig, inputs: Mapping[str, Input]) -> Iterator[Row]:
    """Rows of the format `completions`; of a conversation its last reply."""
    for row in iterate_rows(inputs[config.rows_input].folder):
        if config.conversations is None:
            yield row
            continue
        messages = row["messages"]
        last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
        sampled = row.get(COLUMN, {})
        entry = {
            "text": messages[last]["content"],
            **(sampled.get("messages", {}) if last + 1 == len(messages) else {}),
        }
        own = {name: sampled[name] for name in ("tokenizer",) if name in sampled}
        yield completions_row(messages[:last], row, [entry], **own)


def _completions(rows: Sequence[Row], inputs: Mapping[str, Input]) -> list[_Completion]:
    asked = _asked(inputs["prompts"]) if "prompts" in inputs else None
    completions = []
    for row in rows:
        seen = {name: value for name, value in row.items() if name not in ("completions", "tokenizer")}
        if asked is not None:
            if (key := _key(row)) not in asked:
                raise StageError(
                    f"row {row['id']}: its prompt is not in the dataset `prompts`: name the one it is from"
                )
            seen = asked[key]
        prompt = Prompt(row["id"], row["prompt"][-1]["content"], (), seen)
        completions += [_Completion(row, prompt, entry) for entry in row["completions"]]
    return completions


def _asked(dataset: Input) -> dict[str, Row]:
    """The rows of `prompts` by what they ask. Raises StageError for two that ask the same and differ otherwise."""
    asked: dict[str, Row] = {}
    for row in iterate_rows(dataset.folder):
        first = asked.setdefault(_key(row), row)
        if first["id"] != row["id"]:
            raise StageError(
                f"rows {first['id']} and {row['id']} of the dataset `prompts` ask the same, so it is not known "
                "which of the two a completion answers: remove one"
            )
    return asked


def _key(row: Row) -> str:
    return json.dumps([row["prompt"], row.get("tools")], sort_keys=True)


def _reader(config: ScoreConfig, name: str, inputs: Mapping[str, Input]) -> RewardReader:
    """Raises StageError if the reward model cannot give what the settings want."""
    folder = inputs[f"rewards.{name}.model"].folder
    assert config.max_length is not None
    problem = reader_problem(read_config(folder), "max_length", config.max_length, reads_tokens=True)
    if problem is not None:
        raise StageError(f"rewards.{name}: {problem}")
    try:
        return RewardReader.of(config.model_rewards[name], folder, folder, config.max_length)
    except StageError as error:
        raise StageError(f"rewards.{name}: {error}") from error


def _as_text(completion: _Completion) -> Trajectory:
    return _trajectory(completion, [], [])


def _as_tokens(completion: _Completion, reader: RewardReader, pictures: Path, longest: int | None) -> Trajectory:
    """Raises StageError if the template cannot write it, the reward model does not see its images, or it has more than
    `longest` tokens.

    pictures: folder of the images.
    """
    row, entry = completion.row, completion.entry
    digests = images_of(row["prompt"])
    try:
        ids, mask = ended_completion(
            reader.tokenizer, row["prompt"], entry["text"], row.get("tools"),
            sampled=reply_of(entry, row.get("tokenizer")),
        )  # fmt: skip
        if digests and reader.processor is None:
            raise ConversationError("its prompt has images, and the reward model reads text alone")
        ids, mask, images = RowImages(reader.processor, pictures).expanded(ids, mask, digests)
    except ConversationError as error:
        raise StageError(f"row {row['id']}: {error}; remove it") from error
    if longest is not None and len(ids) > longest:
        raise StageError(
            f"row {row['id']}: a completion with its prompt has {len(ids)} tokens, more than max_length={longest}: "
            "raise it, or remove the row"
        )
    return _trajectory(completion, ids, mask, images)


def _trajectory(
    completion: _Completion, ids: Sequence[int], mask: Sequence[bool], images: tuple[SequenceImage, ...] = ()
) -> Trajectory:
    return Trajectory(
        replace(completion.prompt, images=images),
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor(mask, dtype=torch.bool),
        torch.zeros(len(ids)),
        weight_version=0,
        finish_reason=completion.entry.get("finish_reason", "stop"),
        completion=completion.entry["text"],
    )


def _scored(row: Row, entries: Sequence[Row]) -> Row:
    own = {name: row[name] for name in ("tokenizer",) if name in row}
    return completions_row(row["prompt"], row, entries, **own)


def _metrics(sums: Sequence[float], judged: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Mean, population deviation and quantiles of the sum, `reward`, and of each reward by its name, unweighted."""
    metrics = {}
    for name, values in {"reward": sums, **{f"reward/{name}": values for name, values in judged.items()}}.items():
        metrics[name], metrics[f"{name}_std"] = float(np.mean(values)), float(np.std(values))
        for quantile, share in _QUANTILES.items():
            metrics[f"{name}_{quantile}"] = float(np.quantile(values, share))
    return metrics
