"""Jobs as they run on a cluster: processes of their own, on both kinds of store."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from rlhf_core.artifacts.leases import Holder, LeaseRecord, lease_path, take_lease
from rlhf_core.artifacts.manifest import ArtifactRef, Kind, Manifest
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.store import Store, open_store
from rlhf_core.config.data import DatasetConfig
from rlhf_core.errors import IntegrityError, StageError
from rlhf_core.pipeline.key import computing_libraries, stage_key
from rlhf_core.pipeline.user_files import user_files
from rlhf_core.stages.contract import Input, Output, Stage, StageContext, StageSpec
from rlhf_core.stages.job_context import JobContext
from rlhf_core.stages.runner import run_job
from rlhf_core.stages.table import STAGES

REPOSITORY = Path(__file__).parents[3]
QUICK = "def rows():\n    return [{'text': 'one'}, {'text': 'two'}]\n"
# Says where it is and then works for long, in a way that only a signal ends.
SLOW = (
    "import time\n\ndef rows():\n    print('at work', flush=True)\n    time.sleep(60)\n    return [{'text': 'one'}]\n"
)


@pytest.fixture
def repository(store_url: str) -> ArtifactRepository:
    return ArtifactRepository(open_store(store_url))


@pytest.fixture
def local(local_store_url: str) -> ArtifactRepository:
    return ArtifactRepository(open_store(local_store_url))


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ALIGNMENT_WORKDIR", str(tmp_path / "work"))


def _dataset(code: str) -> DatasetConfig:
    return DatasetConfig.model_validate_json(
        json.dumps({"format": "text", "source": {"type": "function", "path": "code/data.py", "function": "rows"}})
        if code
        else json.dumps({"format": "text", "source": {"type": "files", "paths": ["data.jsonl"]}})
    )


def _specified(
    repository: ArtifactRepository, root: Path, code: str, stage: Stage = STAGES["dataset"], **changes: object
) -> StageSpec:
    """The spec of a dataset that the user's `code` makes, with everything a flow stores before it starts the job."""
    (root / "code").mkdir(parents=True, exist_ok=True)
    (root / "code" / "data.py").write_text(code)
    config = _dataset(code)
    files = user_files(config, root)
    for path in files:
        repository.put_blob(root / path)
    libraries = computing_libraries()
    key = stage_key(stage, config, inputs={}, user_files=files, seed=1, libraries=libraries)
    spec = StageSpec(
        name="data.text", stage=stage.name, stage_version=stage.version, key=key, config=config.model_dump(mode="json"),
        inputs={}, user_files=files, seed=1, libraries=libraries, tracking={"wandb": False, "tensorboard": False},
    ).model_copy(update=changes)  # fmt: skip
    repository.write_spec(spec)
    return spec


class Job:
    """`python -m rlhf_core.stages`, its output in a file as on a cluster."""

    def __init__(self, store: Store, ref: ArtifactRef, log: Path):
        self._log = log
        which = ["--store", store.url, "--stage", ref.stage, "--key", ref.key]
        command = [sys.executable, "-m", "rlhf_core.stages", *which]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=log.parent
            )

    def wait(self) -> int:
        return self.process.wait(timeout=120)

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 120
        while text not in self.output:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    @property
    def output(self) -> str:
        return self._log.read_text()

    @property
    def error(self) -> dict[str, str]:
        """Of the last line."""
        last = self.output.splitlines()[-1]
        assert last.startswith("@error "), self.output
        found: dict[str, str] = json.loads(last.removeprefix("@error "))
        return found


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[_Jobs]:
    started = _Jobs(tmp_path)
    yield started
    for job in started.jobs:
        job.process.kill()
        job.process.wait()


class _Jobs:
    def __init__(self, folder: Path):
        self.jobs: list[Job] = []
        self._folder = folder

    def start(self, store: Store, ref: ArtifactRef) -> Job:
        self.jobs.append(Job(store, ref, self._folder / f"job{len(self.jobs)}.log"))
        return self.jobs[-1]


