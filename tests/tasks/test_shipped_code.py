"""A job whose code is sent with it, on a real Ray head that has the code of the repository."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_core.errors import PluginError
from tasks import shipped_code
from tasks.job_request import JobRequest
from tasks.ray_jobs import connect
from tests import plugin
from tests.tasks.test_ray_jobs import Watcher

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
# Of the job and of an actor, which is a fork of the warm process: it has imported the repository's code.
JOB = """
import ray
from rlhf_core.actors.placement import connect, runtime_environment
def seen():
    import os
    import rlhf_core.errors
    from rlhf_core.config.plugins import require
    from rlhf_core.config.rewards.rewards import REWARDS
    require({"alignment-example": "1.0"})
    return rlhf_core.errors.SHIPPED, REWARDS["brevity"].config.__name__, os.path.isdir("rlhf_core")
connect()
print(*seen())
print(*ray.get(ray.remote(num_cpus=0, runtime_env=runtime_environment({"GREETING": "hello"}))(seen).remote()))
"""


@pytest.fixture
def in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The example plugin as `pip install -e` leaves it; the folder of its package."""
    site, source = tmp_path / "site", tmp_path / "source"
    shutil.copytree(plugin.SOURCE / "src", source)
    (about := site / "alignment_example-1.0.dist-info").mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: alignment-example\nVersion: 1.0\n")
    (about / "direct_url.json").write_text(json.dumps({"dir_info": {"editable": True}, "url": source.as_uri()}))
    (about / "entry_points.txt").write_text("[alignment.rewards]\nbrevity = alignment_example.reward:BREVITY\n")
    monkeypatch.syspath_prepend(source)
    monkeypatch.setenv("ALIGNMENT_SHIP_CODE", "1")
    with plugin.visible(site):
        yield source / plugin.MODULE


@pytest.mark.endurance("two-nodes")
@pytest.mark.slow("a job and an actor of Ray")
def test_a_job_and_its_actors_run_the_code_that_was_sent(
    ray_address: str, in_place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = shutil.copytree(ROOT / "rlhf_core", tmp_path / "rlhf_core")
    with (changed / "errors.py").open("a") as file:
        file.write("SHIPPED = 'sent'\n")
    monkeypatch.setattr(shipped_code, "LIBRARY", changed)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", ray_address)
    jobs, watcher = connect(), Watcher()
    request = JobRequest("/store", "sft", f"{'5d':0<64}", f"exec python -c {shlex.quote(JOB)}", {}, {}, cpus=1.0)
    job_id, _ = jobs.submit_or_attach(request)
    jobs.follow(job_id, watcher)
    assert [line for line in watcher.lines if line.startswith("sent")] == ["sent BrevityConfig True"] * 2
    sent = (jobs._client.get_job_info(job_id).runtime_env or {})["working_dir"]
    assert sent.startswith("gcs://_ray_pkg_")


def test_a_folder_has_the_library_and_plugins_in_place_and_nothing_else(in_place: Path) -> None:
    with shipped_code.shipped_code() as folder:
        assert folder is not None
        assert sorted(path.name for path in folder.iterdir()) == [
            "alignment_example", "alignment_example-1.0.dist-info", "rlhf_core"
        ]  # fmt: skip
        assert not list(folder.rglob("__pycache__"))
    (in_place / "__init__.py").unlink()
    refused = r"^alignment-example 1\.0: its `alignment_example` cannot be sent to a node"
    with pytest.raises(PluginError, match=refused), shipped_code.shipped_code():
        pass


def test_without_the_variable_nothing_is_sent(in_place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALIGNMENT_SHIP_CODE")
    with shipped_code.shipped_code() as folder:
        assert folder is None
