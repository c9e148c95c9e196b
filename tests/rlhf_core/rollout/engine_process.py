"""An engine that tests spoil. Import it as tests.rlhf_core.rollout.engine_process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf_core.rollout import child_engine
from rlhf_core.rollout.child_engine import ChildEngine


class RemoteEngine(ChildEngine):
    def in_worker(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What `function(vLLM's worker, *arguments)` returns: how the tests spoil what it serves."""
        return self._process.call(_in_worker, self._number, function, arguments)


def _in_worker(number: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return child_engine._engines[number]._llm.collective_rpc(function, args=arguments)[0]
