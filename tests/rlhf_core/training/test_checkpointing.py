"""When checkpoints are made, what is taken of them, and what is refused; exactness is in tests/rlhf_core/stages."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_core.artifacts.checkpoints import Checkpoint
from rlhf_core.config.stages.checkpoint import CheckpointConfig
from rlhf_core.errors import PreemptedError, StageError, StoppedError, StoreError
from rlhf_core.system.stopping import STOPS, Stop
from rlhf_core.training.checkpointing import Checkpointing
from rlhf_core.training.group import InlineGroup
from rlhf_core.training.snapshots import SnapshotWorker
from rlhf_core.training.state import RankState, Stateful, copy_into
from tests.rlhf_core.stages.context import LocalContext

pytestmark = pytest.mark.parts


class Weights:
    def __init__(self) -> None:
        self.shared, self.own = {"w": torch.zeros(3)}, {"m": torch.zeros(2)}

    def state(self) -> RankState:
        return RankState(self.shared, self.own)

    def load_state(self, state: RankState) -> None:
        copy_into({**self.shared, **self.own}, {**state.shared, **state.own})


class Worker(SnapshotWorker):
    """Its weights are the number of the step. `gate` must be open for a checkpoint to be written."""

    def __init__(self, context: LocalContext, gate: threading.Event, name: str = "") -> None:
        super().__init__(context, name)
        self.weights, self._gate = Weights(), gate

    def parts(self) -> Mapping[str, Stateful]:
        return {"model": self.weights}

    def save(self, folder: Path) -> None: ...

    def step(self, number: int) -> None:
        self.weights.shared["w"].fill_(number)
        self.weights.own["m"].fill_(-number)

    def write_state(self, name: str) -> Any:
        assert self._gate.wait(20)
        return super().write_state(name)

    def tensors(self) -> dict[str, Tensor]:
        return {**self.weights.shared, **self.weights.own}


class Driver:
    drawn = 0

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


class Run:
    """A run of steps in `folder`; a new one in the same folder is the job that goes on."""

    def __init__(self, folder: Path, *others: str, **config: Any) -> None:
        """others: names of further groups of ranks."""
        self.context, self.gate, self.driver = LocalContext(folder), threading.Event(), Driver()
        self.gate.set()
        self.group = InlineGroup(Worker, self.context, self.gate)
        settings = {"every_minutes": None, **config}
        self.others = {name: InlineGroup(Worker, self.context, self.gate, name) for name in others}
        self.checkpoints = Checkpointing(
            CheckpointConfig(**settings), self.context, self.group, {"own": self.driver}, self.others
        )

    def steps(self, first: int, last: int, *, wait: bool = True) -> None:
        for step in range(first, last + 1):
            self.group.call(Worker.step, step)
            for group in self.others.values():
                group.call(Worker.step, 100 * step)
            self.driver.drawn = 10 * step
            self.context.log(step, {"loss": 1 / step})
            self.checkpoints.after(step)
            if wait:
                self.checkpoints.finish()

    def kept(self) -> list[int]:
        return [found.step for found in self.context.checkpoints.newest() if isinstance(found, Checkpoint)]

    def damage(self, file: str, change: Callable[[bytes], bytes]) -> None:
        """Of the newest checkpoint."""
        (folder, *_) = sorted((self.context.workdir / "store/stages/test").glob("*/checkpoints/*"), reverse=True)
        (folder / file).write_bytes(change((folder / file).read_bytes()))


def test_a_new_job_goes_on_from_the_newest_with_everything(tmp_path: Path) -> None:
    Run(tmp_path, every_steps=2).steps(1, 5)
    new = Run(tmp_path, every_steps=2)
    assert new.checkpoints.resume(10) == 4
    (tensors,) = new.group.call(Worker.tensors)
    assert tensors["w"].tolist() == [4.0] * 3
    assert tensors["m"].tolist() == [-4.0] * 2
    assert new.driver.drawn == 40
    assert new.context.logs == [(step, {"loss": 1 / step}) for step in (1, 2, 3, 4)]
    assert new.context.progresses == [(4, 10, "resumes after step 4", {})]
    assert new.checkpoints.steps_left(4) == 2
    new.steps(5, 6)
    assert new.kept() == [6]


def test_a_group_with_state_of_its_own_goes_on_where_it_was(tmp_path: Path) -> None:
    Run(tmp_path, "critic", every_steps=2).steps(1, 3)
    new = Run(tmp_path, "critic", every_steps=2)
    assert new.checkpoints.resume(10) == 2
    assert [group.call(Worker.tensors)[0]["w"][0].item() for group in (new.group, new.others["critic"])] == [2, 200]
    with pytest.raises(StageError, match="of step 2, has the critic on its own workers: set its placement as it was"):
        Run(tmp_path, every_steps=2).checkpoints.resume(10)


def test_a_group_without_state_in_the_checkpoint_is_refused(tmp_path: Path) -> None:
    Run(tmp_path, every_steps=2).steps(1, 3)
    with pytest.raises(StageError, match="of step 2, has the critic on the policy's workers"):
        Run(tmp_path, "critic", every_steps=2).checkpoints.resume(10)


def test_none_is_where_a_new_run_begins(tmp_path: Path) -> None:
    run = Run(tmp_path, every_steps=2)
    assert run.checkpoints.resume(10) == 0
    run.steps(1, 1)
    assert run.kept() == []
    assert run.checkpoints.steps_left(1) == 1


def test_as_many_are_kept_as_asked(tmp_path: Path) -> None:
    run = Run(tmp_path, every_steps=1, keep=2)
    run.steps(1, 4)
    assert run.kept() == [4, 3]


def test_minutes_count_as_well(tmp_path: Path) -> None:
    hurried = Run(tmp_path / "hurried", every_minutes=1e-9)
    hurried.steps(1, 2)
    assert hurried.kept() == [2]
    never = Run(tmp_path / "never")
    never.steps(1, 3)
    assert never.kept() == []
    assert never.checkpoints.steps_left(3) > 1000


def test_training_goes_on_while_one_is_written_and_the_next_one_waits(tmp_path: Path) -> None:
    run = Run(tmp_path, every_steps=2)
    run.gate.clear()
    run.steps(1, 5, wait=False)  # that of step 2 is copied, and not whole yet when step 4 is done
    assert run.kept() == []
    assert run.checkpoints.steps_left(5) == 1  # the next is made as soon as it can be
    run.gate.set()
    run.checkpoints.finish()
    assert run.kept() == [2]
    new = Run(tmp_path)
    assert new.checkpoints.resume(10) == 2
    assert new.group.call(Worker.tensors)[0]["w"].tolist() == [2.0] * 3  # not those of the steps since
    run.steps(6, 6)
    assert run.kept() == [6]


def test_a_failed_upload_stops_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, every_steps=2)
    (tmp_path / "store").write_text("no folder")
    run.steps(1, 2, wait=False)
    with pytest.raises(StoreError, match="fails at"):
        run.checkpoints.finish()
    run.steps(3, 4, wait=False)
    while run.checkpoints._writing is not None and run.checkpoints._writing.running:
        pass
    with pytest.raises(StoreError, match="fails at"):
        run.steps(5, 5, wait=False)


@pytest.mark.parametrize("file", ["rank0.safetensors", "shared.safetensors", "driver.json", "manifest.json"])
def test_a_damaged_one_is_reported_and_the_one_before_it_taken(
    tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, every_steps=1, keep=2)
    run.steps(1, 3)
    run.damage(file, lambda content: content[:-1] + bytes([content[-1] ^ 1]))
    new = Run(tmp_path, every_steps=1, keep=2)
    assert new.checkpoints.resume(10) == 2
    assert new.group.call(Worker.tensors)[0]["w"].tolist() == [2.0] * 3
    assert [step for step, _ in new.context.logs] == [1, 2]
    assert f"{file} is " in capsys.readouterr().out
    new.steps(3, 3)
    assert new.kept() == [3, 2]
    assert Run(tmp_path).checkpoints.resume(10) == 3  # the new one of its step: the damaged one is gone


def test_without_a_whole_one_the_run_begins_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path, every_steps=1)
    run.steps(1, 2)
    run.damage("rank0.safetensors", lambda content: b"")
    new = Run(tmp_path)
    assert new.checkpoints.resume(10) == 0
    assert new.group.call(Worker.tensors)[0]["w"].tolist() == [0.0] * 3
    assert "rank0.safetensors is damaged" in capsys.readouterr().out


@pytest.fixture
def stopped() -> Iterator[Callable[[Stop], None]]:
    """Requests a stop of this process, which no deadline interrupts."""
    yield lambda stop: STOPS.request(stop, seconds=600.0)
    STOPS.clear()


@pytest.mark.parametrize("error", [StoppedError, PreemptedError])
def test_a_stop_writes_one_that_is_not_due_and_ends_the_run(
    tmp_path: Path, stopped: Callable[[Stop], None], error: type[StoppedError]
) -> None:
    run = Run(tmp_path, every_steps=100)
    run.checkpoints.resume(10)
    run.steps(1, 2, wait=False)
    stopped(Stop("its node is taken away", error))
    with pytest.raises(
        error, match=r"^its node is taken away; it resumes after step 3, whose checkpoint is stored$"
    ) as at:
        run.steps(3, 5, wait=False)
    assert at.type is error
    assert Run(tmp_path).checkpoints.resume(10) == 3


def test_a_run_without_checkpoints_and_one_that_is_done_leave_a_stop_to_its_signal(
    tmp_path: Path, stopped: Callable[[Stop], None]
) -> None:
    never = Run(tmp_path)
    never.checkpoints.resume(10)
    assert not STOPS.between_steps
    often = Run(tmp_path, every_steps=100)
    often.checkpoints.resume(10)
    assert STOPS.between_steps
    often.checkpoints.finish()
    assert not STOPS.between_steps
    stopped(Stop("the job was stopped"))
    never.steps(1, 2)
    assert never.kept() == []


def test_they_are_removed_where_resume_is_off(tmp_path: Path) -> None:
    Run(tmp_path, every_steps=1).steps(1, 2)
    new = Run(tmp_path, resume=False)
    assert new.checkpoints.resume(10) == 0
    assert new.kept() == []


def test_a_checkpoint_may_be_committed_after_its_workers_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where an engine dies while it is written. It was of no workers then, which no run could resume from."""
    run = Run(tmp_path, every_steps=1)
    run.gate.clear()
    run.steps(1, 1, wait=False)
    with monkeypatch.context() as ended:
        ended.setattr(InlineGroup, "size", 0)
        run.gate.set()
        run.checkpoints.finish()
    assert Run(tmp_path, every_steps=1).checkpoints.resume(10) == 1


