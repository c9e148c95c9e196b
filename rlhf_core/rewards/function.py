"""A reward from the user's Python file, run in a child process so that it can be killed if it hangs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from rlhf_core.config.rewards.rewards import FunctionReward
from rlhf_core.contract import StageContext
from rlhf_core.errors import RewardError
from rlhf_core.processes.user_process import UserFunction, UserProcess
from rlhf_core.rewards.base import RewardResult, checked_result, tolerated, without_repeated


class RewardFunction:
    """`function(completions, prompts, rows, **options)` of a Python file, called by name, in batches; or a function of
    TRL, OpenRLHF or verl, called in its form (processes/reward_forms.py).

    It may be `async`: its result is awaited in its process.
    """

    @classmethod
    def of(cls, config: FunctionReward, context: StageContext) -> RewardFunction:
        return cls(config, context.user_file(config.path))

    def __init__(self, config: FunctionReward, file: Path, *, log: IO[bytes] | None = None, folder: Path | None = None):
        """log, folder: see UserProcess."""
        self._config = config
        function = UserFunction(file, config.function, config.path, config.parameters, config.options, form=config.form)
        self._name = function.name
        self._process = UserProcess(function, log=log, folder=folder)

    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> RewardResult:
        values: list[Any] = []
        share = self._config.tolerated_failures
        for start in range(0, len(completions), self._config.batch_size):
            part = slice(start, start + self._config.batch_size)
            batch: list[list[Any]] = [list(completions[part]), list(prompts[part]), [dict(row) for row in rows[part]]]
            values += tolerated(share, len(batch[0]), self._values, batch)
        if self._config.form == "openrlhf":
            values = without_repeated(values)
        of_trl = self._config.form in ("trl", "trl_conversational")
        result = checked_result(values, len(completions), self._name, share, may_not_apply=of_trl)
        return replace(result, separator=self._config.separator)

    def close(self) -> None:
        self._process.close()

    def _values(self, batch: list[list[Any]]) -> list[Any]:
        reply = self._process.call(batch, self._config.timeout_seconds)
        returned, count = reply["values"], len(batch[0])
        if not isinstance(returned, list):
            raise RewardError(f"{self._name} returned {reply['type']}, expected a list of {count} numbers")
        if len(returned) != count:
            raise RewardError(f"{self._name} returned {len(returned)} values for {count} completions")
        return returned
