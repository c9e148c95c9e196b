"""`alignment logs` of real Ray jobs: lines of drivers, ranks and engines, during a job and after it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deployments.cli.main import app
from tasks.job_request import JobRequest
from tasks.ray_jobs import connect

pytestmark = pytest.mark.system

CODE = """
import ray, time
ray.init(address="auto")
class _Rank:
    def say(self):
        print("from the rank", flush=True)
        time.sleep(2)
rank = ray.remote(num_cpus=0)(_Rank).remote()
print("from the driver", flush=True)
ray.get(rank.say.remote())
print('@error {"type": "ValueError", "message": "the batch is empty"}', flush=True)
raise SystemExit(1)
"""


@pytest.fixture(autouse=True)
def cluster(ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", ray_address)
    monkeypatch.setenv("ALIGNMENT_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("ALIGNMENT_STACK_DIR", str(tmp_path / "no stack"))


def lines(*arguments: str) -> list[dict[str, Any]]:
    done = CliRunner().invoke(app, ["logs", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow("runs a job with an actor")
def test_the_logs_of_a_run_while_it_runs_and_afterwards() -> None:
    request = JobRequest(
        "/store", "sft", "10c5" * 16, f"exec python -c {shlex.quote(CODE)}", {},
        {"node": "first", "run_id": "run-of-logs"}, cpus=1.0,
    )  # fmt: skip
    connect().submit_or_attach(request)
    followed = lines("run-of-logs", "-f")
    stored = lines("run-of-logs")
    for found in (followed, stored):
        assert [(each["process"], each["line"]) for each in found if each["line"].startswith(("from", "Value"))] == [
            ("driver", "from the driver"), ("rank", "from the rank"), ("driver", "ValueError: the batch is empty"),
        ]  # fmt: skip
    assert {each["stage"] for each in stored} == {"first"}
    assert [each["line"] for each in lines("first", "--process", "rank")] == ["from the rank"]
    assert lines("sft/10c510") == stored
    gone = CliRunner().invoke(app, ["logs", "run-of-another-cluster"])
    assert gone.exit_code == 1
    assert (
        "has no job of `run-of-another-cluster`, and the store no log: its stages were reused and had none"
        in gone.stderr
    )