def _lease(store: Store, ref: ArtifactRef) -> LeaseRecord:
    data = store.get(lease_path(ref))
    assert data is not None
    return LeaseRecord.model_validate_json(data)


def test_a_job_publishes_what_its_spec_says(repository: ArtifactRepository, tmp_path: Path, jobs: _Jobs) -> None:
    spec = _specified(repository, tmp_path, QUICK)
    job = jobs.start(repository.store, spec.ref)
    assert job.wait() == 0, job.output
    manifest = repository.manifest(spec.ref)
    assert manifest is not None
    assert (manifest.kind, manifest.name, manifest.key) == (Kind.DATASET, "data.text", spec.key)
    assert [file.path for file in manifest.files] == ["data.jsonl", "info.json", "metrics.jsonl"]
    assert manifest.metrics["rows"] == 2
    assert manifest.user_files == spec.user_files
    assert manifest.libraries == spec.libraries
    assert manifest.device == "cpu"
    assert 0 <= manifest.device_seconds < 60
    assert manifest.started_at < manifest.finished_at
    folder = repository.fetch(spec.ref, tmp_path / "cache")
    assert json.loads((folder / "metrics.jsonl").read_text())["rows"] == 2
    assert '@progress {"step": 0, "total": 0, "phase": "publish"' in job.output
    assert _lease(repository.store, spec.ref).released
    assert list((tmp_path / "work").iterdir()) == []


