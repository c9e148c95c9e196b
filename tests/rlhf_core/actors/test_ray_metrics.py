"""Metrics of a stage at the exporter of its Ray node."""

from __future__ import annotations

import time

import httpx
import pytest
import ray

from rlhf_core.actors.ray_metrics import RayMetrics
from rlhf_core.tracking.sink import About

pytestmark = [pytest.mark.endurance("architectures"), pytest.mark.usefixtures("ray_cluster")]


@pytest.mark.slow("Ray reports every ten seconds")
def test_the_exporter_of_the_node_has_the_newest_value_of_each_metric() -> None:
    metrics = RayMetrics(About("sft", "run", "k" * 64, {}, "computation"))
    metrics.log(2, 1.0, {"reward/exact@1": 0.5, "loss": float("nan")})
    metrics.log(3, 2.0, {"reward/exact@1": 0.75})
    address = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"
    deadline, lines = time.monotonic() + 60, dict[str, float]()
    while len(lines) < 2:
        assert time.monotonic() < deadline, lines
        time.sleep(0.5)
        text = httpx.get(address, timeout=10).text
        ours = [line for line in text.splitlines() if line.startswith("ray_alignment_") and 'stage="sft"' in line]
        lines = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in ours}
    assert lines == {"ray_alignment_step": 3.0, "ray_alignment_reward_exact_1": 0.75}
    assert all('stage_key="kkkkkkkkkkkk"' in line for line in ours)
