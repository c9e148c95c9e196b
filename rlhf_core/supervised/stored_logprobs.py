"""Log-probs of a reference for the completions of pairs, as an artifact: one line of JSON a pair."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlhf_core.errors import StageError
from rlhf_core.supervised.examples import Example
from rlhf_core.supervised.stored_examples import StoredExamples

_FILE = "logprobs.jsonl"
Stored = Mapping[str, Sequence[float]]  # by `digest`


def write_logprobs(folder: Path, examples: Sequence[Example], logprobs: torch.Tensor) -> None:
    """Write (E, 2) float32 log-probs, on CPU, of the chosen and the rejected completion of each example."""
    with (folder / _FILE).open("w", encoding="utf-8") as file:
        for example, values in zip(examples, logprobs.tolist(), strict=True):
            line = {"id": example.row_id, "tokens": digest(example), "logprobs": values}
            file.write(json.dumps(line) + "\n")


def read_logprobs(folders: Iterable[Path]) -> Stored:
    stored = {}
    for folder in folders:
        with (folder / _FILE).open(encoding="utf-8") as file:
            for line in map(json.loads, file):
                stored[line["tokens"]] = line["logprobs"]
    return stored


def with_logprobs(examples: StoredExamples, stored: Stored, setting: str) -> StoredExamples:
    """Return the examples with the stored log-probs. setting: the one that names these.

    Raises StageError, which names the row, if one has none.
    """
    references = []
    for example in examples:
        values = stored.get(digest(example))
        if values is None:
            raise not_read(setting, "logprobs", example)
        references.append(tuple(values))
    return examples.with_references(references)


def not_read(setting: str, stage: str, example: Example) -> StageError:
    return StageError(
        f"{setting}: no stage has read the tokens of row {example.row_id}: give the stages `{stage}` "
        "this dataset, this max_length and a model with the policy's tokenizer and chat template"
    )


def digest(example: Example) -> str:
    """Hash the sequences and masks of an example, with the files of its images."""
    read: list[Any] = [example.sequences, example.masks]
    if example.images:
        read.append([[Path(image.path).name for image in images] for images in example.images])
    return hashlib.sha256(json.dumps(read).encode()).hexdigest()[:32]