def test_a_finished_stage_is_not_computed_again(
    local: ArtifactRepository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = _specified(local, tmp_path, QUICK)
    first = run_job(local.store.url, spec.ref)
    assert run_job(local.store.url, spec.ref) == first
    assert "is in the store already" in capsys.readouterr().out


def test_an_error_of_the_user_is_the_last_line(local: ArtifactRepository, tmp_path: Path, jobs: _Jobs) -> None:
    spec = _specified(local, tmp_path, "def rows():\n    raise RuntimeError('no rows today')\n")
    job = jobs.start(local.store, spec.ref)
    assert job.wait() == 1
    assert "no rows today" in job.error["message"]
    assert job.error["type"] == "StageError"
    assert "Traceback (most recent call last)" in job.output
    assert local.manifest(spec.ref) is None
    assert _lease(local.store, spec.ref).released


def test_a_stopped_job_gives_its_lease_back_and_publishes_nothing(
    repository: ArtifactRepository, tmp_path: Path, jobs: _Jobs
) -> None:
    spec = _specified(repository, tmp_path, SLOW)
    job = jobs.start(repository.store, spec.ref)
    job.wait_for("at work")
    assert not _lease(repository.store, spec.ref).released
    began = time.monotonic()
    job.process.terminate()
    assert job.wait() == 143
    assert time.monotonic() - began < 20
    assert job.error == {
        "type": "Stopped",
        "message": "the job was stopped before it had finished; nothing was published",
    }
    assert _lease(repository.store, spec.ref).released
    assert repository.manifest(spec.ref) is None
    assert list((tmp_path / "work").iterdir()) == []


def test_a_job_that_waits_for_its_ray_workers_stops_in_order_too(
    local: ArtifactRepository, tmp_path: Path, jobs: _Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    code = (
        "import time, ray\nfrom rlhf_core.actors.placement import connect\n\n"
        "@ray.remote\ndef work():\n    time.sleep(60)\n\n"
        "def rows():\n    connect()\n    print('at work', flush=True)\n    ray.get(work.remote())\n"
    )
    spec = _specified(local, tmp_path, code)
    job = jobs.start(local.store, spec.ref)
    job.wait_for("at work")
    job.process.terminate()
    assert job.wait() == 143, job.output
    assert _lease(local.store, spec.ref).released


def test_a_killed_job_is_replaced_at_once_on_the_same_machine(
    local: ArtifactRepository, tmp_path: Path, jobs: _Jobs
) -> None:
    # The function is slow only the first time: same code, same key.
    code = (
        "import pathlib, time\n\ndef rows():\n"
        f"    mark = pathlib.Path({str(tmp_path / 'mark')!r})\n"
        "    if not mark.exists():\n"
        "        mark.touch()\n"
        "        print('at work', flush=True)\n"
        "        time.sleep(60)\n"
        "    return [{'text': 'one'}]\n"
    )
    spec = _specified(local, tmp_path, code)
    job = jobs.start(local.store, spec.ref)
    job.wait_for("at work")
    job.process.send_signal(signal.SIGKILL)
    job.wait()
    began = time.monotonic()
    run_job(local.store.url, spec.ref)
    assert time.monotonic() - began < 20  # much less than a lease lives


def test_a_job_whose_lease_was_taken_stops_itself(local: ArtifactRepository, tmp_path: Path, jobs: _Jobs) -> None:
    spec = _specified(local, tmp_path, SLOW)
    job = jobs.start(local.store, spec.ref)
    job.wait_for("at work")
    thief = Holder(id="x", host="far", machine="another", pid=7, process_started=0.0)
    expires = datetime.now(UTC) + timedelta(seconds=60)
    local.store.put(
        lease_path(spec.ref), LeaseRecord(holder=thief, expires_at=expires, renewals=0).model_dump_json().encode()
    )
    assert job.wait() == 1  # at the next heartbeat
    assert job.error["type"] == "StageError"
    assert "was taken by process 7 on far" in job.error["message"]
    assert _lease(local.store, spec.ref).holder == thief


def test_of_two_jobs_one_computes_and_the_other_waits(
    repository: ArtifactRepository, tmp_path: Path, jobs: _Jobs
) -> None:
    spec = _specified(repository, tmp_path, SLOW.replace("60", "3"))
    first = jobs.start(repository.store, spec.ref)
    first.wait_for("at work")
    second = jobs.start(repository.store, spec.ref)
    assert (first.wait(), second.wait()) == (0, 0)
    assert "waiting for process" in second.output
    assert "is in the store already" in second.output
    assert "at work" not in second.output


def test_a_job_takes_over_when_the_other_fails(local: ArtifactRepository, tmp_path: Path, jobs: _Jobs) -> None:
    spec = _specified(local, tmp_path, QUICK)
    lease = take_lease(local.store, spec.ref)
    assert not isinstance(lease, Holder)
    job = jobs.start(local.store, spec.ref)
    job.wait_for("waiting for process")
    lease.release()
    assert job.wait() == 0
    assert local.manifest(spec.ref) is not None


def test_other_libraries_than_the_spec_are_refused(local: ArtifactRepository, tmp_path: Path) -> None:
    libraries = {**computing_libraries(), "torch": "1.0"}
    spec = _specified(local, tmp_path, QUICK, libraries=libraries)
    with pytest.raises(StageError, match=r"torch 1\.0 there, .* here: install the same on the cluster"):
        run_job(local.store.url, spec.ref)
    assert local.store.get(lease_path(spec.ref)) is None


def test_another_version_of_the_stage_is_refused(local: ArtifactRepository, tmp_path: Path) -> None:
    spec = _specified(local, tmp_path, QUICK, stage_version=99)
    with pytest.raises(StageError, match=r"stage dataset, version 99, .* has version 1"):
        run_job(local.store.url, spec.ref)


def test_a_spec_that_does_not_make_its_key_is_refused(local: ArtifactRepository, tmp_path: Path) -> None:
    spec = _specified(local, tmp_path, QUICK, seed=2)
    with pytest.raises(StageError, match="computes the key"):
        run_job(local.store.url, spec.ref)


def test_changed_user_files_are_refused(local: ArtifactRepository, tmp_path: Path) -> None:
    spec = _specified(local, tmp_path, QUICK)
    digest = spec.user_files["code/data.py"]
    local.store.put(f"blobs/sha256/{digest[:2]}/{digest}", SLOW.encode())
    with pytest.raises(IntegrityError):
        run_job(local.store.url, spec.ref)


def wrong_kind(config: DatasetConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    (context.workdir / "a").write_text("x")
    return Output(Kind.REPORT, context.workdir)


def unknown_metric(config: DatasetConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    (context.workdir / "a").write_text("x")
    return Output(Kind.DATASET, context.workdir, {"loss": float("nan"), "rows": True})


def list_metric(config: DatasetConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    (context.workdir / "a").write_text("x")
    return Output(Kind.DATASET, context.workdir, {"loss": [1.0]})  # type: ignore[dict-item]


def _run(repository: ArtifactRepository, root: Path, function: str) -> Manifest:
    stage = Stage(
        "own", 1, DatasetConfig, {}, frozenset({Kind.DATASET}), f"tests.rlhf_core.stages.test_runner:{function}"
    )
    spec = _specified(repository, root, QUICK, stage)
    return run_job(repository.store.url, spec.ref, {"own": stage})


def test_a_stage_may_write_only_its_kinds(local: ArtifactRepository, tmp_path: Path) -> None:
    with pytest.raises(StageError, match="own wrote a report, but it is to write dataset"):
        _run(local, tmp_path, "wrong_kind")
    assert list(local.list_artifacts()) == []


def test_a_metric_that_is_not_finite_is_unknown(local: ArtifactRepository, tmp_path: Path) -> None:
    assert _run(local, tmp_path, "unknown_metric").metrics == {"loss": None, "rows": 1}


def test_a_metric_must_be_plain(local: ArtifactRepository, tmp_path: Path) -> None:
    with pytest.raises(StageError, match="the metric loss is a list"):
        _run(local, tmp_path, "list_metric")


def test_user_files_keep_their_places(local: ArtifactRepository, tmp_path: Path) -> None:
    paths = ["reward.py", "sub/./helper.py", "../shared/data.jsonl", "/etc/made-up/x.json", "../../top.txt"]
    files = {path: local.put_blob(path.encode()) for path in paths}
    spec = _specified(local, tmp_path, QUICK).model_copy(update={"user_files": files})
    context = JobContext(spec, local.store)
    for path in paths:
        assert context.user_file(path).read_text() == path
        assert context.user_file(path).name == Path(path).name
    recipe = context.user_file("reward.py").parent
    assert (recipe / "../shared/data.jsonl").read_text() == "../shared/data.jsonl"
    assert context.user_folder("sub") == recipe / "sub"
    assert context.user_folder("../shared") == recipe.parent / "shared"
    with pytest.raises(StageError, match=r"other\.py: no file of the recipe"):
        context.user_file("other.py")
    with pytest.raises(StageError, match="nowhere: no folder of the recipe"):
        context.user_folder("nowhere")


def test_a_context_works_on_another_node_but_does_not_log_there(
    repository: ArtifactRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = _specified(repository, tmp_path, QUICK)
    made = run_job(repository.store.url, spec.ref)
    sent = pickle.dumps(JobContext(spec, repository.store, tmp_path))
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "other" / "cache"))
    context: JobContext = pickle.loads(sent)
    assert (context.name, context.key, context.seed) == (spec.name, spec.key, 1)
    item = context.fetch(spec.ref)
    assert item.manifest == made
    assert (item.folder / "data.jsonl").is_file()
    assert item.folder.is_relative_to(tmp_path / "other")
    assert context.user_file("code/data.py").read_text() == QUICK
    assert context.workdir.is_dir()
    assert context.workdir != tmp_path
    assert not any(context.workdir.iterdir())
    with pytest.raises(StageError, match="logged by the job itself"):
        context.log(0, {})
    with pytest.raises(StageError, match="told by the job itself"):
        context.progress(0, 1)
