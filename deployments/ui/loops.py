"""A loop as its page shows it: the verdict, the scores and the cost of each round, and how far it has come from its
start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from deployments.ui.reading import StoreReader
from rlhf_core.artifacts.costs import Cost, cost_of
from rlhf_core.artifacts.manifest import ArtifactRef, Manifest
from rlhf_core.artifacts.rounds import RoundEnd, Rounds, RoundStart
from rlhf_core.artifacts.store import Store
from rlhf_core.config.prices import PricesConfig
from rlhf_core.config.stages.loop import RoundConfig
from rlhf_core.config.texts import is_model_name
from rlhf_core.errors import StoreError
from rlhf_core.evaluation.intervals import Estimate
from rlhf_core.evaluation.stored import scorers
from rlhf_core.evaluation.verdict import Criterion
from rlhf_core.pipeline.record import read_start
from rlhf_core.pipeline.round_costs import round_attempts
from rlhf_core.pipeline.run_costs import prices_of_run
from rlhf_core.report.content import Curves


@dataclass(frozen=True, slots=True)
class RoundView:
    number: int
    verdict: str  # running or unfinished too
    reason: str
    run_id: str
    started_at: datetime | None
    ended_at: datetime | None
    candidate: ArtifactRef | None = None
    scores: Mapping[str, float] = field(default_factory=dict)  # of the model accepted before it, and its candidate
    against_accepted: Estimate | None = None
    against_start: Estimate | None = None
    cost: Cost = field(default_factory=Cost)


@dataclass(frozen=True, slots=True)
class LoopView:
    name: str
    rounds: Sequence[RoundView]  # the newest first
    prices: PricesConfig | None  # of its newest run

    @property
    def cost(self) -> Cost:
        return sum((each.cost for each in self.rounds), Cost())

    @property
    def curves(self) -> dict[str, Curves]:
        """Scores by round, in the form of charts."""
        scores: Curves = {}
        for each in reversed(self.rounds):
            for name, score in each.scores.items():
                scores.setdefault(name, []).append((each.number - 1, score))
        gained: Curves = {}
        for each in reversed(self.rounds):
            if each.against_start is not None:
                gained.setdefault("candidate", []).append((each.number - 1, each.against_start.value))
        return {"score": scores, "against the start": gained} if gained else {}


def loop_names(store: Store) -> list[str]:
    names = {path.split("/")[1] for path in store.list("loops/") if path.count("/") == 3}
    return sorted(name for name in names if is_model_name(name))


def read_loop(reader: StoreReader, name: str) -> LoopView | None:
    """Return a loop with its rounds; None if the store has none of this name."""
    repository = reader.repository
    rounds = Rounds(repository.store, name)
    ends = rounds.ends()
    unfinished = rounds.unfinished()
    if not ends and unfinished is None:
        return None
    refs = [end.record for end in ends if end.record is not None]
    first = next((record for ref in refs if (record := repository.stored_manifest(ref)) is not None), None)
    start = None if first is None else repository.stored_manifest(first.parents["accepted_evaluation"])
    newest = read_start(repository.store, (unfinished or ends[-1]).run_id)
    prices = prices_of_run({} if newest is None else newest.recipe)

    def ended(end: RoundEnd) -> RoundView:
        known = first if first is not None and first.ref == end.record else None
        key = "round", name, end.number, prices and prices.model_dump_json()
        try:
            return reader.once(key, lambda: _round(reader, rounds, end, known, start, prices))
        except StoreError:  # samples are gone; what else is known of the round is worth a line
            return _round(reader, rounds, end, known, None, prices, compares=False)

    views = list(reader.pool.map(ended, ends))
    if unfinished is not None:
        views.append(_unfinished(rounds, unfinished, prices))
    return LoopView(name, views[::-1], prices)


def read_last_rounds(reader: StoreReader) -> list[LoopView]:
    """Return all loops, each with its last round, whose evaluations are not compared."""
    return [loop for name in loop_names(reader.repository.store) if (loop := _last_round(reader, name)) is not None]


def _last_round(reader: StoreReader, name: str) -> LoopView | None:
    store = reader.repository.store
    rounds = Rounds(store, name)
    number = rounds.count()
    end, start = rounds.end_of(number), rounds.start_of(number)
    known = end or start
    if known is None:
        return None
    run = read_start(store, known.run_id)
    prices = prices_of_run({} if run is None else run.recipe)
    if end is not None:
        return LoopView(name, [_round(reader, rounds, end, None, None, prices, compares=False)], prices)
    assert start is not None
    return LoopView(name, [_unfinished(rounds, start, prices)], prices)


def _unfinished(rounds: Rounds, start: RoundStart, prices: PricesConfig | None) -> RoundView:
    holder = rounds.holder()
    verdict, reason = ("running", holder) if holder else ("unfinished", "the next run of the loop finishes it")
    return RoundView(
        start.number, verdict, reason, start.run_id, start.started_at, ended_at=None,
        cost=cost_of(rounds.attempts(start), prices),
    )  # fmt: skip


def _round(
    reader: StoreReader, rounds: Rounds, end: RoundEnd, record: Manifest | None, start: Manifest | None,
    prices: PricesConfig | None, compares: bool = True,
) -> RoundView:  # fmt: skip
    """Return a round that has ended. record: its artifact, if it is known already. compares: evaluations, where its own
    comparison did not.

    Raises StoreError if their samples are gone.
    """
    repository = reader.repository
    if record is None and end.record is not None:
        record = repository.stored_manifest(end.record)
    began = rounds.start_of(end.number)
    started_at = None if began is None else began.started_at
    view = RoundView(
        end.number, end.verdict, end.reason, end.run_id, started_at, end.ended_at, end.candidate,
        cost=cost_of(round_attempts(repository, end, record, started_at), prices),
    )  # fmt: skip
    if record is None:
        return view
    gate, parents = RoundConfig.model_validate(record.config).gate, record.parents
    accepted, candidate = (
        repository.stored_manifest(parents[role]) for role in ("accepted_evaluation", "candidate_evaluation")
    )
    criterion = Criterion("difference", gate.scorer, gate.completions, -gate.margin, strict=False)

    def against(evaluation: Manifest | None, metric: str) -> Estimate | None:
        if (
            (measured := _measured(record, metric)) is not None
            or evaluation is None
            or candidate is None
            or not compares
        ):
            return measured
        found = reader.difference(evaluation, candidate, criterion)
        return None if found is None else Estimate(found.value, found.low, found.high)

    scores = {}
    for name, evaluation in {"accepted before": accepted, "candidate": candidate}.items():
        if evaluation is not None:
            scorer = gate.scorer or next(iter(scorers(repository, evaluation, reader.cache)), "")
            score = evaluation.metrics.get(scorer)
            if isinstance(score, int | float):
                scores[name] = float(score)
    return replace(
        view, scores=scores, against_accepted=against(accepted, "difference"),
        against_start=against(start, "difference_to_start"),
    )  # fmt: skip


def _measured(record: Manifest, metric: str) -> Estimate | None:
    """Return a difference that the round's own comparison found; None if it was not of this pair."""
    value, low, high = (record.metrics.get(name) for name in (metric, f"{metric}_low", f"{metric}_high"))
    if isinstance(value, int | float) and isinstance(low, int | float) and isinstance(high, int | float):
        return Estimate(value, low, high)
    return None
