"""What a stage that runs as a job may ask for."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.contract import Output
from rlhf_core.errors import StageError
from rlhf_core.stages.job_context import JobContext
from rlhf_core.stages.runner import run_job
from tests.rlhf_core.stages.specs import QUICK, specified

pytestmark = [pytest.mark.parts, pytest.mark.usefixtures("own_folders")]


def test_user_files_keep_their_places(local: ArtifactRepository, tmp_path: Path) -> None:
    paths = ["reward.py", "sub/./helper.py", "../shared/data.jsonl", "/etc/made-up/x.json", "../../top.txt"]
    files = {path: local.put_blob(path.encode()) for path in paths}
    spec = specified(local, tmp_path, QUICK).model_copy(update={"user_files": files})
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
    spec = specified(repository, tmp_path, QUICK)
    made = run_job(repository.store.url, spec.ref)
    sent = pickle.dumps(JobContext(spec, repository.store, tmp_path))
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "other" / "cache"))
    context: JobContext = pickle.loads(sent)
    assert (context.name, context.key, context.seed) == (spec.name, spec.key, 1)
    item = context.fetch(spec.ref)
    assert item.manifest == made
    assert (item.folder / "data.arrow").is_file()
    assert item.folder.is_relative_to(tmp_path / "other")
    assert context.user_file("code/data.py").read_text() == QUICK
    assert context.workdir.is_dir()
    assert context.workdir != tmp_path
    assert not any(context.workdir.iterdir())
    with pytest.raises(StageError, match="logged by the job itself"):
        context.log(0, {})
    with pytest.raises(StageError, match="reported by the job itself"):
        context.progress(0, 1)


def test_what_a_step_leaves_is_an_artifact_and_the_first_one_stays(local: ArtifactRepository, tmp_path: Path) -> None:
    spec = specified(local, tmp_path, QUICK)
    made = []
    for text in ("first", "second"):
        folder = tmp_path / text
        folder.mkdir()
        (folder / "data.jsonl").write_text(text)
        context = JobContext(spec, local.store)
        made.append(context.publish("rollouts", 12, Output(Kind.DATASET, folder, {"rows": 1})))
    other = JobContext(spec, local.store).publish("rollouts", 13, Output(Kind.DATASET, tmp_path / "second"))
    assert made[0] == made[1] != other
    found = local.find(f"{spec.stage}.rollouts/{made[0].key[:12]}")
    assert (found.kind, found.name) == (Kind.DATASET, f"{spec.name}.rollouts.12")
    assert (found.parents, found.config) == (spec.inputs, spec.config)
    assert found.metrics == {"step": 12, "rows": 1}
    assert (local.fetch(found.ref, tmp_path / "cache") / "data.jsonl").read_text() == "first"
