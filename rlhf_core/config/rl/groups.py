"""The groups of workers that the models of an RL run are on, and what each reserves."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from rlhf_core.config.engines.placement import ModelPlacement, Placement, Reservation, of_each
from rlhf_core.config.engines.rollout import RolloutEngineConfig


def workers_of(role: str, placement: ModelPlacement | None) -> str:
    """Return the name of the workers of a role: `policy`, `group NAME`, or the role itself if they are its own."""
    if placement is None:
        return "policy"
    return role if placement.group is None else f"group {placement.group}"


def reservations(
    ranks: Placement,
    rollout: RolloutEngineConfig,
    apart: Mapping[str, tuple[ModelPlacement, Hashable]],
    *,
    hybrid: bool,
) -> dict[str, Reservation]:
    """Return what policy, engines and each further group of workers reserve, by name.

    apart: the placement of each role that is not on the policy's workers, and its model. Roles without a group, but
    with the same placement and model, are one.
    """
    if hybrid:
        # An engine and the workers on its devices are in one place, and the GPUs of both are the same.
        workers = rollout.workers_per_engine
        cpus = workers * ranks.cpus_per_worker + rollout.cpus_per_engine
        reserved = {"policy and engines": of_each(rollout.engines, cpus, workers * ranks.gpus_per_worker)}
    else:
        reserved = {"policy": ranks.reserves(), "engines": rollout.reserves()}
    first: dict[Hashable, str] = {}
    for role, (placement, model) in apart.items():
        name = first.setdefault(placement.group or (placement, model), workers_of(role, placement))
        reserved[name] = placement.reserves()
    return reserved
