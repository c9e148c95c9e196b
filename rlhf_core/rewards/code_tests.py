"""The verifier `code_tests`: a completion's code is right if it passes the tests of its row, in the sandbox.

Expected outputs never enter the sandbox. Tests in Python do, beside the code that they test.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import regex

from rlhf_core.config.rewards.verifiers import VerifierConfig
from rlhf_core.errors import EpisodeError, RewardError
from rlhf_core.processes.sandbox import CodeResult, Sandbox
from rlhf_core.processes.sandbox_process import MOST_OUTPUT

_FENCED = regex.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", regex.DOTALL | regex.MULTILINE)
_MOST_CODE = 2**16  # characters of a completion's code: more is wrong
_MOST_TESTS = 2**18  # characters of a row's tests and prefix: with the code, they fit into the sandbox
_MOST_WRITTEN = MOST_OUTPUT // 2  # characters of what a process is expected to print
_TOLERANCE = 1e-9  # of floats, relative and absolute

_UNIT_TESTS = """\
names = {{"__name__": "solution"}}
exec(compile({code!r}, "<completion>", "exec"), names)
exec(compile({tests!r}, "<tests>", "exec"), names)
{check}
print("\\n" + {token!r})
"""
_CALLS = """\
import json
names = {{"__name__": "solution"}}
exec(compile({code!r}, "<completion>", "exec"), names)
results = [names[{entry_point!r}](*arguments) for arguments in json.loads({inputs!r})]
print("\\n" + json.dumps(results))
"""
# Programs read and write by descriptors too, as open(0) does. What they write to stderr is no answer.
_PROGRAM = """\
import os, sys
with open("stdin", "w", encoding="utf-8") as file:
    file.write({text!r})
os.dup2(os.open("stdin", os.O_RDONLY), 0)
os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT, 0o600), 2)
sys.stdin = open(0, encoding="utf-8", closefd=False)
exec(compile({code!r}, "<completion>", "exec"), {{"__name__": "__main__"}})
"""


@dataclass(frozen=True, slots=True)
class Tests:
    """The tests of a row. Either `code` or `pairs`."""

    code: str  # Python, which raises an exception if the completion is wrong
    pairs: Sequence[tuple[Any, Any]]  # input and output: texts of a program, or arguments and value of `entry_point`
    entry_point: str | None
    prefix: str  # code before the completion's


def read_tests(row: Mapping[str, Any]) -> Tests:
    """Return the tests of a row's columns `tests`, `entry_point` and `code_prefix`. Raises RewardError, KeyError."""
    tests, entry_point, prefix = row["tests"], row.get("entry_point") or None, row.get("code_prefix") or ""
    for name, value in (("entry_point", entry_point or ""), ("code_prefix", prefix)):
        if not isinstance(value, str):
            raise RewardError(f"`{name}` must be text, this is {value!r}")
    if isinstance(tests, str) and tests.lstrip().startswith("["):
        try:
            tests = json.loads(tests)
        except ValueError as error:
            raise RewardError(f"`tests` begins like a JSON list, but is not valid JSON: {error}") from error
    if isinstance(tests, list) and tests and all(isinstance(test, str) for test in tests):
        tests = "\n".join(tests)
    if len(json.dumps([tests, prefix], default=str)) > _MOST_TESTS:
        raise RewardError(f"`tests` and `code_prefix` have more than {_MOST_TESTS} characters")
    if isinstance(tests, str) and tests.strip():
        return Tests(tests, (), entry_point, prefix)
    if not isinstance(tests, list) or not tests:
        raise RewardError("`tests` must be Python code, a list of it, or a list of {input, output}")
    pairs = [_pair(test, entry_point) for test in tests]
    outputs = [json.dumps(output) for _, output in pairs]
    if (sum if entry_point is not None else max)(map(len, outputs)) > _MOST_WRITTEN:
        raise RewardError(f"the `output` of a run has more than {_MOST_WRITTEN} characters")
    return Tests("", pairs, entry_point, prefix)


