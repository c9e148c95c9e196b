"""Real services for tests, each a process of its own on loopback, ended by the test that started it."""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path

import pytest
import s3fs

from deployments.stack.settings import is_free

LOOPBACK = "127.0.0.1"
_START_SECONDS = 60


@contextmanager
def http_server(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server in a thread of this process, which answers as `handler` does."""
    with ThreadingHTTPServer((LOOPBACK, 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://{LOOPBACK}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


# None that Linux gives to outgoing connections, Ray to its workers or `alignment up` to its services: any of these may
# take a port before the test's server does. The order differs between the processes that run tests.
_PORTS = iter(random.SystemRandom().sample(range(2000, 10000), 8000))


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens at, none of them given before in this process."""
    return list(islice(filter(is_free, _PORTS), count))


class S3Server:
    """SeaweedFS with credentials, its data in a folder of its own. address: where it listens."""

    def __init__(self, address: str = LOOPBACK) -> None:
        # A short path: it has sockets in it, whose paths may have no more than 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="weed-"))
        self.access_key, self.secret_key = secrets.token_hex(10), secrets.token_hex(20)
        self._reader = secrets.token_hex(10), secrets.token_hex(20)
        self._process: subprocess.Popen[bytes] | None = None
        self._ports = free_ports(10)
        self._address = address
        self.endpoint = f"http://{address}:{self._ports[0]}"

    def start(self) -> None:
        """Start, also again after `stop` with the data as it was; returns when requests are answered."""
        names = ("s3", "master", "volume", "filer", "admin")
        ports = [f"-{n}.port={self._ports[i]}" for i, n in enumerate(names)]
        ports += [f"-{n}.port.grpc={self._ports[i + len(names)]}" for i, n in enumerate(names)]
        command = [
            str(Path(sys.executable).parent / "weed"), f"-logdir={self._folder}", "mini", f"-dir={self._folder}",
            f"-ip={self._address}", f"-ip.bind={self._address}", *ports, "-s3.port.iceberg=0", "-s3.port.lance=0",
            f"-s3.localSocket={self._folder / 's3.sock'}", f"-filer.localSocket={self._folder / 'filer.sock'}",
            "-webdav=false", "-admin.ui=false", "-master.telemetry=false", f"-s3.config={self._identities()}",
        ]  # fmt: skip
        with (self._folder / "output.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self._folder, env={**os.environ, "TMPDIR": str(self._folder)}
            )
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                output = (self._folder / "output.log").read_text(errors="replace")[-3000:]
                self.close()
                raise RuntimeError(f"SeaweedFS does not start:\n{output}")
            time.sleep(0.2)

    def _identities(self) -> Path:
        actions = {
            (self.access_key, self.secret_key): ["Admin", "Read", "Write", "List", "Tagging"],
            self._reader: ["Read", "List"],
        }
        path = self._folder / "identities.json"
        path.write_text(json.dumps({"identities": [
            {"name": key, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": allowed}
            for (key, secret), allowed in actions.items()
        ]}))  # fmt: skip
        return path

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It takes connections and requests, and answers them afterwards."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()  # nothing has to be written: its data goes with it
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        """What a client needs."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def reader(self) -> dict[str, str]:
        """The credentials of a user who may read and list, and nothing else."""
        return dict(zip(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), self._reader, strict=True))

    def create_bucket(self, name: str) -> None:
        self._client().mkdir(name)

    def _answers(self) -> bool:
        try:
            self._client().ls("", refresh=True)
        except OSError:
            return False
        except Exception as error:  # botocore's connection errors share no base with OSError
            if "botocore" not in type(error).__module__:
                raise
            return False
        return True

    def _client(self) -> s3fs.S3FileSystem:
        return s3fs.S3FileSystem(
            endpoint_url=self.endpoint, key=self.access_key, secret=self.secret_key, skip_instance_cache=True,
            use_listings_cache=False, config_kwargs={"retries": {"max_attempts": 1}, "connect_timeout": 2},
        )  # fmt: skip


@contextmanager
def store_of_runs(host: str) -> Iterator[S3Server]:
    """A server on `host` with the bucket `runs`, to which this process's AWS variables lead from here on."""
    server = S3Server(host)
    try:
        server.start()
        server.create_bucket("runs")
        os.environ.update(server.environment())
        yield server
    finally:
        server.close()


def s3_prefix(server: S3Server, patch: pytest.MonkeyPatch) -> str:
    """The URL of a prefix of `server` that no other test uses; sets the AWS variables."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_DEFAULT_REGION"):
        patch.delenv(name, raising=False)
    for name, value in server.environment().items():
        patch.setenv(name, value)
    return f"s3://tests/{uuid.uuid4().hex}"
