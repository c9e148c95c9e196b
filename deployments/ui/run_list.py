"""The page of all runs: which of them it shows and in which order, by its address."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any
from urllib.parse import urlencode

from deployments.ui.reading import NotFoundError
from rlhf_core.pipeline.run_view import Run

_NEWEST = "started"


@dataclass(frozen=True, slots=True)
class RunsView:
    """The parameters of the page's address; empty: not given.

    q: a part of the recipe's name, an override or the id. sort: a column, the largest first; with `-` before it the
    smallest. Money is in the currency of each run.
    """

    q: str = ""
    outcome: str = ""
    tag: str = ""
    min_cost: str = ""
    max_cost: str = ""
    min_minutes: str = ""
    max_minutes: str = ""
    sort: str = _NEWEST

    @classmethod
    def of(cls, query: Mapping[str, str]) -> RunsView:
        """Return the view of an address. Raises NotFoundError for one that no view has."""
        view = cls(**{field.name: query[field.name] for field in fields(cls) if query.get(field.name)})
        if view._column not in _COLUMNS:
            raise NotFoundError(f"runs are sorted by {', '.join(_COLUMNS)}, not by `{view._column}`")
        for name in ("min_cost", "max_cost", "min_minutes", "max_minutes"):
            _bound(name, getattr(view, name), default=0.0)
        return view

    @property
    def _column(self) -> str:
        return self.sort.removeprefix("-")

    @property
    def is_filtered(self) -> bool:
        return replace(self, sort=_NEWEST) != RunsView()

    def sorted_by(self, column: str) -> str:
        """Return the address of this view sorted by a column, in the other direction if it is so already."""
        sort = f"-{column}" if self.sort == column else column
        given = {name: text for name, text in asdict(replace(self, sort=sort)).items() if text}
        return f"/?{urlencode(given)}"

    def arrow(self, column: str) -> str:
        """Return the sign of the direction in which the view is sorted by a column."""
        return "" if column != self._column else " ▲" if self.sort.startswith("-") else " ▼"

    def of_runs(self, runs: Sequence[Run]) -> list[Run]:
        """Return the runs of this view, sorted. Those without a value in the column are the last."""
        shown = [run for run in runs if self._shows(run)]
        value = _COLUMNS[self._column]
        values = {id(run): value(run) for run in shown}
        known = [run for run in shown if values[id(run)] is not None]
        known.sort(key=lambda run: values[id(run)], reverse=not self.sort.startswith("-"))
        return known + [run for run in shown if values[id(run)] is None]

    def _shows(self, run: Run) -> bool:
        text = " ".join([run.name, run.run_id, *run.overrides]).lower()
        return (
            self.q.lower() in text
            and self.outcome in ("", run.outcome)
            and (not self.tag or self.tag in run.tags)
            and self._within("cost", lambda: _money(run))
            and self._within("minutes", lambda: None if run.seconds is None else run.seconds / 60)
        )

    def _within(self, what: str, value: Callable[[], float | None]) -> bool:
        low, high = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
        if not low and not high:
            return True
        known = value()
        return known is not None and _bound(what, low, -math.inf) <= known <= _bound(what, high, math.inf)


def _bound(name: str, text: str, default: float) -> float:
    try:
        return float(text) if text else default
    except ValueError as error:
        raise NotFoundError(f"give `{name}` as a number") from error


def _money(run: Run) -> float | None:
    cost = run.cost
    return None if cost is None or run.prices is None else cost.money


def _by_currency(run: Run) -> tuple[str, float] | None:
    money = _money(run)
    return None if money is None or run.prices is None else (run.prices.currency, money)


_COLUMNS: Mapping[str, Callable[[Run], Any]] = {
    _NEWEST: lambda run: run.started_at,
    "time": lambda run: run.seconds,
    "hours": lambda run: None if run.cost is None else run.cost.device_seconds,
    "cost": _by_currency,
}
