"""The stack's ports, and which services and credentials a command uses: the stack's or the user's."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from deployments.stack.environment import SELECTORS, external_services, merged_environment
from deployments.stack.settings import LOOPBACK, open_stack
from rlhf_core.errors import StackError


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
