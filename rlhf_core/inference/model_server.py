"""A server of a model in a child process: vLLM's own, for `alignment serve` on a port and for `alignment chat` on a
socket that only this user reaches."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from rlhf_core.chat.call_forms import with_call_form
from rlhf_core.chat.encoding import Tokenizer, stop_token_ids
from rlhf_core.config.base import Dtype
from rlhf_core.errors import StageError, reason_of
from rlhf_core.inference.settings import engine_config
from rlhf_core.models.folders.folder import context_length, stored_dtype
from rlhf_core.processes.child_output import ChildOutput, kept_output
from rlhf_core.processes.child_process import ChildProcess
from rlhf_core.rollout.vllm.server import HEALTH, Served, run_server
from rlhf_core.system.network import listening
from rlhf_core.system.scratch import scratch_folder

_STOP_SECONDS = 30.0  # that the server has to end its engine in order
_POLL_SECONDS = 0.1
_LONGEST_FOLDER = 70  # characters: vLLM's sockets have 37 more, and Linux takes 107
_SILENT_SECONDS = 600.0  # between two tokens, or before the first
_LONGEST = 4096  # tokens of a conversation by default: its cache takes memory


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a server."""

    host: str = "localhost"
    port: int = 80
    path: Path | None = None  # of a Unix socket, in place of a port

    def listener(self) -> socket.socket:
        """Return a listening socket. Raises StageError if the address is not free."""
        if self.path is None:
            return listening(self.host, self.port)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        listener.listen()
        return listener

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def client(self) -> httpx.Client:
        transport = None if self.path is None else httpx.HTTPTransport(uds=str(self.path))
        return httpx.Client(transport=transport, base_url=self.url, timeout=_SILENT_SECONDS, trust_env=False)


def served_model(
    name: str, folder: Path, tokenizer: Tokenizer, dtype: Dtype | None, rollout: Sequence[str], *, engines: int = 1,
    token: str | None = None,
) -> Served:  # fmt: skip
    """Describe the model in `folder` for one of `engines` servers on this machine.

    dtype: none is that of its weights; rollout: `key=value` that override the engine's settings.
    """
    length = min(context_length(folder) or _LONGEST, _LONGEST)
    config = engine_config(rollout, max_length=length, engines=engines)
    return Served(
        name, folder, config, dtype or stored_dtype(folder), stop_token_ids(tokenizer),
        with_call_form(tokenizer, str(tokenizer.get_chat_template())), token,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunningServer:
    served: Served
    address: Address
    process: ChildProcess
    ended: Future[None]
    output: ChildOutput | None  # none: it prints where this process does

    def show_output(self) -> None:
        """Print the server's output from now on: its errors concern the user."""
        if self.output is not None:
            self.output.follow()

    def wait(self) -> None:
        """Wait until the server ends, by itself or by a signal. Raises its error."""
        self.process.result(self.ended)
        raise StageError(f"the server of {self.served.name} has ended by itself: its last output is above")


@contextmanager
def running_server(served: Served, address: Address) -> Iterator[RunningServer]:
    """Start a server; its processes end with this context, however that ends. Yields once it responds.

    Raises StageError, with the reason, if the address is not free, or the model cannot be served.
    """
    with (
        scratch_folder("server") as temporary,
        kept_output() as output,
        ChildProcess(f"the server of {served.name}", _environment(served, temporary), output) as process,
    ):
        server = RunningServer(served, address, process, process.begin(_serve, served, address), output)
        try:
            _wait_for_answer(server)
            yield server
        finally:
            if output is not None:
                output.keep()
            _stop(server)


def _environment(served: Served, temporary: Path) -> dict[str, str]:
    if len(str(temporary)) > _LONGEST_FOLDER:
        raise StageError(f"{temporary}: sockets cannot have as long a path: set TMPDIR to a folder with a shorter one")
    return {
        "OMP_NUM_THREADS": str(served.config.num_threads),
        "HF_HUB_OFFLINE": "1",
        # Why an engine does not start, vLLM writes there alone.
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "TMPDIR": str(temporary),  # vLLM leaves files and sockets there
        # vLLM compiles a one-line rank count even under enforce_eager.
        "TORCH_COMPILE_DISABLE": str(int(not served.config.compiled)),
    }


def _serve(served: Served, address: Address) -> None:
    os.setsid()  # Ctrl-C in the terminal is for the command, which then ends this process
    with address.listener() as listener:
        run_server(served, listener)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # libraries report their leaks there when this process ends


def _wait_for_answer(server: RunningServer) -> None:
    with server.address.client() as client:
        while True:
            if server.ended.done():
                try:
                    server.wait()
                except (ValueError, RuntimeError) as error:  # of the engine's settings; of vLLM
                    raise StageError(f"{server.served.name}: {reason_of(error)}") from error
            with suppress(httpx.TransportError):
                if client.get(HEALTH, timeout=5.0).is_success:
                    return
            time.sleep(_POLL_SECONDS)


def _stop(server: RunningServer) -> None:
    """Stop in order within _STOP_SECONDS; else kill its processes."""
    if not server.ended.done():
        with suppress(ProcessLookupError):
            os.kill(server.process.pid, signal.SIGTERM)
        wait([server.ended], timeout=_STOP_SECONDS)
    server.process.close()
