"""Equivalence of mathematical answers, by math-verify and SymPy."""

from __future__ import annotations

import logging
import resource
from functools import cache

from math_verify import parse, verify

# Its own limit is an alarm, which does not stop a power of integers: the caller kills this process instead.
logging.getLogger("math_verify").setLevel(logging.ERROR)  # else it warns of that
_MEMORY = 2 * 2**30  # bytes beyond what is loaded: 9**9**9 would take all of the machine's
_MARKS = ("$", "\\boxed", "\\(", "\\[", "\\begin{equation", "\\begin{align")  # around mathematics in text


def equivalent(answer: str, completion: str | None, extracted: bool) -> list[float]:
    """Return [1.0] if the mathematics of `completion` equals that of `answer`, else [0.0]; for None, nothing.

    extracted: the completion is an answer alone, else a text that has one. Raises ValueError if `answer` is none.
    """
    _limit_memory()
    expected = parse(_marked(answer), parsing_timeout=None)
    if not expected:
        raise ValueError(f"no mathematics is found in the row's `answer`, {answer[:80]!r}")
    if completion is None:
        return []
    given = parse(_marked(completion) if extracted else completion, parsing_timeout=None)
    return [float(verify(expected, given, timeout_seconds=None))]


def _marked(answer: str) -> str:
    return answer if any(mark in answer for mark in _MARKS) else f"\\boxed{{{answer}}}"


@cache  # once in this process, and not at the import: others import this module too
def _limit_memory() -> None:
    with open("/proc/self/statm") as statistics:
        taken = int(statistics.read().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = taken + _MEMORY if most == resource.RLIM_INFINITY else min(taken + _MEMORY, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
