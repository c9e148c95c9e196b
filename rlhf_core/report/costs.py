"""The part of a report about cost. It is put into the page of each run: one report may be of several."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.artifacts.costs import StageCost, total
from rlhf_core.config.prices import PricesConfig
from rlhf_core.report.formatting import hours, money
from rlhf_core.report.templating import environment

_END = "</body>"


def with_costs(page: str, costs: Sequence[StageCost], prices: PricesConfig | None) -> str:
    """Return the page with a table of costs at its end. All text is escaped."""
    totals = {part: total(costs, part) for part in ("own", "others", "saved")}
    section = (
        environment()
        .get_template("costs.html")
        .render(costs=costs, prices=prices, totals=totals, hours=hours, money=lambda cost: money(cost, prices))
    )
    before, end, after = page.rpartition(_END)
    return f"{before}{section}{end}{after}" if end else f"{page}{section}"
