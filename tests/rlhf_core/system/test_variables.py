"""The environment variables of this system."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.cli.main import app
from deployments.stack.settings import PORTS
from rlhf_core.errors import VariableError
from rlhf_core.system.variables import VARIABLES, check_all, declared, value_of

ROOT = Path(__file__).resolve().parents[3]
CODE = ("rlhf_core", "flows", "tasks", "deployments", "benchmarks")
NAME = re.compile(r"ALIGNMENT_[A-Z_]*[A-Z]")

WRONG = {
    "ALIGNMENT_AUTOSCALING": "true",
    "ALIGNMENT_CACHE": "a/folder",
    "ALIGNMENT_CACHE_GIB": "many",
    "ALIGNMENT_DEVICE": "tpu",
    "ALIGNMENT_PORT_S3": "80",
    "ALIGNMENT_NODE_LOCK": "/no/such/file.lock",
    "ALIGNMENT_PRICES": "/no/such/file.yaml",
    "ALIGNMENT_RAY_CPUS": "many",
    "ALIGNMENT_RECIPES": "/no/such/folder",
    "ALIGNMENT_SERVE_TOKEN": "two words",
    "ALIGNMENT_SHIP_CODE": "yes",
    "ALIGNMENT_STACK_DIR": "~nobody-here/x",
    "ALIGNMENT_STACK_TIMEOUT": "-1",
    "ALIGNMENT_STOP_SECONDS": "soon",
    "ALIGNMENT_STORE": "gs://bucket",
    "ALIGNMENT_WARM": "no",
    "ALIGNMENT_WARM_SOCKET": "warm.sock",
    "ALIGNMENT_WEBHOOK": "two words",
    "ALIGNMENT_WORKDIR": "work",
}  # fmt: skip
# Set by the system itself.
OWN = {"ALIGNMENT_FORWARDED", "ALIGNMENT_STACKS_OF", "ALIGNMENT_STACK_SERVICE", "ALIGNMENT_TRY_TERMINAL"}


def test_every_variable_that_the_code_reads_is_declared() -> None:
    files = [file for folder in CODE for file in sorted((ROOT / folder).rglob("*.py"))]
    found = {name for file in files for name in NAME.findall(file.read_text(encoding="utf-8"))} - {"ALIGNMENT_PORT"}
    found = {name for name in found if not name.startswith("ALIGNMENT_HEADER")}  # a user's, which a recipe names
    assert {name for name in found if declared(name) is None} == set()
    assert {*VARIABLES} - found == set()


def test_every_variable_is_documented() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").rglob("*.md")))
    assert {name for name in {*VARIABLES} - OWN if f"{name}" not in text} == set()


def test_every_variable_has_a_wrong_value_here() -> None:
    assert {*WRONG} == {*VARIABLES} - OWN | {f"ALIGNMENT_PORT_{PORTS['s3'][0].upper()}"}


@pytest.mark.parametrize("command", ["up", "plan", "run"])
@pytest.mark.parametrize("name", [*WRONG])
def test_a_wrong_value_is_refused_by_the_first_command(
    name: str, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ALIGNMENT_STACK_DIR", str(tmp_path / "no stack"))
    monkeypatch.setenv(name, WRONG[name])
    done = CliRunner().invoke(app, [command])
    shown = "" if name in ("ALIGNMENT_SERVE_TOKEN", "ALIGNMENT_WEBHOOK") else f" is `{WRONG[name]}`"
    assert (done.exit_code, done.output.count("\n")) == (1, 1), done.output
    assert done.output.startswith(f"error: {name}{shown}: ")
    assert ("words" in done.output) is False
    assert not (tmp_path / "no stack").exists()


@pytest.mark.parametrize("command", ["down", "env", "status"])
def test_a_stack_can_be_looked_at_and_ended_with_any(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNMENT_RAY_CPUS", "many")
    assert "there is no local stack" in CliRunner().invoke(app, [command]).output


@pytest.mark.parts
def test_a_worker_that_could_not_run_anything_does_not_start(tmp_path: Path) -> None:
    own = {"ALIGNMENT_CACHE_GIB": "many", "PREFECT_API_URL": "http://127.0.0.1:9/api", "PREFECT_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "flows.worker", "--pool", "a"],
        cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ALIGNMENT_CACHE_GIB is `many`: set it to the number of GiB")


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("ALIGNMENT_CACHE", "{}/file/cache", "is a file, not a folder: give another path"),
        ("ALIGNMENT_CACHE", "{}/loop", "this link leads to itself: correct it, or give another path"),
        ("ALIGNMENT_CACHE_GIB", "0", "set it to the number of GiB that the cache may hold, such as 50"),
        ("ALIGNMENT_CACHE_GIB", "nan", "set it to the number of GiB that the cache may hold, such as 50"),
        ("ALIGNMENT_PORT_RAY", "70000", "set it to a port number from 1024 to 65535"),
        ("ALIGNMENT_RAY_CPUS", "1.5", "set it to the number of CPUs that Ray offers, from 1 to 4096"),
        ("ALIGNMENT_RAY_CPUS", "0", "set it to the number of CPUs that Ray offers, from 1 to 4096"),
        ("ALIGNMENT_STACK_DIR", "{}/file", "is a file, not a folder: give another path"),
        ("ALIGNMENT_STORE", "store", "it must be an absolute path, such as"),
        ("ALIGNMENT_STORE", "{}/x ", "it begins or ends with a space: remove that"),
        ("ALIGNMENT_WARM_SOCKET", f"/{'x' * 200}", "a socket's path has 107 bytes at most: give a shorter one"),
    ],
)
def test_the_sentence_says_how_to_correct_it(
    name: str, value: str, problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setenv(name, value.format(tmp_path))
    with pytest.raises(VariableError, match=re.escape(problem)):
        check_all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ALIGNMENT_AUTOSCALING", "1"), ("ALIGNMENT_CACHE", "/tmp/a/b/c"), ("ALIGNMENT_CACHE", "~/cache"),
        ("ALIGNMENT_CACHE_GIB", "0.5"), ("ALIGNMENT_RAY_CPUS", "7"),
        ("ALIGNMENT_SHIP_CODE", "1"), ("ALIGNMENT_STACK_DIR", "relative"),
        ("ALIGNMENT_STACK_TIMEOUT", "0"), ("ALIGNMENT_STORE", "s3://bucket/prefix"), ("ALIGNMENT_STORE", "~/store"),
        ("ALIGNMENT_STORE", "file:///store"), ("ALIGNMENT_WARM", "0"), ("ALIGNMENT_WORKDIR", "/tmp"),
    ],
)  # fmt: skip
def test_a_good_value_is_given_as_it_is(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert value_of(name) == value
    monkeypatch.setenv(name, "")
    assert value_of(name) is None
