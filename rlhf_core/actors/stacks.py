"""Stacks of a job's ranks and engines, read on each node by a task of Ray: an actor that hangs answers no call."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlhf_core.actors.placement import runtime_environment
from rlhf_core.system.stacks import stacks_here

_SECONDS = 60.0  # for the slowest node


def stacks_of_actors() -> dict[str, str]:
    """Return the stacks of this job's actors, by name and node. A node that gives none in time has a line saying so."""
    if not ray.is_initialized():
        return {}
    job = ray.get_runtime_context().get_job_id()
    look: Any = ray.remote(num_cpus=0, max_retries=0)(stacks_here)
    looks = {}
    for node in ray.nodes():
        if node["Alive"]:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = look.options(scheduling_strategy=there, runtime_env=runtime_environment({})).remote(job)
            looks[task] = node["NodeManagerAddress"]
    ready, late = ray.wait(list(looks), num_returns=len(looks), timeout=_SECONDS)
    stacks = {f"processes on {looks[task]}": f"no answer in {_SECONDS:.0f} s" for task in late}
    for task in ready:
        try:
            stacks |= {f"{name} on {looks[task]}": text for name, text in ray.get(task).items()}
        except ray.exceptions.RayError as error:
            stacks[f"processes on {looks[task]}"] = f"not read: {error}"
    return stacks
