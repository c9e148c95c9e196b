"""`alignment schedule`: what cannot be, without a Prefect server or with one that is none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from typer.testing import CliRunner

from deployments.cli.main import app
from deployments.cli.scheduling import Schedule
from rlhf_core.errors import RecipeError
from rlhf_core.system.notes import printed_after
from tests.services import LOOPBACK, free_ports, http_server

pytestmark = pytest.mark.system


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Prefect API where nobody answers: whoever asks it says so."""
    monkeypatch.setenv("ALIGNMENT_STACK_DIR", str(tmp_path / "no stack"))
    monkeypatch.setenv("ALIGNMENT_STORE", str(tmp_path / "store"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    url = f"http://{LOOPBACK}:{free_ports(1)[0]}/api"
    with temporary_settings({PREFECT_API_URL: url, PREFECT_CLIENT_MAX_RETRIES: 0}):
        yield url


def said(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["schedule", *arguments])
    assert (done.exit_code, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    return line.removeprefix("error: ")


@pytest.mark.parametrize(
    ("cron", "every", "timezone", "message"),
    [
        ("", 0, "UTC", "say when by either --cron"),
        ("0 3 * * *", 5, "UTC", "say when by either --cron"),
        ("", float("inf"), "UTC", "--every is inf: it must be from 0.1 to 1000000 minutes"),
        ("", float("nan"), "UTC", "--every is nan: it must be"),
        ("", 1e300, "UTC", r"--every is 1e\+300: it must be"),
        ("", 1e-9, "UTC", "--every is 1e-09: it must be"),
        ("0 3 31 2 *", 0, "UTC", "there is no such day, so no round would ever run"),
        ("bogus", 0, "UTC", "--cron 'bogus' is not a cron expression: give five fields"),
        ("R * * * *", 0, "UTC", "is not a cron expression"),
        ("* * * * * *", 0, "UTC", "give five fields"),  # the sixth would be seconds
        ("0 3 * * *", 0, "Europe/Berlni", "there is no such time zone .did you mean `Europe/Berlin`"),
        ("0 3 * * *", 0, "", "there is no such time zone"),
    ],
)
def test_a_time_that_cannot_be(cron: str, every: float, timezone: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Schedule("loop", "recipe", (), cron, every, timezone).when()


def test_what_needs_a_recipe_is_refused_before_prefect_is_asked(nowhere: str) -> None:
    for arguments in (["--off"], ["--cron", "0 3 * * *"], ["--every", "5"]):
        assert said(*arguments).startswith(f"{arguments[0]} needs a recipe: ")
    assert said("tiny-loop", "--off", "--every", "5").startswith("--off removes the schedule, and --every sets it")
    assert said("tiny-loop", "--off", "lopp.margin=1").startswith("no Prefect server answers at")  # to know its loops
    assert said("tiny-loop", "--every", "inf").startswith("--every is inf: ")
    assert said().startswith(f"no Prefect server answers at {nowhere}")


class _Answers(BaseHTTPRequestHandler):
    status, body = 200, b"hello"

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    do_POST = do_GET  # noqa: N815

    def log_message(self, *arguments: Any) -> None: ...


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, b"<html>", "what answers at .* is not a Prefect server: correct PREFECT_API_URL"),
        (200, b"\xff", "what answers at .* is not a Prefect server"),
        (200, b"{}", "what answers at .* is not a Prefect server"),
        (200, b"null", "what answers at .* is not a Prefect server"),
        (401, b"", r"refuses the credentials \(status 401\): correct PREFECT_API_AUTH_STRING or PREFECT_API_KEY"),
        (500, b"", "answers with status 500: see its log"),
        (404, b"{}", "has no deployment iterative-dpo/scheduled: run `alignment up`"),
    ],
)
def test_a_server_that_is_not_prefects(monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, message: str) -> None:
    monkeypatch.setattr(_Answers, "status", status)
    monkeypatch.setattr(_Answers, "body", body)
    with http_server(_Answers) as address, temporary_settings({PREFECT_API_URL: f"{address}/api"}):
        found = said()
    assert re.search(message, found), found


@pytest.mark.parametrize("url", ["garbage", "http://[::1", "http://", "ftp://host", "http://host:x/api"])
def test_an_address_that_is_none(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("PREFECT_API_URL", url)
    assert said() == f"PREFECT_API_URL={url} is not an address of a server, such as http://host:4200/api"


@pytest.mark.endurance("chaos")
@pytest.mark.parametrize("setting", ["PREFECT_LOGGING_LEVEL=bogus", "PREFECT_CLIENT_MAX_RETRIES=x"])
def test_a_setting_that_prefect_cannot_read(setting: str) -> None:
    name, _, value = setting.partition("=")
    command = [sys.executable, "-m", "deployments.cli.main", "schedule"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), name: value}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: Prefect cannot read {name}={value} (Input should be ")


def test_who_waits_long_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    with printed_after(60.0, "not yet"):
        pass
    with printed_after(0.01, "waiting"):
        time.sleep(0.5)
    assert capsys.readouterr().err == "waiting\n"
