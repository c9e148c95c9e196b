"""What a run has trained on is what its settings say, or it ends with an error; here with ranks that only count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.stages.trained import OptimizerConfig, SupervisedConfig
from rlhf_core.errors import StageError
from rlhf_core.supervised import loop
from rlhf_core.supervised.counts import TrainedCounts
from rlhf_core.supervised.examples import Example
from rlhf_core.supervised.schedule import step_indices
from rlhf_core.supervised.sft import pack_sequences
from rlhf_core.training.checkpointing import Checkpointing
from rlhf_core.training.metrics import StepMetrics
from tests.rlhf_core.stages.context import LocalContext

pytestmark = pytest.mark.parts

CONFIG = SupervisedConfig(
    dataset="d", batch_size=4, max_length=8, epochs=2, optimizer=OptimizerConfig(learning_rate=1e-3), log_every=2
)
EXAMPLES = [Example(f"row{n}", ([1] * (2 + n % 3),), ([False, *[True] * (1 + n % 3)],)) for n in range(10)]
TOKENS = 2 * sum(example.num_trained_tokens for example in EXAMPLES)
Schedule = Callable[[int, SupervisedConfig, int], Iterator[list[int]]]


class Ranks:
    """A group of one rank that counts what it is given. taken: optimizer steps before; lost: tokens of the first."""

    size = replicas = 1

    def __init__(self, taken: int = 0, lost: int = 0) -> None:
        self.taken, self.lost = taken, lost

    def call(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return [{"shares_prompts": False, "steps_taken": self.taken}[method.__name__]]

    def scatter(self, method: Callable[..., Any], shards: Sequence[Any]) -> list[Any]:
        steps = []
        for shard in shards[0]:
            tokens = sum(batch.num_trained_tokens for batch in shard.micro_batches) - self.lost
            steps.append(StepMetrics(1.0, 1e-3, skipped=False, means={"loss": 1.0}, num_tokens=tokens))
            self.taken, self.lost = self.taken + 1, 0
        return [steps]


def train(folder: Path, ranks: Ranks | None = None, config: SupervisedConfig = CONFIG) -> dict[str, float]:
    workers: Any = ranks or Ranks()
    return loop.train(config, EXAMPLES, pack_sequences, workers, LocalContext(folder))


def scheduled(monkeypatch: pytest.MonkeyPatch, schedule: Schedule) -> None:
    monkeypatch.setattr(loop, "step_indices", schedule)


def test_the_counts_are_metrics(tmp_path: Path) -> None:
    metrics = train(tmp_path)
    counted = {name: metrics[name] for name in ("examples_trained", "epochs_trained", "tokens_trained")}
    assert counted == {"examples_trained": 20, "epochs_trained": 2.0, "tokens_trained": TOKENS}
    part = train(tmp_path / "part", config=CONFIG.model_copy(update={"max_steps": 4}))
    assert (part["examples_trained"], part["epochs_trained"]) == (14, 1.4)


def test_ranks_that_took_fewer_steps(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="give 6 steps, but the stage counted 5: nothing is published"):
        train(tmp_path, Ranks(taken=-1))


def test_ranks_that_lost_a_micro_batch(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=f"give {TOKENS} tokens trained, but the stage counted {TOKENS - 3}"):
        train(tmp_path, Ranks(lost=3))


def test_an_epoch_that_ends_a_step_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def early(count: int, config: SupervisedConfig, seed: int) -> Iterator[list[int]]:
        return (step for number, step in enumerate(step_indices(count, config, seed)) if number != 2)

    scheduled(monkeypatch, early)
    with pytest.raises(StageError, match="give 6 steps, but the stage counted 5"):
        train(tmp_path)


def test_a_row_that_is_read_twice_in_place_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(count: int, config: SupervisedConfig, seed: int) -> Iterator[list[int]]:
        return ([*step[:-1], step[0]] for step in step_indices(count, config, seed))

    scheduled(monkeypatch, twice)
    with pytest.raises(StageError, match="CRCs of the examples trained"):
        train(tmp_path)


def test_a_row_that_is_read_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def more(count: int, config: SupervisedConfig, seed: int) -> Iterator[list[int]]:
        return ([*step, step[0]] for step in step_indices(count, config, seed))

    scheduled(monkeypatch, more)
    with pytest.raises(StageError, match="give 20 examples trained, but the stage counted 26"):
        train(tmp_path)


def resumes(monkeypatch: pytest.MonkeyPatch, after: int, counted: int | None) -> None:
    """A checkpoint of the state after step `after`, with the counts of the first `counted` steps."""
    counts = TrainedCounts()
    for indices in list(step_indices(10, CONFIG, 0))[: counted or 0]:
        counts.add(indices, 0)

    def resume(self: Checkpointing, total: int) -> int:
        if counted is not None:
            self._driver["counts"].load_state_dict(counts.state_dict())
        return after

    monkeypatch.setattr(Checkpointing, "resume", resume)


def test_a_resumed_run_counts_what_was_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resumes(monkeypatch, after=4, counted=4)
    assert train(tmp_path, Ranks(taken=4))["examples_trained"] == 20


def test_a_checkpoint_without_counts_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resumes(monkeypatch, after=4, counted=None)
    assert train(tmp_path, Ranks(taken=4))["examples_trained"] == 20


@pytest.mark.parametrize(("after", "taken"), [(5, 4), (6, 4), (3, 4)])
def test_a_resume_that_skips_or_repeats_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, taken: int
) -> None:
    resumes(monkeypatch, after, counted=4)
    with pytest.raises(StageError, match="give 6 steps, but the stage counted"):
        train(tmp_path, Ranks(taken))
