"""Encoding of dataset rows as examples of supervised training, with a policy for those that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import transformers

from rlhf_core.chat.encoding import Tokenizer
from rlhf_core.config.stages.trained import RanksConfig
from rlhf_core.contract import Input, StageContext
from rlhf_core.data.fitting import Fitted, Fitting, Row, RowPolicy, fit
from rlhf_core.data.reading import IMAGES_FOLDER, iterate_rows, require_all_read, row_policy
from rlhf_core.errors import ConversationError, StageError
from rlhf_core.models.vision import ImageProcessor, RowImages
from rlhf_core.supervised.examples import Example, truncated
from rlhf_core.supervised.stored_examples import StoredExamples

Encode = Callable[[Row], list[Example]]  # raises ConversationError for a row that the chat template cannot write


def read_examples(
    dataset: Input, encode: Encode, config: RanksConfig, model: Path, context: StageContext
) -> Fitted[StoredExamples]:
    """Return the fitting examples of a dataset artifact, by its policies.

    encode: picklable; model: folder of the model whose context bounds `max_length`.
    Raises StageError as `fit_examples` does.
    """
    policy, rows = row_policy(dataset.folder), iterate_rows(dataset.folder)
    require_context(model, config.max_length)
    fitted = fit_examples(rows, encode, policy, config.max_length, context.workdir, config.processes)
    require_all_read(dataset.folder, fitted)
    return fitted


def row_images(processor: ImageProcessor | None, dataset: Path) -> RowImages | None:
    """Return the reader of a dataset's images, where no engine reads them.

    processor: of the model; None: it reads text alone.
    """
    return None if processor is None else RowImages(processor, dataset / IMAGES_FOLDER)


def one_example(encode: Callable[..., Example], tokenizer: Tokenizer, row: Row, **options: Any) -> list[Example]:
    """Adapt `encode` for rows that make one example each. options: of `encode`."""
    return [encode(tokenizer, row, **options)]


def require_context(model: Path, max_length: int) -> None:
    """Raise StageError if max_length exceeds the context of the model in this folder."""
    config = transformers.AutoConfig.from_pretrained(model).get_text_config()
    context_length = getattr(config, "max_position_embeddings", None)
    if context_length is not None and max_length > context_length:
        raise StageError(f"max_length is {max_length}, but the model's context is {context_length} tokens")


def fit_examples(
    rows: Iterable[Row], encode: Encode, policy: RowPolicy, max_length: int, folder: Path, processes: int = 1
) -> Fitted[StoredExamples]:
    """Return the examples that fit, and with `truncate` the others cut at their end.

    folder: where they are stored.
    Raises StageError if there is none, or, with the policy `error`, if a sequence exceeds max_length or a row has
    nothing to train on.
    """
    read = _Read(encode, max_length)
    fitting = Fitting(read.examples, read.problem, read.truncated, policy)
    fitted = fit(rows, fitting, keep=partial(StoredExamples.of, folder=folder), processes=processes)
    if not fitted.rows:
        raise StageError(
            f"all {fitted.too_long} rows of the dataset are longer than max_length={max_length}"
            if fitted.too_long
            else "the dataset has no row"
        )
    return fitted


@dataclass(frozen=True, slots=True)
class _Read:
    encode: Encode
    max_length: int

    def examples(self, row: Row) -> list[Example]:
        examples = self.encode(row)
        if not all(example.num_trained_tokens for example in examples):
            raise ConversationError("there is no token to train on; drop it from the dataset")
        return examples

    def problem(self, example: Example) -> str | None:
        longest = max(map(len, example.sequences))
        if longest <= self.max_length:
            return None
        return (
            f"row {example.row_id} is {longest} tokens long and max_length is {self.max_length}: raise max_length, "
            "or drop or truncate such rows (the dataset's on_long_row)"
        )

    def truncated(self, example: Example) -> Example | None:
        return truncated(example, self.max_length)
