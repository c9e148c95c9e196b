"""What `alignment up` says of a running stack whose settings are no longer those of the shell; without a stack."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from deployments.stack.differences import differences, service_differences
from deployments.stack.environment import SELECTORS, merged_environment
from deployments.stack.services import services
from deployments.stack.settings import Stack, open_stack
from deployments.stack.supervision import configuration

pytestmark = pytest.mark.parts

SHELL = {"PATH": os.environ["PATH"], "HOME": "/h", "HF_TOKEN": "planted"}


@contextmanager
def process(environment: dict[str, str]) -> Iterator[psutil.Process]:
    """In place of supervisord, with its environment."""
    with subprocess.Popen(["cat"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdin is not None
        assert started.stdout is not None
        started.stdin.write(b"ready\n")
        started.stdin.flush()
        started.stdout.readline()  # it has been executed, so that its environment is the one above
        yield psutil.Process(started.pid)
        started.kill()


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    return open_stack(tmp_path, frozenset(SELECTORS), {}, running=False)


def said(stack: Stack, now: dict[str, str], config: str) -> list[str]:
    with process(merged_environment(SHELL, stack.environment())) as supervisord:
        configs = (configuration(stack, services(stack)), config)
        lines = differences(stack, supervisord, configs, merged_environment(now, stack.environment()))
    return [line for line in lines if not line.startswith("Python: ")]


def test_the_same_shell_differs_in_nothing(stack: Stack) -> None:
    assert (
        said(stack, {**SHELL, "ALIGNMENT_STACK_TIMEOUT": "9", "SHLVL": "2"}, configuration(stack, services(stack)))
        == []
    )


def test_each_setting_is_one_line_and_no_secret_is_shown(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    now = {
        **SHELL, "PATH": "/another", "ALIGNMENT_RAY_CPUS": "7", "ALIGNMENT_PORT_S3": "1234", "HF_TOKEN": "planted too",
        "HTTPS_PROXY": "http://user:planted@proxy", "ALIGNMENT_HEADER_JUDGE": "Authorization: planted",
    }  # fmt: skip
    monkeypatch.setenv("ALIGNMENT_RAY_CPUS", "7")  # it is in Ray's command too, which is not said twice
    assert said(stack, now, configuration(stack, services(stack))) == [
        f"ALIGNMENT_PORT_S3: {stack.ports['s3']} → 1234",
        "ALIGNMENT_HEADER_JUDGE: (unset) → (a secret)",
        "ALIGNMENT_RAY_CPUS: (unset) → 7",
        "HF_TOKEN: (a secret) → (a secret)",
        "HTTPS_PROXY: (unset) → http://…@proxy",
        f"PATH: {SHELL['PATH']} → /another",
    ]


def test_a_command_of_another_version_is_said(stack: Stack) -> None:
    config = configuration(stack, services(stack)).replace('"--block"', '"--block" "--new-flag"')
    assert said(stack, SHELL, config) == ["the command of ray, which another version of this repository started"]


def test_services_that_are_the_users_now_or_no_longer() -> None:
    assert service_differences(frozenset({"s3", "ray"}), frozenset({"ray", "prefect"})) == [
        "s3: the stack's own → yours (ALIGNMENT_STORE or AWS_ENDPOINT_URL or AWS_ENDPOINT_URL_S3 is set)",
        "prefect: yours → the stack's own (PREFECT_API_URL unset)",
    ]
