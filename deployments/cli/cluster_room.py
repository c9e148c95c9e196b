"""The GPUs of the Ray cluster that jobs are submitted to, against what a run reserves."""

from __future__ import annotations

import os
from collections.abc import Iterator

import httpx

_SECONDS = 3.0


def gpu_notes(reserved: float) -> Iterator[str]:
    """reserved: GPUs of the stage that reserves most."""
    address = os.environ.get("RAY_API_SERVER_ADDRESS") or ""
    if not address.startswith("http"):
        return
    try:
        total = _gpus(address)
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        yield f"the Ray cluster at {address} does not say how many GPUs it has ({type(error).__name__})"
        return
    if reserved > total:
        yield f"a stage reserves {reserved:g} GPUs, and the Ray cluster has {total:g}: it would wait for more nodes"
    elif reserved < total:
        yield (
            f"{total - reserved:g} of the {total:g} GPUs of the Ray cluster are used by no stage: raise "
            "`placement.workers`, `placement.gpus_per_worker` or `rollout.engines`"
        )


def _gpus(address: str) -> float:
    """Of the nodes that are alive."""
    token = os.environ.get("RAY_AUTH_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    answer = httpx.get(f"{address}/api/cluster_status", headers=headers, timeout=_SECONDS).raise_for_status().json()
    usage = answer["data"]["clusterStatus"]["loadMetricsReport"]["usage"]
    return float((usage.get("GPU") or [0.0, 0.0])[1])
