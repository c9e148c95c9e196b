"""Seconds that each test took, kept in durations.json: `make durations` refreshes it.

The longest files run first, and a test that takes more than ten seconds carries its reason: `@pytest.mark.slow("…")`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("durations.json")
REPOSITORY = Path(__file__).parents[1]
SLOW = 10.0  # seconds
_LEAST = 1.0  # seconds; shorter tests are counted in their file's sum alone

_measured: defaultdict[str, float] = defaultdict(float)


def stored() -> dict[str, float]:
    """Seconds by test, for those that take a second or more, and the sum of each file by its path."""
    seconds: dict[str, float] = json.loads(FILE.read_text(encoding="utf-8"))
    return seconds


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--store-durations", action="store_true", help="write tests/durations.json for what is run")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _measured[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if not config.option.store_durations or hasattr(config, "workerinput"):  # a worker reports to the controller
        return
    by_file: defaultdict[str, float] = defaultdict(float)
    for test, seconds in _measured.items():
        by_file[test.partition("::")[0]] += seconds
    kept = {name: seconds for name, seconds in stored().items() if name.partition("::")[0] not in by_file}
    kept = {name: seconds for name, seconds in kept.items() if (REPOSITORY / name.partition("::")[0]).exists()}
    slow = {test: seconds for test, seconds in _measured.items() if seconds >= _LEAST}
    rounded = {name: round(value, 1) for name, value in sorted((kept | by_file | slow).items())}
    FILE.write_text(json.dumps(rounded, indent=0) + "\n", encoding="utf-8")
