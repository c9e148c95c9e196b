"""The stack's ports, and which services and credentials a command uses: the stack's or the user's."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.cli.main import app
from deployments.stack import control, environment, supervision
from deployments.stack.environment import SELECTORS, external_services, merged_environment
from deployments.stack.settings import LOOPBACK, open_stack
from deployments.stack.starting import timeout
from rlhf_core.errors import StackError, VariableError


def test_a_taken_port_that_was_asked_for_is_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StackError, match=f"ALIGNMENT_PORT_S3 is port {port}, which another process uses"):
            open_stack(tmp_path, frozenset({"s3"}), {"ALIGNMENT_PORT_S3": str(port)}, running=False)


@pytest.mark.parametrize("wrong", ["0", "80", "70000", "x", "-1"])
def test_a_wrong_port_is_one_sentence(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(StackError, match="set it to a port number from 1024 to 65535"):
        open_stack(tmp_path, frozenset({"s3"}), {"ALIGNMENT_PORT_S3": wrong}, running=False)


def test_ports_are_kept_and_differ(tmp_path: Path) -> None:
    services = frozenset(SELECTORS)
    first = open_stack(tmp_path, services, {}, running=False)
    assert len(set(first.ports.values())) == len(first.ports) == 15
    assert open_stack(tmp_path, services, {}, running=False).ports == first.ports


RECORDED = {
    "ALIGNMENT_STORE": "s3://alignment", "AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ACCESS_KEY_ID": "stack",
    "AWS_SECRET_ACCESS_KEY": "stack", "RAY_API_SERVER_ADDRESS": "http://127.0.0.1:2", "DO_NOT_TRACK": "1",
}  # fmt: skip


def test_stack_credentials_never_meet_another_endpoint() -> None:
    user = {"AWS_ENDPOINT_URL": "http://elsewhere", "AWS_ACCESS_KEY_ID": "user", "HOME": "/h"}
    merged = merged_environment(user, RECORDED)
    assert external_services(user, RECORDED) == {"s3"}
    assert merged == {**user, "RAY_API_SERVER_ADDRESS": "http://127.0.0.1:2", "DO_NOT_TRACK": "1"}


def test_user_credentials_never_meet_the_stack_endpoint() -> None:
    """A user of AWS has these variables set all day."""
    user = {"AWS_ACCESS_KEY_ID": "user", "AWS_SECRET_ACCESS_KEY": "user", "AWS_SESSION_TOKEN": "user"}
    assert external_services(user, RECORDED) == frozenset()
    assert merged_environment(user, RECORDED) == RECORDED


def test_the_stack_variables_in_a_shell_do_not_look_external() -> None:
    assert external_services(RECORDED, RECORDED) == frozenset()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff=1\n", "is not UTF-8 text"),
        (b"A=1\nB=a\x00b\n", r"line 2 is `B=a\\x00b`, which is not NAME=value"),
        (b"=x\n", "line 1 is `=x`"),
        (b"garbage; rm -rf x\n", "line 1 is `garbage; rm -rf x`"),
        (b"garbage; rm -rf x=1\n", "line 1 is `garbage; rm -rf x=1`"),
    ],
)
@pytest.mark.parametrize("command", ["env", "status", "down", "artifacts"])
def test_variables_that_are_none_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, content: bytes, said: str
) -> None:
    (tmp_path / "stack.env").write_bytes(content)
    monkeypatch.setenv("ALIGNMENT_STACK_DIR", str(tmp_path))
    done = CliRunner().invoke(app, [command])
    assert (done.exit_code, done.stdout) == (1, "")
    assert re.fullmatch(
        rf"error: {tmp_path}/stack.env.*{said}.*: remove it and run `alignment down && .*\n", done.stderr
    )


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("ports.json", "{", "is not JSON .*: remove it"),
        ("ports.json", "[" * 100_000, "is not JSON .*: remove it"),
        ("ports.json", "[1]", "is not a JSON object of port numbers: remove it"),
        ("ports.json", '{"s3": "x"}', "`s3` is 'x', and it must be one of port numbers: remove it"),
        ("ports.json", '{"s3": 70000}', "`s3` is 70000"),
        ("credentials.json", "{", "is not JSON .*: remove it"),
        ("credentials.json", '{"ray_token": 1}', "`ray_token` is 1, and it must be one of texts"),
        ("credentials.json", '{"ray_token": "\\n"}', "`ray_token` is "),
        ("supervisord.pid", "xyz", "holds `xyz`, which is not a process ID: write the number there that"),
        ("supervisord.pid", "9" * 5000, "holds `999"),
        ("supervisord.pid", "", "holds ``"),
    ],
)
def test_a_damaged_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, content: str, said: str
) -> None:
    monkeypatch.setenv("ALIGNMENT_STACK_DIR", str(tmp_path))
    (tmp_path / "stack.env").write_text("ALIGNMENT_STORE=s3://alignment\n")
    (tmp_path / file).write_text(content)
    functions: dict[str, list[Callable[[], object]]] = {
        "ports.json": [control.status, control.down], "credentials.json": [control.status],
        "supervisord.pid": [control.status, control.ports, control.down, control.up],
    }  # fmt: skip
    for function in functions[file]:
        with pytest.raises(StackError, match=re.escape(str(tmp_path / file)) + f":? {said}"):
            function()


@pytest.mark.parametrize("wrong", ["x", "nan", "inf", "-1", "1e9"])
def test_a_time_limit_that_is_none(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv("ALIGNMENT_STACK_TIMEOUT", wrong)
    with pytest.raises(VariableError, match=f"ALIGNMENT_STACK_TIMEOUT is `{wrong}`"):
        timeout()


def test_an_installed_package_leaves_its_environment_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack in site-packages would be lost with it, and site-packages comes after the standard library."""
    monkeypatch.delenv("ALIGNMENT_STACK_DIR", raising=False)
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert environment.stack_folder() == environment.HOME / ".local-stack"
    assert environment.python_path() == f"{environment.HOME}:/mine"
    monkeypatch.setattr(environment, "IS_INSTALLED", True)
    assert environment.stack_folder() == tmp_path / ".local/share/alignment/stack"
    assert environment.python_path() == "/mine"
    monkeypatch.setattr(supervision, "IS_INSTALLED", True)
    stack = open_stack(tmp_path, frozenset({"s3"}), {}, running=False)
    assert f"directory={tmp_path}\n" in supervision.configuration(stack, [])
