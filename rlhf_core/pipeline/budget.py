"""The budget of a run: refused at its start if it cannot suffice, and enforced while it runs.

What counts are all attempts at the stages whose results the store lacked at the start, those of earlier runs too: a
run that is repeated with a larger budget resumes where the last one was stopped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.artifacts.attempts import attempts_at
from rlhf_core.artifacts.costs import Cost, cost_of, total
from rlhf_core.artifacts.manifest import Manifest
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.config.prices import PricesConfig
from rlhf_core.errors import IntegrityError, RecipeError, StoreError
from rlhf_core.graph.graph import Node
from rlhf_core.pipeline.estimates import Estimate, Known, estimates
from rlhf_core.pipeline.expectations import Range
from rlhf_core.pipeline.plan import PlannedNode, plan
from rlhf_core.pipeline.prepare import Checked, Prepared
from rlhf_core.pipeline.record import RunStart
from rlhf_core.pipeline.run_costs import costs_until_now
from rlhf_core.recipe.prices import PRICES_VARIABLE, prices_of
from rlhf_core.report.formatting import amount

POLL_SECONDS = 10.0  # as often as the heartbeats by which running attempts are known


@dataclass(frozen=True, slots=True)
class ExpectedMoney:
    known: Range | None  # of the stages that have run before
    unknown: tuple[str, ...]  # the other stages


def known_facts(
    checked: Checked,
    planned: Sequence[PlannedNode],
    results: Sequence[Manifest],
    prices: PricesConfig | None,
    repository: ArtifactRepository | None,
) -> Known:
    """Return what estimates are made of."""
    finished = {node.name: node.manifest for node in planned if node.manifest is not None}
    resumes_after = {node.name: node.resumes_after for node in planned if node.resumes_after is not None}
    return Known(checked.seen, checked.loaded.root, finished, results, resumes_after, prices, repository)


def expected_money(by_stage: Mapping[str, Estimate]) -> ExpectedMoney:
    known = None
    for estimate in by_stage.values():
        if estimate.money is not None:
            known = estimate.money if known is None else known + estimate.money
    return ExpectedMoney(known, tuple(name for name, estimate in by_stage.items() if estimate.money is None))


def in_words(money: ExpectedMoney, currency: str) -> str:
    """Format an expected sum for a person."""
    unknown = f"not run before: {', '.join(money.unknown)}" if money.unknown else ""
    if money.known is None:
        return f"estimated cost: unknown, {unknown}" if unknown else "estimated cost: none"
    known = money.known
    shown = f"estimated cost: ≈ {amount(known.expected)} {currency} ({amount(known.low)} to {amount(known.high)})"
    return f"{shown}, without what was {unknown}" if unknown else shown


def require_budget(prepared: Prepared, nodes: Mapping[str, Node], budget: float) -> PricesConfig:
    """Return the prices by which a budget is enforced.

    Raises RecipeError if there are none, if no GPU has a price although a stage reserves some, or if the stages that
    are to be computed cost more than the budget even at the lower end of their estimate.
    """
    prices, computed, expected = _expected(prepared, nodes)
    spent = sum((_spent(prepared.repository, nodes[name], prices) for name in computed), Cost()).money
    least = spent + (0.0 if expected.known is None else expected.known.low)
    if least > budget:
        before = f"{amount(spent)} {prices.currency} are spent already; " if spent else ""
        raise RecipeError(
            f"the budget of {amount(budget)} {prices.currency} does not suffice ({before}"
            f"{in_words(expected, prices.currency)}): raise the budget, or make the run smaller"
        )
    return prices


def round_over_budget(prepared: Prepared, attempts: Iterable[Attempt], budget: float) -> str:
    """Return why the round of a loop is not to be started, in a sentence; empty if it is.

    attempts: of the whole loop until now; what they cost and what the round is expected to must be within the budget.
    Raises RecipeError as `require_budget` does for prices that are missing.
    """
    prices, _, expected = _expected(prepared, prepared.graph)
    spent, currency = cost_of(attempts, prices), prices.currency
    if gpus := _unpriced_gpus(spent):
        return (
            f"the loop's budget cannot be kept, since `prices` has no price of {gpus[0]}: no round was started; add it"
        )
    if spent.money + (0.0 if expected.known is None else expected.known.expected) <= budget:
        return ""
    number = "the next round" if prepared.start is None else f"round {prepared.start.number}"
    return (
        f"{number} was not started: the loop has cost {amount(spent.money)} {currency} of its budget of "
        f"{amount(budget)} {currency} ({in_words(expected, currency)}): raise the budget, or end the loop"
    )


def _unpriced_gpus(cost: Cost) -> list[str]:
    return sorted(each for each in cost.unpriced if each.startswith("the GPU "))


def _expected(prepared: Prepared, nodes: Mapping[str, Node]) -> tuple[PricesConfig, list[str], ExpectedMoney]:
    """Return the prices, the nodes that are to be computed, and what these are expected to cost.

    Raises RecipeError if a price is missing without which a budget bounds nothing.
    """
    prices = prices_of(prepared.loaded.recipe)
    if prices is None:
        raise RecipeError(
            f"a budget needs prices: write `prices` in the recipe, or set {PRICES_VARIABLE}: see docs/operate/cost.md"
        )
    results: list[Manifest] = []
    planned = plan(prepared.graph, prepared.repository, recipe=prepared.loaded.recipe.name, results=results)
    computed = [node.name for node in planned if node.action == "compute" and node.name in nodes]
    reserved = {name: nodes[name].stage.reserves(nodes[name].config) for name in computed}
    on_gpus = [name for name, reservation in reserved.items() if reservation.gpus]
    if on_gpus and not prices.gpus:
        raise RecipeError(f"a budget cannot bound {on_gpus[0]}, which reserves GPUs: give their price in `prices.gpus`")
    on_cores = [name for name, reservation in reserved.items() if not reservation.gpus]
    if on_cores and prices.core is None:
        raise RecipeError(
            f"a budget cannot bound {on_cores[0]}, which runs on cores: give their price in `prices.core`"
        )
    by_stage = estimates(prepared.graph, known_facts(prepared, planned, results, prices, prepared.repository))
    return prices, computed, expected_money({name: by_stage[name] for name in computed})


def _spent(repository: ArtifactRepository, node: Node, prices: PricesConfig) -> Cost:
    return cost_of(attempts_at(repository.store, node.ref, None), prices)


class BudgetWatch:
    """Looks at what a run has cost while it runs, and stops it once that is more than its budget."""

    def __init__(self, repository: ArtifactRepository, budget: float, prices: PricesConfig) -> None:
        self._repository = repository
        self._budget = budget
        self._prices = prices
        self.overrun = ""  # a sentence, once it is over

    @contextmanager
    def watching(self, start: RunStart, stop: Callable[[], None], every: float = POLL_SECONDS) -> Iterator[None]:
        """Call `stop` once the run has cost more than its budget; a thread looks as long as the context lasts."""
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended, start, stop, every), name="budget", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(timeout=every)

    def _watch(self, ended: threading.Event, start: RunStart, stop: Callable[[], None], every: float) -> None:
        while not ended.wait(every):
            try:
                self.overrun = self.look(start)
            except IntegrityError as error:  # no later look would be another
                self.overrun = f"its cost is unknown, so it was stopped: {error}"
            except StoreError as error:
                print(f"the cost of this run cannot be read, trying again: {error}", flush=True)
            if self.overrun:
                stop()
                return

    def look(self, start: RunStart) -> str:
        """Return why the run is to be stopped, in a sentence; empty while it is within its budget."""
        costs = costs_until_now(self._repository, start, self._prices)
        cost = total(costs, "own") + total(costs, "others")
        currency = self._prices.currency
        if gpus := _unpriced_gpus(cost):
            return f"the budget cannot be kept, since `prices` has no price of {gpus[0]}: the run was stopped; add it"
        if cost.money <= self._budget:
            return ""
        return (
            f"the run has cost {amount(cost.money)} {currency} of its budget of {amount(self._budget)} {currency}: its "
            "jobs were stopped, and those that train resume from their checkpoints in a run with a larger budget"
        )
