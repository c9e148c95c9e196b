from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages.kto import KTOConfig
from rlhf_core.config.stages.trained import OptimizerConfig, SupervisedConfig
from rlhf_core.data.fitting import Fitted, RowPolicy
from rlhf_core.data.reading import write_dataset
from rlhf_core.errors import StageError
from rlhf_core.stages.scalar_model import split_examples
from rlhf_core.supervised.encoding import fit_examples
from rlhf_core.supervised.examples import Example, divide, truncated
from rlhf_core.supervised.loop import SinceLastLine
from rlhf_core.supervised.schedule import shuffled, step_indices
from rlhf_core.supervised.sft import pack_sequences
from rlhf_core.supervised.stored_examples import StoredExamples
from rlhf_core.training.metrics import StepMetrics
from tests.rlhf_core.stages.context import local_input

pytestmark = pytest.mark.parts


def _config(**settings: int | None) -> SupervisedConfig:
    defaults = {"dataset": "d", "batch_size": 4, "max_length": 8}
    return SupervisedConfig(optimizer=OptimizerConfig(learning_rate=1e-3), **{**defaults, **settings})  # type: ignore[arg-type]


def _example(length: int, name: str = "row") -> Example:
    return Example(name, (list(range(1, length + 1)),), ([False, *[True] * (length - 1)],))


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    config = _config(epochs=2)
    steps = list(step_indices(10, config, 5))
    assert steps == list(step_indices(10, config, 5))
    assert steps != list(step_indices(10, config, 6))
    assert [len(step) for step in steps] == [4, 4, 2] * 2
    first, second = list(chain(*steps[:3])), list(chain(*steps[3:]))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    # Pinned: with another order the same stage key would name other weights.
    assert shuffled(6, seed=0, name="epoch 0") == [2, 1, 0, 5, 3, 4]


@pytest.mark.parametrize(
    ("rows", "sizes"), [(2, [2]), (3, [3]), (4, [4]), (5, [5]), (6, [4, 2]), (8, [4, 4]), (9, [4, 5]), (11, [4, 4, 3])]
)
def test_no_step_of_kto_is_one_row_whose_kl_would_be_its_own(rows: int, sizes: list[int]) -> None:
    config = KTOConfig.model_validate(
        {"dataset": "d", "batch_size": 4, "max_length": 8, "epochs": 2, "optimizer": {"learning_rate": 1e-3}}
    )
    steps = list(step_indices(rows, config, 5))
    assert [len(step) for step in steps] == sizes * 2
    assert config.count_steps(rows) == config.num_steps(rows) == len(steps)
    assert sorted(chain(*steps)) == sorted([*range(rows)] * 2)
    assert len(list(step_indices(9, _config(), 5))) == _config().count_steps(9) == 3  # of other losses


@pytest.mark.parametrize(("epochs", "max_steps", "expected"), [(2, None, 6), (2, 5, 5), (1, 100, 3)])
def test_steps_are_the_epochs_or_max_steps(epochs: int, max_steps: int | None, expected: int) -> None:
    assert _config(epochs=epochs, max_steps=max_steps).count_steps(10) == expected


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_shards_hold_every_example_once_and_equally_many_micro_batches(ranks: int) -> None:
    examples = [_example(length) for length in (2, 5, 3, 7, 4)]
    shards = divide(pack_sequences(examples), ranks, 8)
    assert len(shards) == ranks
    assert len({len(shard.micro_batches) for shard in shards}) == 1
    assert {(shard.num_tokens, shard.num_examples) for shard in shards} == {(16, 5)}
    batches = [batch for shard in shards for batch in shard.micro_batches]
    assert sum(batch.num_trained_tokens for batch in batches) == 16
    trained = sorted(batch.num_tokens for batch in batches if batch.num_trained_tokens)
    assert sum(trained) == 21
    for batch in batches:
        if not batch.num_trained_tokens:
            assert torch.equal(batch.input_ids, torch.tensor([1, 2]))  # the shortest, as a filler


def test_what_is_cut_keeps_a_trained_token_and_gets_no_new_one() -> None:
    example = Example("row", ([1, 2, 3, 4, 5],), ([False, False, True, True, True],), margin=0.5)
    assert truncated(example, 4) == Example("row", ([1, 2, 3, 4],), ([False, False, True, True],), margin=0.5)
    assert truncated(example, 2) is None
    prompt, mask = [1, 2], [False, False]
    pair = Example("pair", ([*prompt, 3, 4, 9], [*prompt, 3, 5, 6, 9]), ([*mask, True, True, True], [False] * 6))
    cut = truncated(pair, 4)
    assert cut is not None
    assert cut.sequences == ([1, 2, 3, 4], [1, 2, 3, 5])
    assert cut.masks == ([False, False, True, True], [False] * 4)
    assert truncated(pair, 3) is None  # the completions do not differ any more
    assert truncated(pair, 2) is None


