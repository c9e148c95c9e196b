"""A reward from the user's Python file, run in a child process so that it can be killed if it hangs."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import rlhf_core
from rlhf_core.config.rewards import FunctionReward
from rlhf_core.contract import StageContext
from rlhf_core.errors import RecipeError, RewardError
from rlhf_core.rewards.base import RewardResult, checked_result

_LOADING_SECONDS = 120.0  # importing the user's file may load models; calls have their own limit


class RewardFunction:
    """`function(completions, prompts, rows, **options)` of a Python file, called in batches in a child process.

    The child is started at the first call and restarted after a failure. The two exchange lines of JSON.
    """

    @classmethod
    def of(cls, config: FunctionReward, context: StageContext) -> RewardFunction:
        return cls(config, context.user_file(config.path))

    def __init__(self, config: FunctionReward, file: Path):
        self._config = config
        self._file = file
        self._name = f"{config.path}:{config.function}"
        self._child: subprocess.Popen[bytes] | None = None
        self._unread = b""

    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> RewardResult:
        values: list[Any] = []
        for start in range(0, len(completions), self._config.batch_size):
            part = slice(start, start + self._config.batch_size)
            batch: list[list[Any]] = [list(completions[part]), list(prompts[part]), [dict(row) for row in rows[part]]]
            returned = self._call(batch)
            if len(returned) != len(batch[0]):
                raise RewardError(f"{self._name} returned {len(returned)} values for {len(batch[0])} completions")
            values += returned
        return replace(checked_result(values, len(completions), self._name), separator=self._config.separator)

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def __del__(self) -> None:
        if getattr(self, "_child", None) is not None:
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process starts its own child there.
        return self.__dict__ | {"_child": None, "_unread": b""}

    def _call(self, batch: list[list[Any]]) -> list[Any]:
        if self._child is None:
            self._start()
        limit = self._config.timeout_seconds
        reply = self._exchange({"batch": batch}, limit, f"did not return within {limit:g} s")
        returned = reply["values"]
        if not isinstance(returned, list):
            raise RewardError(f"{self._name} returned {reply['type']}, expected a list of {len(batch[0])} numbers")
        return returned

    def _start(self) -> None:
        home = str(Path(rlhf_core.__file__).parents[1])
        path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
        self._unread = b""
        self._child = subprocess.Popen(
            [sys.executable, "-m", "rlhf_core.rewards.function_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
        )
        request = {
            "file": str(self._file),
            "function": self._config.function,
            "shown": self._config.path,
            "options": self._config.options,
        }
        self._exchange(request, _LOADING_SECONDS, f"could not be loaded within {_LOADING_SECONDS:g} s")

    def _exchange(self, request: Mapping[str, Any], seconds: float, on_timeout: str) -> dict[str, Any]:
        """Send a line to the child and read its reply.

        Raises RewardError if the reply is an error, or the child dies or times out.
        """
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()
            line = self._read_line(time.monotonic() + seconds, on_timeout)
        except BrokenPipeError as error:
            raise self._died() from error
        except RewardError:
            self.close()
            raise
        reply: dict[str, Any] = json.loads(line)
        if reply.get("error_type") == "RecipeError":
            self.close()
            raise RecipeError(reply["error"])
        if "error" in reply:
            self.close()
            raise RewardError(f"{self._name} raised:\n{reply['error']}")
        return reply

    def _read_line(self, deadline: float, on_timeout: str) -> bytes:
        assert self._child is not None
        assert self._child.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._child.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(timeout=max(0.0, deadline - time.monotonic())):
                    raise RewardError(f"{self._name} {on_timeout} and was stopped")
                received = os.read(self._child.stdout.fileno(), 1 << 20)
                if not received:
                    raise self._died()
                self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _died(self) -> RewardError:
        assert self._child is not None
        code = self._child.wait()
        self.close()
        return RewardError(f"{self._name}: its process ended with exit code {code} before it returned; see the log")
