"""What a job does around its stage, in this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rlhf_core.artifacts.attempts import Attempts
from rlhf_core.artifacts.checkpoints import Checkpoint, Checkpoints
from rlhf_core.artifacts.leases import Holder, lease_path
from rlhf_core.artifacts.manifest import ArtifactRef, Kind, Manifest
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.config.data.dataset import DatasetConfig
from rlhf_core.config.engines.placement import Reservation
from rlhf_core.contract import Input, Output, Stage, StageContext
from rlhf_core.errors import IntegrityError, StageError
from rlhf_core.stages.attempt import RecordedAttempt
from rlhf_core.stages.key import computing_libraries
from rlhf_core.stages.runner import run_job
from rlhf_core.stages.table import STAGES
from rlhf_core.tracking.progress import ProgressReporter
from tests.rlhf_core.artifacts.manifests import manifest
from tests.rlhf_core.stages.specs import CONFIG, QUICK, SLOW, specified

pytestmark = [pytest.mark.parts, pytest.mark.usefixtures("own_folders")]


def test_a_finished_stage_is_not_computed_again(
    local: ArtifactRepository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = specified(local, tmp_path, QUICK)
    first = run_job(local.store.url, spec.ref)
    assert run_job(local.store.url, spec.ref) == first
    assert "is in the store already" in capsys.readouterr().out


def test_other_libraries_than_the_spec_are_refused(local: ArtifactRepository, tmp_path: Path) -> None:
    libraries = {**computing_libraries(), "torch": "1.0"}
    spec = specified(local, tmp_path, QUICK, libraries=libraries)
    with pytest.raises(StageError, match=r"torch 1\.0 there, .* here: install the same on the cluster"):
        run_job(local.store.url, spec.ref)
    assert local.store.get(lease_path(spec.ref)) is None


def test_another_version_of_the_stage_is_refused(local: ArtifactRepository, tmp_path: Path) -> None:
    spec = specified(local, tmp_path, QUICK, stage_version=99)
    ours = STAGES["dataset"].version
    with pytest.raises(StageError, match=rf"stage dataset, version 99, .* has version {ours}"):
        run_job(local.store.url, spec.ref)


def test_a_spec_that_does_not_make_its_key_is_refused(local: ArtifactRepository, tmp_path: Path) -> None:
    spec = specified(local, tmp_path, QUICK, seed=2)
    with pytest.raises(StageError, match="computes the key"):
        run_job(local.store.url, spec.ref)


def test_changed_user_files_are_refused(local: ArtifactRepository, tmp_path: Path) -> None:
    spec = specified(local, tmp_path, QUICK)
    digest = spec.user_files["code/data.py"]
    local.store.put(f"blobs/sha256/{digest[:2]}/{digest}", SLOW.encode())
    with pytest.raises(IntegrityError):
        run_job(local.store.url, spec.ref)


def wrong_kind(config: DatasetConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    (context.workdir / "a").write_text("x")
    return Output(Kind.REPORT, context.workdir)


def test_an_input_that_no_setting_names_is_refused(local: ArtifactRepository, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    (made / "a").write_text("x")
    parent = local.publish(manifest("parent"), made)
    spec = specified(local, tmp_path, QUICK, inputs={"model": parent.ref})
    with pytest.raises(StageError, match=r"dataset: the input model is a \w+, but the stage takes: no such input"):
        run_job(local.store.url, spec.ref)


def unknown_metric(config: DatasetConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    (context.workdir / "a").write_text("x")
    return Output(Kind.DATASET, context.workdir, {"loss": float("nan"), "rows": True})


def list_metric(config: DatasetConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    (context.workdir / "a").write_text("x")
    return Output(Kind.DATASET, context.workdir, {"loss": [1.0]})  # type: ignore[dict-item]


def _run(repository: ArtifactRepository, root: Path, function: str) -> Manifest:
    stage = Stage("own", 1, DatasetConfig, frozenset({Kind.DATASET}), f"tests.rlhf_core.stages.test_runner:{function}")
    spec = specified(repository, root, QUICK, stage)
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


def lists_inputs(config: DatasetConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    for name, item in inputs.items():
        found = sorted(path.name for path in item.folder.iterdir())
        (context.workdir / name).write_text(" ".join(found))
    return Output(Kind.DATASET, context.workdir)


def test_only_the_declared_files_of_an_input_are_fetched(local: ArtifactRepository, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    for name in ("metrics.jsonl", "model.safetensors"):
        (made / name).write_text(name)
    parent = local.publish(manifest("parent"), made)
    stage = Stage(
        "own", 1, DatasetConfig, frozenset({Kind.DATASET}), "tests.rlhf_core.stages.test_runner:lists_inputs",
        reads_all=True, files={"node.*": frozenset({"metrics.jsonl", "samples.jsonl"})},
    )  # fmt: skip
    part = specified(local, tmp_path, QUICK, stage, inputs={"node.sft": parent.ref})
    run_job(local.store.url, part.ref, {"own": stage})
    cached = {path.read_text() for path in (tmp_path / "cache" / "blobs").iterdir() if path.suffix != ".size"}
    assert cached == {"metrics.jsonl"}
    whole = specified(local, tmp_path, QUICK, stage, inputs={"model": parent.ref, "node.sft": parent.ref})
    run_job(local.store.url, whole.ref, {"own": stage})
    folder = local.fetch(whole.ref, tmp_path / "cache")
    assert (folder / "model").read_text() == "metrics.jsonl model.safetensors"
    assert (folder / "node.sft").read_text() == "metrics.jsonl"


def test_rows_with_images_reach_a_stage_that_reads_images_alone(local: ArtifactRepository, tmp_path: Path) -> None:
    (made := tmp_path / "made" / "images").mkdir(parents=True)
    (made / "0123").write_bytes(b"a picture")
    parent = local.publish(manifest("parent", kind=Kind.DATASET), made.parent)
    blind = Stage("own", 1, DatasetConfig, frozenset({Kind.DATASET}), "tests.rlhf_core.stages.test_runner:lists_inputs")
    config = CONFIG.model_copy(update={"exclude": ("seen",)})
    for stage in (blind, replace(blind, reads_images=True)):
        spec = specified(local, tmp_path, QUICK, stage, inputs={"exclude.seen": parent.ref}, config=config)
        if stage.reads_images:
            run_job(local.store.url, spec.ref, {"own": stage})
            assert (local.fetch(spec.ref, tmp_path / "cache") / "exclude.seen").read_text() == "images"
        else:
            with pytest.raises(StageError, match=r"own: the input exclude.seen has rows with images, and it reads"):
                run_job(local.store.url, spec.ref, {"own": stage})


def fails(config: DatasetConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    raise StageError("no rows today")


def test_every_attempt_is_known_with_its_end(local: ArtifactRepository, tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(StageError, match="no rows today"):
            _run(local, tmp_path, "fails")
    made = _run(local, tmp_path, "unknown_metric")
    assert [(each.outcome, each.reason) for each in made.attempts] == [
        ("failed", "no rows today"), ("failed", "no rows today"), ("published", ""),
    ]  # fmt: skip
    assert made.device_seconds == pytest.approx(sum(each.cores * each.seconds for each in made.attempts))
    assert all(each.cores == 1.0 and each.gpus == 0.0 and each.device == "cpu" for each in made.attempts)
    peak = made.attempts[-1].peaks[0]
    assert peak.process == "job"
    assert peak.host > 10 << 20
    stored = Attempts(local.store, made.ref).all()
    assert [each.id for each in stored] == [each.id for each in made.attempts]
    assert stored[-1].seen_at >= made.attempts[-1].seen_at


def test_an_attempt_has_the_steps_of_its_checkpoints(local: ArtifactRepository) -> None:
    ref, now = ArtifactRef(stage="sft", key="0" * 64), datetime.now(UTC)
    attempts, checkpoints = Attempts(local.store, ref), Checkpoints(local.store, ref)
    holder = Holder(id="a", host="h", machine="m", pid=1, process_started=0.0)
    attempt = RecordedAttempt(attempts, holder, now, run_id="", reserved=Reservation(), device="cpu", memory=0)
    with attempt:
        attempt.follow(checkpoints, ProgressReporter())
        for step in (5, 10):
            name = checkpoints.new_name(step)
            checkpoints.commit(Checkpoint(name=name, step=step, ranks=1, files=(), libraries={}, created_at=now))
    (stored,) = attempts.all()
    assert (stored.checkpoints, stored.step) == ((5, 10), 10)


def test_a_result_that_comes_second_says_so(local: ArtifactRepository, tmp_path: Path) -> None:
    spec = specified(local, tmp_path, QUICK)
    run_job(local.store.url, spec.ref)
    run_job(local.store.url, spec.ref, again=True)
    reasons = [each.reason for each in Attempts(local.store, spec.ref).all()]
    assert reasons == ["", "the store had a result already, and keeps it"]
