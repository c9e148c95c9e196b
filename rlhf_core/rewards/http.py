"""A reward from a server, which receives completions as JSON and returns rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_core.config.rewards.rewards import HTTPReward
from rlhf_core.contract import StageContext
from rlhf_core.errors import RewardError
from rlhf_core.rewards.base import RewardResult, checked_result, tolerated, without_repeated
from rlhf_core.rewards.servers import Answer, Servers
from rlhf_core.rewards.templates import TextTemplate

_PLAIN_QUERY = "{{ prompt }}{{ completion }}"


@dataclass(frozen=True, slots=True)
class _Batch:
    completions: Sequence[str]
    prompts: Sequence[str]
    rows: Sequence[Mapping[str, Any]]


class RewardServer:
    """POSTs {"completions", "prompts", "rows"}, each a list. The response is {"rewards": […]}, optionally with
    {"scores": […], "extra": {name: […]}}, where every list has one entry per completion.

    In OpenRLHF's form it is {"query", "prompts", "labels"}, the label being the row's `answer`, and the response
    {"rewards", "scores", "extra_logs"}. Servers of OpenRLHF without scores of their own repeat the rewards as such.

    Batches are sent concurrently, over all servers; rewards.servers.Servers defines the retries.
    """

    @classmethod
    def of(cls, config: HTTPReward, context: StageContext) -> RewardServer:
        return cls(config)

    def __init__(self, config: HTTPReward) -> None:
        """Raises RewardError if an environment variable that the config names is not set or not valid."""
        self._config = config
        self._servers = Servers("reward server", config)
        self._query = TextTemplate(config.query or _PLAIN_QUERY)
        self._extra = "extra" if config.form == "alignment" else "extra_logs"

    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> RewardResult:
        share, size = self._config.tolerated_failures, self._config.batch_size
        parts = [slice(start, start + size) for start in range(0, len(completions), size)]
        batches = [_Batch(completions[part], prompts[part], rows[part]) for part in parts]
        judged = self._servers.map(lambda batch: tolerated(share, len(batch.completions), self._judged, batch), batches)
        values = [value for part in judged for value in part]
        if self._config.form == "openrlhf":
            values = without_repeated(values)
        result = checked_result(values, len(completions), self._servers.name, share)
        metrics = {name: [value] * len(completions) for name, value in self._servers.metrics().items()}
        return replace(result, extra={**result.extra, **metrics})

    def close(self) -> None:
        self._servers.close()

    def _judged(self, batch: _Batch) -> list[Any]:
        return self._values(self._servers.post(self._request(batch)), len(batch.completions))

    def _request(self, batch: _Batch) -> dict[str, Any]:
        if self._config.form == "alignment":
            rows = [dict(row) for row in batch.rows]
            return {"completions": list(batch.completions), "prompts": list(batch.prompts), "rows": rows}
        query = [
            self._query(row, prompt=prompt, completion=completion)
            for completion, prompt, row in zip(batch.completions, batch.prompts, batch.rows, strict=True)
        ]
        return {
            "query": query, "prompts": list(batch.prompts), "labels": [row.get("answer", "") for row in batch.rows]
        }  # fmt: skip

    def _values(self, reply: Answer, count: int) -> list[Any]:
        """Convert the response to one mapping per completion, the form that a user's function returns."""
        answer, server = reply.json(), reply.server
        if not isinstance(answer, dict) or "rewards" not in answer or not answer.keys() <= self._keys:
            raise RewardError(
                f"{server} answered {reply.shown!r}; expected a mapping with `rewards` and, optionally, `scores` and "
                f"`{self._extra}`"
            )
        extra = answer.get(self._extra) or {}
        if not isinstance(extra, dict):
            raise RewardError(f"{server}: `{self._extra}` is {extra!r}, expected a mapping of lists")
        columns = {**extra, "reward": answer["rewards"]}
        if answer.get("scores") is not None:
            columns["score"] = answer["scores"]
        for name, column in columns.items():
            if not isinstance(column, list) or len(column) != count:
                received = len(column) if isinstance(column, list) else repr(column)
                raise RewardError(f"{server}: {received} values of `{name}` for {count} completions")
        return [{name: column[index] for name, column in columns.items()} for index in range(count)]

    @property
    def _keys(self) -> frozenset[str]:
        return frozenset({"rewards", "scores", self._extra})
