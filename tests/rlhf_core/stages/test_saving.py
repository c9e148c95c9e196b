"""The trained model on its way from rank 0 to the job, which publishes it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import pytest

from rlhf_core.artifacts.repository import ArtifactRepository, blob_path
from rlhf_core.errors import IntegrityError, StageError
from rlhf_core.stages.job_context import JobContext
from rlhf_core.training.group import InlineGroup
from rlhf_core.training.saving import save
from rlhf_core.training.snapshots import SnapshotWorker
from rlhf_core.training.state import Stateful
from tests.rlhf_core.stages.specs import QUICK, specified

pytestmark = [pytest.mark.parts, pytest.mark.usefixtures("own_folders")]
MODEL = {"config.json": "{}", "critic/model.safetensors": "critic", "model.safetensors": "policy"}


class Rank(SnapshotWorker):
    """With a model of three files."""

    def parts(self) -> Mapping[str, Stateful]:
        return {}

    def save(self, folder: Path) -> None:
        for path, content in MODEL.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(content)

    def left(self) -> list[Path]:
        return list(self._context.workdir.iterdir())


class OnAnotherNode(Rank):
    """There the job's working folder neither exists nor can be made."""

    def save(self, folder: Path) -> None:
        assert folder.is_relative_to(self._context.workdir)
        super().save(folder)


class Forgetful(Rank):
    def save(self, folder: Path) -> None: ...


def files_of(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*") if p.is_file()}


def contexts(repository: ArtifactRepository, root: Path) -> tuple[JobContext, JobContext]:
    """The job's, and a rank's as it arrives in an actor."""
    spec = specified(repository, root / "recipe", QUICK)
    context = JobContext(spec, repository.store, root / "job")
    return context, pickle.loads(pickle.dumps(context))


def test_a_rank_on_another_node_sends_the_model_through_the_store(
    repository: ArtifactRepository, tmp_path: Path
) -> None:
    context, sent = contexts(repository, tmp_path)
    group = InlineGroup(OnAnotherNode, sent)
    save(group, tmp_path / "job" / "model", context)
    assert files_of(tmp_path / "job" / "model") == MODEL
    assert group.call(Rank.left) == [[]]


def test_a_damaged_transfer_is_an_error(local: ArtifactRepository, tmp_path: Path) -> None:
    context, sent = contexts(local, tmp_path)
    files = dict(InlineGroup(OnAnotherNode, sent).call(Rank.hand_over, tmp_path / "job" / "model")[0])
    local.store.put(blob_path(files["config.json"]), b"{ }")
    with pytest.raises(IntegrityError, match="has another hash"):
        context.get_files(files, tmp_path / "job" / "model")
    with pytest.raises(IntegrityError, match="would lead out of its folder"):
        context.get_files({"../model": files["config.json"]}, tmp_path / "job" / "model")


def test_a_rank_on_the_job_s_node_writes_where_the_job_publishes_from(
    local: ArtifactRepository, tmp_path: Path
) -> None:
    context, sent = contexts(local, tmp_path)
    before = set(local.store.list("blobs/"))
    (tmp_path / "job").mkdir()
    save(InlineGroup(Rank, sent), tmp_path / "job" / "model", context)
    assert files_of(tmp_path / "job" / "model") == MODEL
    assert set(local.store.list("blobs/")) == before
    with pytest.raises(StageError, match="is not on the job's node"):
        save(InlineGroup(Forgetful, sent), tmp_path / "job" / "other", context)
