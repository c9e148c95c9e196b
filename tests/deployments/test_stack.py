"""The local stack with its real services: up, status, down, and nothing left. tests/chaos kills them."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import s3fs
from ray.job_submission import JobSubmissionClient

from deployments.stack import control
from deployments.stack.environment import SELECTORS, recorded_environment
from deployments.stack.ports import CERTIFICATE, METRICS, TOKEN
from deployments.stack.processes import processes_of
from deployments.stack.services import api_headers
from deployments.stack.settings import LOOPBACK, open_stack
from rlhf_core.errors import StackError
from tests.deployments import anonymous

pytestmark = [pytest.mark.endurance("two-nodes"), pytest.mark.timeout(400)]
ROOT = Path(__file__).resolve().parents[2]


def clear_environment(patch: pytest.MonkeyPatch, folder: Path) -> None:
    for name in [*(name for names in SELECTORS.values() for name in names), "PREFECT_HOME", "PREFECT_API_KEY"]:
        patch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith(("ALIGNMENT_", "AWS_", "RAY_AUTH_"))]:
        patch.delenv(name)
    patch.setenv("ALIGNMENT_STACK_DIR", str(folder))


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`alignment …` as a user runs it."""
    return subprocess.run(
        [sys.executable, "-m", "deployments.cli.main", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


def wait_until(condition: Callable[[], bool], seconds: float = 90.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.5)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A running stack in a folder of its own, whose name is far too long for the path of a Unix socket."""
    folder = tmp_path_factory.mktemp("stack-" + 40 * "x") / "state"
    with pytest.MonkeyPatch.context() as patch:
        clear_environment(patch, folder)
        try:
            done = command("up")
            assert done.returncode == 0, done.stdout + done.stderr
            yield folder
        finally:
            control.down(report=lambda line: None)


@pytest.mark.slow("starts the local stack")
def test_every_service_works(stack: Path) -> None:
    done = command("status")
    assert done.returncode == 0, done.stdout
    assert {line.name: line.state for line in control.status()} == {
        "s3": "working", "warm": "working", "ray": "working", "prefect": "working", "worker": "working",
    }  # fmt: skip


def test_a_second_up_changes_nothing(stack: Path) -> None:
    before = {line.name: line.pid for line in control.status()}
    done = command("up")
    assert done.returncode == 0
    assert "differ" not in done.stdout
    (user,) = re.findall(r"its login is one field: `(\w+):PASSWORD`, with the prefect_password of", done.stdout)
    password = json.loads((stack / "credentials.json").read_text())["prefect_password"]
    api = recorded_environment(stack)["PREFECT_API_URL"]
    assert httpx.get(f"{api}/admin/version", auth=(user, password)).status_code == 200
    assert {line.name: line.pid for line in control.status()} == before


@pytest.mark.endurance("two-nodes")
def test_up_with_other_settings_restarts_nothing_and_says_what_differs(
    stack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {line.name: line.pid for line in control.status()}
    ports = (stack / "ports.json").read_text()
    monkeypatch.setenv("PATH", f"/another/place:{os.environ['PATH']}")
    monkeypatch.setenv("ALIGNMENT_RAY_CPUS", "7")
    monkeypatch.setenv("ALIGNMENT_PORT_S3", "1234")
    monkeypatch.setenv("WANDB_API_KEY", "planted")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:planted@proxy")
    monkeypatch.setenv("ALIGNMENT_STORE", "s3://mine")
    done = command("up")
    assert done.returncode == 0, done.stderr
    assert {line.name: line.pid for line in control.status()} == before
    assert (stack / "ports.json").read_text() == ports
    lines = done.stdout.splitlines()
    assert "  ALIGNMENT_RAY_CPUS: (unset) → 7" in lines
    assert f"  ALIGNMENT_PORT_S3: {json.loads(ports)['s3']} → 1234" in lines
    assert "  WANDB_API_KEY: (unset) → (a secret)" in lines
    assert "  HTTPS_PROXY: (unset) → http://…@proxy" in lines
    assert "  ALIGNMENT_STORE: s3://alignment → s3://mine" in lines
    assert any(line.startswith("  PATH: ") and "→ /another/place:" in line for line in lines)
    assert any(line.startswith("  s3: the stack's own → yours") for line in lines)
    assert "`alignment down && alignment up`" in done.stdout
    assert "planted" not in done.stdout


def test_secrets_are_for_the_user_only(stack: Path) -> None:
    assert stat.S_IMODE(stack.stat().st_mode) == 0o700
    for name in ("credentials.json", "stack.env", "supervisord.conf"):
        assert stat.S_IMODE((stack / name).stat().st_mode) == 0o600
    commands = [" ".join(process.cmdline()) for process in processes_of(stack)]
    for secret in json.loads((stack / "credentials.json").read_text()).values():
        assert secret not in (stack / "supervisord.conf").read_text()
        assert not any(secret in line for line in commands)


def test_everything_listens_on_loopback(stack: Path) -> None:
    members = {process.pid for process in processes_of(stack, sessions=[int((stack / "supervisord.pid").read_text())])}
    listening = [
        connection.laddr
        for connection in psutil.net_connections("tcp")
        if connection.pid in members and connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 15  # SeaweedFS alone has ten
    assert {address.ip for address in listening} <= {LOOPBACK, "::1", "::ffff:127.0.0.1"}


def test_wrong_credentials_are_refused(stack: Path) -> None:
    environment = recorded_environment(stack)
    wrong = s3fs.S3FileSystem(
        endpoint_url=environment["AWS_ENDPOINT_URL"], key="nobody", secret="nothing", skip_instance_cache=True
    )
    with pytest.raises(PermissionError):
        wrong.ls("alignment")


@pytest.mark.endurance("two-nodes")
def test_no_port_gives_anything_to_who_has_no_credentials(stack: Path) -> None:
    """Every port of every process: by HTTP, TLS without a certificate, and gRPC."""
    ports = {port.port: port for port in control.ports()}
    named = {port.name: port.protection for port in ports.values() if port.name}
    assert named.keys() == json.loads((stack / "ports.json").read_text()).keys()
    assert set(named.values()) == {named["s3"], named["prefect"], CERTIFICATE, TOKEN}
    # The node's; and those of the head, whose numbers are fixed, unless another cluster of this machine has them.
    assert sum(port.protection == METRICS for port in ports.values()) <= 3
    by_token = {port.process for port in ports.values() if port.protection == TOKEN and not port.name}
    assert by_token >= {"raylet", "ray::DashboardAgent", "ray::RuntimeEnvAgent"}
    for number, port in ports.items():
        answered = anonymous.answered(number)
        expected = set()
        if port.name == "prefect":
            expected = {"GET /", "GET /api/health"}
        elif port.name == "ray_dashboard":
            expected = {"GET /"}  # the page, which then asks for the token
        elif port.protection == METRICS:
            expected = {f"GET {path}" for path in anonymous.PATHS}
        assert answered == expected, port
    shown = command("status").stdout
    assert [number for number in ports if f":{number}\t" not in shown] == []


def test_ray_refuses_a_job_without_the_token(stack: Path) -> None:
    address = recorded_environment(stack)["RAY_API_SERVER_ADDRESS"]
    assert httpx.post(f"{address}/api/jobs/", json={"entrypoint": "true"}).status_code == 401


def test_deployments_are_registered(stack: Path) -> None:
    api = recorded_environment(stack)["PREFECT_API_URL"]
    headers = api_headers(recorded_environment(stack))
    found = httpx.get(f"{api}/deployments/name/alignment/full", headers=headers).raise_for_status().json()
    assert found["work_pool_name"] == "alignment"
    shipped, path = found["parameter_openapi_schema"]["properties"]["recipe"]["anyOf"]
    assert {"tiny", "smollm2"} <= set(shipped["enum"])
    assert path["type"] == "string"


def test_a_ray_job_sees_the_stack_and_runs_this_python(stack: Path) -> None:
    environment = recorded_environment(stack)
    client = jobs(stack)
    code = (
        "import os, sys, json; "
        "print('@', json.dumps([sys.prefix, {k: v for k, v in os.environ.items() if k.startswith('A')}]))"
    )
    job = client.submit_job(entrypoint=f'python -c "{code}"')
    wait_until(lambda: client.get_job_status(job).is_terminal())
    logs = client.get_job_logs(job)
    line = next(line for line in logs.splitlines() if line.startswith("@ "))
    prefix, seen = json.loads(line[2:])
    assert prefix == sys.prefix
    for name in ("ALIGNMENT_STORE", "AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert seen[name] == environment[name]


def jobs(stack: Path) -> JobSubmissionClient:
    environment = recorded_environment(stack)
    # The token as a header: the mode in this process's own environment is another test's matter.
    headers = {"Authorization": f"Bearer {environment['RAY_AUTH_TOKEN']}"}
    return JobSubmissionClient(environment["RAY_API_SERVER_ADDRESS"], headers=headers)


def sleepers(stack: Path) -> list[psutil.Process]:
    return [process for process in processes_of(stack, "ray") if "time.sleep(1000)" in " ".join(process.cmdline())]


@pytest.mark.endurance("two-nodes")
@pytest.mark.slow("starts the local stack")
def test_down_leaves_nothing_but_what_up_finds_again(stack: Path) -> None:
    """The last that needs the stack. tests/chaos starts services again, with their data."""
    environment = recorded_environment(stack)
    client = jobs(stack)
    temporary = (stack / "tmp").readlink()
    code = "import tempfile, time; tempfile.mkdtemp(prefix='mine-'); time.sleep(1000)"
    client.submit_job(entrypoint=f'python -c "{code}"')
    wait_until(lambda: len(sleepers(stack)) > 0 and [*temporary.glob("mine-*")] != [])
    session = int((stack / "supervisord.pid").read_text())
    family = [*processes_of(stack, sessions=[session]), *psutil.Process(session).children(recursive=True)]
    ports = json.loads((stack / "ports.json").read_text())
    assert len(family) > 15

    done = command("down")

    assert done.returncode == 0, done.stderr
    assert [process for process in family if process.is_running() and process.status() != "zombie"] == []
    assert processes_of(stack, sessions=[session]) == set()
    assert [
        path for path in Path("/tmp").glob("*.sock") if any(str(port) in path.name for port in ports.values())
    ] == []
    assert not temporary.exists()
    assert not open_stack(stack, frozenset(), {}, running=True).link.exists()
    assert {line.state for line in control.status()} == {"stopped"}
    assert command("status").returncode == 1
    assert command("down").returncode == 0  # once more is no error

    # What `up` begins with: the same ports and credentials.
    assert open_stack(stack, frozenset(SELECTORS), {}, running=False).environment() == environment


# What needs no running stack.


def test_no_stack_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clear_environment(monkeypatch, tmp_path / "none")
    done = command("status")
    assert done.returncode == 1
    assert done.stderr == f"error: there is no local stack in {tmp_path / 'none'}: start it with `alignment up`\n"


@pytest.mark.endurance("chaos")
@pytest.mark.slow("starts the local stack")
def test_a_service_that_does_not_start_shows_its_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clear_environment(monkeypatch, tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "ray.py").write_text("raise ImportError('this installation is broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"), prepend=":")
    monkeypatch.setenv("ALIGNMENT_WARM", "0")
    monkeypatch.setenv("ALIGNMENT_STACK_TIMEOUT", "280")  # on a busy machine its attempts take minutes
    monkeypatch.setenv("ALIGNMENT_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("PREFECT_API_URL", f"http://{LOOPBACK}:9/api")
    try:
        done = command("up")
        assert done.returncode == 1
        assert done.stderr.startswith("error: ray fails repeatedly:\n")
        assert "ImportError: this installation is broken" in done.stderr
        assert f"full log: {tmp_path / 'logs' / 'ray.log'}" in done.stderr
    finally:
        control.down(report=lambda line: None)
    assert processes_of(tmp_path) == set()


def test_an_external_s3_server_needs_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clear_environment(monkeypatch, tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StackError, match="name the bucket with ALIGNMENT_STORE"):
        control.up(report=lambda line: None)
