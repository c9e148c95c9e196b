"""Seconds that each test took, kept in durations.json: `make durations` refreshes it.

The longest groups run first, and a test that takes more than ten seconds carries its reason: `@pytest.mark.slow("…")`.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("durations.json")
REPOSITORY = Path(__file__).parents[1]
SLOW = 10.0  # seconds
_LEAST = 1.0  # seconds; of shorter tests their file's mean is stored

_measured: defaultdict[str, float] = defaultdict(float)


def stored() -> dict[str, float]:
    """Seconds by test, for those that take a second or more, and the mean of a file's others by its path."""
    seconds: dict[str, float] = json.loads(FILE.read_text(encoding="utf-8"))
    return seconds


def expected(test: str, durations: Mapping[str, float]) -> float:
    """Seconds that a test is expected to take, by those of `stored`."""
    return durations.get(test, durations.get(_file_of(test), 0.0))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--store-durations", action="store_true", help="write tests/durations.json for what is run")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _measured[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if not config.option.store_durations or hasattr(config, "workerinput"):  # a worker reports to the controller
        return
    short: defaultdict[str, list[float]] = defaultdict(list)
    for test, seconds in _measured.items():
        if seconds < _LEAST:
            short[_file_of(test)].append(seconds)
    slow = {test: seconds for test, seconds in _measured.items() if seconds >= _LEAST}
    means = {file: statistics.mean(each) for file, each in short.items()}
    kept = {
        name: seconds
        for name, seconds in stored().items()
        if name not in _measured and (REPOSITORY / _file_of(name)).exists()
    }
    rounded = {name: round(seconds, 3) for name, seconds in sorted((kept | slow | means).items())}
    FILE.write_text(json.dumps(rounded, indent=0) + "\n", encoding="utf-8")


def _file_of(test: str) -> str:
    return test.partition("::")[0]