def test_a_checkpoint_of_no_workers_is_damaged(tmp_path: Path) -> None:
    run = Run(tmp_path, every_steps=1, keep=2)
    run.steps(1, 2)
    run.damage("manifest.json", lambda content: content.replace(b'"ranks": 1', b'"ranks": 0'))
    assert Run(tmp_path, every_steps=1).checkpoints.resume(10) == 1


@pytest.mark.parametrize(("ranks", "step"), [(1, 2), (4, 0)])
def test_without_layouts_a_checkpoint_is_for_as_many_ranks(tmp_path: Path, ranks: int, step: int) -> None:
    """One of an earlier version has none."""

    def without_layouts(content: bytes) -> bytes:
        manifest = json.loads(content)
        files = [file for file in manifest["files"] if not file["path"].endswith(".layout.json")]
        (own,) = (file for file in files if file["path"] == "rank0.safetensors")
        files += [{**own, "path": f"rank{rank}.safetensors"} for rank in range(1, ranks)]
        return json.dumps({**manifest, "ranks": ranks, "replicas": ranks, "files": files}).encode()

    run = Run(tmp_path, every_steps=1)
    run.steps(1, 2)
    run.damage("manifest.json", without_layouts)
    with nullcontext() if step else pytest.raises(StageError, match=r"step 2, is of 4 workers .*workers to 4, or"):
        assert Run(tmp_path).checkpoints.resume(10) == step


def test_other_weights_are_refused(tmp_path: Path) -> None:
    Run(tmp_path, every_steps=1).steps(1, 1)
    new = Run(tmp_path)
    new.group._worker.weights.shared["more"] = torch.zeros(1)
    with pytest.raises(StageError, match="`more` is in this run, but not in the checkpoint"):
        new.checkpoints.resume(10)