def _pair(test: Any, entry_point: str | None) -> tuple[Any, Any]:
    if not isinstance(test, dict) or test.keys() != {"input", "output"}:
        raise RewardError(f"a test must be {{input, output}}, this is {str(test)[:80]}")
    given, expected = test["input"], test["output"]
    if entry_point is not None and not isinstance(given, list):
        raise RewardError(f"`input` must be the list of {entry_point}'s arguments, this is {str(given)[:80]}")
    if entry_point is None and not (isinstance(given, str) and isinstance(expected, str)):
        raise RewardError("`input` and `output` of a program must be text; for a function, name it in `entry_point`")
    return given, expected


class CodeTests:
    """Runs each test of programs in a process of its own, and other tests of a row in one."""

    metrics = ("timed_out",)

    @classmethod
    def of(cls, config: VerifierConfig) -> CodeTests:
        return cls(config.timeout_seconds, config.memory_gib, config.modules)

    def __init__(self, seconds: float, memory_gib: float, modules: Sequence[str]) -> None:
        """Limits of each process, and modules that it has loaded."""
        self._limits = (seconds, memory_gib, modules)
        self.workers = max(2, len(os.sched_getaffinity(0)))  # threads in any case: the caller may be in an event loop
        self._sandbox: Sandbox | None = None
        self._starting = Lock()

    def judge(self, answer: str, row: Mapping[str, Any]) -> dict[str, float]:
        try:
            tests = read_tests(row)
        except RewardError as error:
            raise RewardError(f"the dataset row {row.get('id')}: {error}") from error
        blocks = _FENCED.findall(answer)
        code = blocks[-1] if blocks else answer
        if len(code) > _MOST_CODE:
            return {"reward": 0.0}
        try:
            passed, stopped = asyncio.run(self._passes(self._started(), tests.prefix + code, tests))
        except EpisodeError as error:
            raise RewardError(str(error)) from error
        return {"reward": float(passed), "timed_out": float(stopped == "time")}

    def _started(self) -> Sandbox:
        with self._starting:
            if self._sandbox is None:
                self._sandbox = Sandbox(*self._limits)
            return self._sandbox

    async def _passes(self, sandbox: Sandbox, code: str, tests: Tests) -> tuple[bool, str]:
        """Return whether the code passes all tests, and the limit that stopped it."""
        if tests.code:
            token = secrets.token_hex(16)  # the tests were reached: code that ends the process has not passed
            name = tests.entry_point
            check = f"names['check'](names[{name!r}])" if name is not None else ""
            program = _UNIT_TESTS.format(code=code, tests=tests.code, check=check, token=token)
            ran = await sandbox.run(program)
            return _ended_well(ran) and _last_line(ran) == token, ran.stopped
        if tests.entry_point is not None:
            inputs = json.dumps([given for given, _ in tests.pairs])
            ran = await sandbox.run(_CALLS.format(code=code, entry_point=tests.entry_point, inputs=inputs))
            expected = [value for _, value in tests.pairs]
            return _ended_well(ran) and _is_same(_json(_last_line(ran)), expected), ran.stopped
        for given, written in tests.pairs:
            ran = await sandbox.run(_PROGRAM.format(code=code, text=given))
            if not _ended_well(ran) or _lines(ran.output) != _lines(written):
                return False, ran.stopped
        return True, ""

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()


def _ended_well(ran: CodeResult) -> bool:
    return ran.status == 0 and not ran.stopped


def _last_line(ran: CodeResult) -> str:
    return ran.output.removesuffix("\n").rpartition("\n")[2]


def _lines(text: str) -> list[str]:
    """Return the lines without spaces at their ends, and without empty ones at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None  # no list


def _is_same(value: Any, expected: Any) -> bool:
    """Return whether two JSON values are equal, floats within the tolerance."""
    if isinstance(expected, list):
        return isinstance(value, list) and len(value) == len(expected) and all(map(_is_same, value, expected))
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and value.keys() == expected.keys()
            and all(_is_same(value[key], expected[key]) for key in expected)
        )
    if isinstance(expected, bool) or isinstance(value, bool):
        return value is expected
    if isinstance(expected, float) and isinstance(value, int | float):
        return math.isclose(value, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return bool(value == expected)
