"""Placements of ranks and engines between which a transport brings weights."""

from __future__ import annotations

from rlhf_core.config.engines.placement import Placement
from rlhf_core.config.engines.rollout import RolloutEngineConfig


def require_transport(placement: Placement, rollout: RolloutEngineConfig, *, hybrid: bool, adapters: bool) -> None:
    """Raise ValueError if `rollout.transport` cannot bring weights, or adapters, to the engines."""
    gpus = f"placement.gpus_per_worker={placement.gpus_per_worker:g}"
    gpus = f"{gpus} and rollout.gpus_per_engine={rollout.gpus_per_engine:g}"
    if rollout.transport == "ipc":
        if (placement.gpus_per_worker or rollout.gpus_per_engine) and not hybrid:
            raise ValueError(
                f"rollout.transport is ipc, but without hybrid no rank and engine are on one device ({gpus}), where "
                "alone a handle of its memory is valid; set hybrid, or collective"
            )
    elif rollout.transport == "collective":
        if hybrid:
            raise ValueError(
                "rollout.transport is collective, but with hybrid a rank and an engine share each device, between "
                "which NCCL does not broadcast; set ipc or folder"
            )
        shares = (placement.gpus_per_worker, rollout.gpus_per_engine)
        if all(shares) and any(share < 1 for share in shares):
            raise ValueError(
                f"rollout.transport is collective, but with {gpus} processes share a GPU, between which NCCL does not "
                "broadcast; set folder, or whole GPUs"
            )
    if rollout.transport != "folder" and adapters and rollout.workers_per_engine > 1:
        raise ValueError(
            f"rollout.transport is {rollout.transport}, but the workers of an engine over several devices read an "
            "adapter from a folder; set folder, or rollout.serve_adapter: merged"
        )
