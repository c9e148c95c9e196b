"""The tracker Prometheus: a stage's metrics at the exporter of the job's Ray node."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from ray.util.metrics import Gauge

from rlhf_core.config.tracking import PrometheusConfig
from rlhf_core.tracking.sink import About

_NO_SIGN = re.compile(r"\W", re.ASCII)


class RayMetrics:
    """Gauges `ray_alignment_METRIC`, with the labels `stage`, the node of the recipe, and `stage_key`.

    Ray exports those of a process that is connected to a cluster, as jobs are whose stage computes in actors.
    """

    def __init__(self, about: About):
        self._labels = {"stage": about.name, "stage_key": about.key[:12]}
        self._gauges: dict[str, Gauge] = {}

    @classmethod
    def of(cls, config: PrometheusConfig, folder: Path, about: About) -> RayMetrics:
        return cls(about)

    def log(self, step: int, unix_time: float, metrics: Mapping[str, float]) -> None:
        for metric, value in {"step": step, **metrics}.items():
            if math.isfinite(value):
                self._gauge(metric).set(value, self._labels)

    def close(self) -> None: ...

    def _gauge(self, metric: str) -> Gauge:
        name = f"alignment_{_NO_SIGN.sub('_', metric)}"
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, description=metric, tag_keys=tuple(self._labels))
        return self._gauges[name]
