"""A group of one engine in this process, without Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.rollout.engine import RolloutEngine
from rlhf_core.rollout.engines import OneEngine


class InlineEngines(OneEngine):
    def __init__(self, engine: RolloutEngine) -> None:
        super().__init__()
        self._engine = engine

    def _run(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return getattr(self._engine, method)(*args, **kwargs)
