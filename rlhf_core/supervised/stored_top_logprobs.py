"""A teacher's top log-probs at each trained token, as an artifact.

`rows.jsonl` has a line for each example: its row, the digest of its tokens, its file and its first row there. The
files have `tokens` (T, k) int32 and `logprobs` (T, k + 1) float32, whose last column is that of all other tokens
together. `teacher.json` has the settings of the teacher.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf_core.errors import StageError
from rlhf_core.supervised.examples import Example
from rlhf_core.supervised.sft import pack_sequences
from rlhf_core.supervised.stored_logprobs import digest, not_read
from rlhf_core.types import TaughtBatch

_SETTINGS, _ROWS = "teacher.json", "rows.jsonl"
_VALUES = 1 << 25  # log-probs of one file: 256 MiB, with their tokens
Top = tuple[Tensor, Tensor]  # of T trained tokens: (T, k) int32 and (T, k + 1) float32


@dataclass(frozen=True, slots=True)
class TeacherSettings:
    """Settings under which a teacher was run."""

    k: int
    temperature: float
    vocabulary: int  # of the teacher


class TopWriter:
    """Writes the artifact file by file, so that only a part of it is in memory."""

    def __init__(self, folder: Path, settings: TeacherSettings) -> None:
        """folder: empty."""
        self._folder, self._settings = folder, settings
        self._parts: list[Top] = []
        self._tokens = self._files = 0
        (folder / _SETTINGS).write_text(json.dumps(asdict(settings)), encoding="utf-8")
        (folder / _ROWS).touch()

    def add(self, example: Example, top: Top) -> None:
        """top: of the example's trained tokens, in their order."""
        line = {"id": example.row_id, "tokens": digest(example), "file": self._file, "start": self._tokens}
        with (self._folder / _ROWS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._parts.append(top)
        self._tokens += len(top[0])
        if self._tokens * self._settings.k >= _VALUES:
            self.flush()

    def flush(self) -> None:
        """Write the buffered rows. Call it at the end too."""
        if self._parts:
            tokens, logprobs = (torch.cat(list(column)) for column in zip(*self._parts, strict=True))
            save_file({"tokens": tokens.int(), "logprobs": logprobs.float()}, self._folder / self._file)
            self._files += 1
            self._parts, self._tokens = [], 0

    @property
    def _file(self) -> str:
        return f"top-{self._files:05}.safetensors"


class StoredTop:
    """Several such artifacts of one teacher with equal settings. Their files are opened on access."""

    def __init__(self, folders: Iterable[Path]) -> None:
        """Raises StageError if the settings of the teachers differ."""
        self._places: dict[str, tuple[Path, int]] = {}  # by digest
        ways = []
        for folder in folders:
            settings = TeacherSettings(**json.loads((folder / _SETTINGS).read_text(encoding="utf-8")))
            if settings not in ways:
                ways.append(settings)
            with (folder / _ROWS).open(encoding="utf-8") as file:
                for line in map(json.loads, file):
                    self._places[line["tokens"]] = folder / line["file"], line["start"]
        if len(ways) > 1:
            listed = "; ".join(map(str, ways))
            raise StageError(f"teacher.top_logprobs: {listed}: take those of one k, temperature and vocabulary")
        (self.settings,) = ways
        self._open: dict[Path, Any] = {}

    def require(self, examples: Iterable[Example]) -> None:
        """Raise StageError, which names the row, if the teacher has not read one of the examples."""
        for example in examples:
            if digest(example) not in self._places:
                raise not_read("teacher.top_logprobs", "top_logprobs", example)

    def of(self, example: Example) -> Top:
        path, start = self._places[digest(example)]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        end = start + example.num_trained_tokens
        tokens, logprobs = (self._open[path].get_slice(name)[start:end] for name in ("tokens", "logprobs"))
        return tokens, logprobs

    def pack(self, examples: Sequence[Example]) -> TaughtBatch:
        """Pack examples with their top log-probs, 0 at tokens that are not trained."""
        packed = pack_sequences(examples)
        parts = []
        for column in zip(*map(self.of, examples), strict=True):
            values = torch.cat(list(column))
            parts.append(values.new_zeros(packed.num_tokens, values.shape[1]))
            parts[-1][packed.loss_mask] = values
        return TaughtBatch(**vars(packed), top_tokens=parts[0], top_logprobs=parts[1])