def _fit(examples: list[Example], folder: Path, max_length: int, **policy: Any) -> Fitted[StoredExamples]:
    rows = [{"id": example.row_id, "example": example} for example in examples]
    return fit_examples(rows, lambda row: [row["example"]], RowPolicy(**policy), max_length, folder)


def test_what_does_not_fit_is_dropped_or_cut_and_counted(tmp_path: Path) -> None:
    folder = tmp_path
    late = Example("late", (list(range(9)),), ([False] * 8 + [True],))
    given = [_example(3, "a"), _example(9, "b"), late, _example(8, "c")]
    dropped = _fit(given, folder, 8, long="drop")
    assert [example.row_id for example in dropped.rows] == ["a", "c"]
    assert dropped.metrics() == {"rows_read": 4, "rows_dropped_too_long": 2}
    cut = _fit(given, folder, 8, long="truncate")
    assert [(example.row_id, example.num_tokens) for example in cut.rows] == [("a", 3), ("b", 8), ("c", 8)]
    assert cut.metrics("validation_") == {
        "validation_rows_read": 4, "validation_rows_truncated": 1, "validation_rows_dropped_too_long": 1
    }  # fmt: skip
    assert _fit(given[:1], folder, 8).metrics() == {"rows_read": 1}


def test_examples_on_disk_are_what_they_were(tmp_path: Path) -> None:
    """In more record batches than one, selected, and with log-probs of a reference."""
    given = [replace(_example(2 + n % 3, f"row{n}"), margin=n / 7, desirable=n % 2 == 0) for n in range(1500)]
    given[3] = Example("pair", ([1, 2], [1, 3]), ([False, True], [False, False]), targets=(0.1, 1e-300))
    stored = StoredExamples.of(iter(given), tmp_path)
    assert list(tmp_path.iterdir()) == []  # nothing is left of it when it is not read any more
    assert list(stored) == stored[:] == given
    assert stored[1499] == given[1499] == stored[-1]
    some = stored.select([1400, 3]).select([1, 0])
    assert some[:] == [given[3], given[1400]]
    assert list(some.values("desirable")) == [True, True]
    known = stored.with_references([(float(n), -1.0) for n in range(1500)])
    assert known.select([7])[0] == replace(given[7], reference=(7.0, -1.0))


def test_a_row_that_a_mix_repeats_is_held_out_whole(tmp_path: Path) -> None:
    rows = [{"id": str(n), "prompt": [{"role": "user", "content": str(n % 30)}]} for n in range(60)]
    write_dataset(tmp_path / "data", rows + rows[:20], {})
    examples = StoredExamples.of((_example(3, row["id"]) for row in rows + rows[:20]), tmp_path)
    parts = split_examples(local_input(tmp_path / "data", Kind.DATASET), examples, seed=0)
    trained, held_out = ([int(row_id) % 30 for row_id in part.values("row_id")] for part in parts)
    assert len(trained) + len(held_out) == 80
    assert not set(trained) & set(held_out)
    assert held_out


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    folder = tmp_path
    _fit([_example(8)], folder, 8)
    with pytest.raises(StageError, match="row abc is 9 tokens long and max_length is 8"):
        _fit([_example(8), _example(9, "abc")], folder, 8)
    with pytest.raises(StageError, match="row abc: there is no token to train on"):
        _fit([_example(1, "abc")], folder, 8)
    with pytest.raises(StageError, match="no row"):
        _fit([], folder, 8)


def test_steps_since_the_last_line_survive_a_checkpoint() -> None:
    kept = SinceLastLine()
    applied = StepMetrics(0.5, 0.25, skipped=False, means={"loss": 0.1}, maxima={"ratio": 3.0})
    kept.add([applied, StepMetrics(math.inf, 0.125, skipped=True, means={"loss": 9.0}, maxima={"ratio": 9.0})], 10, 2.0)
    restored = SinceLastLine()
    restored.load_state_dict(json.loads(json.dumps(kept.state_dict())))
    assert restored == kept
    assert restored.line() == {
        "loss": 0.1, "ratio": 3.0, "gradient_norm": 0.5, "learning_rate": 0.125, "skipped_updates": 1.0, "tokens": 10,
        "tokens_per_second": 5.0,
    }  # fmt: skip
