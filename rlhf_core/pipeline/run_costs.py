"""The costs of a run's stages: of one that has ended by its record, of any other by the attempts in the store."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.artifacts.attempts import attempts_at
from rlhf_core.artifacts.costs import StageCost, stage_cost
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.config.prices import PricesConfig
from rlhf_core.pipeline.record import RunStart, known_run
from rlhf_core.recipe.prices import prices_of


@dataclass(frozen=True, slots=True)
class RunCosts:
    recipe: str  # its name
    prices: PricesConfig | None
    stages: Sequence[StageCost]


def run_costs(repository: ArtifactRepository, run_id: str, prices: PricesConfig | None = None) -> RunCosts:
    """Return the costs of a run at `prices`, by default its recipe's, else the environment's.

    Raises StoreError if the store does not know the run.
    """
    record, start = known_run(repository.store, run_id)
    if record is not None and not record.is_newest(start):
        record = None  # it runs again
    known = record or start
    assert known is not None
    prices = prices or prices_of_run(known.recipe)
    stages = record.costs(prices) if record is not None else []
    if record is None and start is not None:
        stages = costs_until_now(repository, start, prices)
    return RunCosts(str(known.recipe["name"]), prices, stages)


def costs_until_now(repository: ArtifactRepository, start: RunStart, prices: PricesConfig | None) -> list[StageCost]:
    """Return the costs of a run that has no record yet, by the attempts in the store."""
    costs = []
    for name, ref in start.nodes.items():
        manifest = repository.stored_manifest(ref)
        attempts = attempts_at(repository.store, ref, manifest)
        outcome = "computed" if manifest is not None else attempts[-1].outcome if attempts else "not run"
        costs.append(stage_cost(name, "reused" if name in start.reused else outcome, attempts, start.run_id, prices))
    return costs


def prices_of_run(recipe: Mapping[str, Any]) -> PricesConfig | None:
    """Return the prices of a run's recipe, else the environment's; None if neither has some."""
    prices = recipe.get("prices")
    return prices_of(None) if prices is None else PricesConfig.model_validate_json(json.dumps(prices))
