"""The verdict of a gate: each metric's difference between two models against its bound. The only implementation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_core.artifacts.manifest import MetricValue
from rlhf_core.config.stages.evaluation import Completions
from rlhf_core.contract import Input
from rlhf_core.evaluation.comparison import compare, require_comparable, scorers_of
from rlhf_core.tracking.protocol import SAMPLES_FILE, VERDICT_FILE, read_jsonl


@dataclass(frozen=True, slots=True)
class Criterion:
    """A bound on the lower end of the 95 % interval of a difference."""

    metric: str  # its name in the gate
    scorer: str | None  # None: the evaluation's first
    completions: Completions
    bound: float
    strict: bool  # the lower end must be above the bound; else at least at it


@dataclass(frozen=True, slots=True)
class Comparison:
    """A criterion applied to two evaluations of the same prompts."""

    metric: str
    scorer: str
    completions: Completions
    value: float  # mean score of the candidate minus that of the model that it is compared with
    low: float
    high: float
    prompts: int
    passed: bool
    reason: str
    bound: float | None = None  # of the lower end; None: of an earlier release


@dataclass(frozen=True, slots=True)
class Verdict:
    comparisons: Sequence[Comparison]

    @property
    def accepted(self) -> bool:
        return all(comparison.passed for comparison in self.comparisons)

    @property
    def reason(self) -> str:
        return "; ".join(comparison.reason for comparison in self.comparisons)

    def write(self, folder: Path) -> None:
        """Write `verdict.json` to a new folder."""
        content: dict[str, Any] = {
            "accepted": self.accepted,
            "reason": self.reason,
            "comparisons": [asdict(comparison) for comparison in self.comparisons],
        }
        folder.mkdir()
        (folder / VERDICT_FILE).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def metrics(self) -> Mapping[str, MetricValue]:
        """Return the metrics of a gate's manifest: `accepted`, each difference with `_low` and `_high`, `reason`."""
        metrics: dict[str, MetricValue] = {"accepted": int(self.accepted)}
        for each in self.comparisons:
            metrics |= {each.metric: each.value, f"{each.metric}_low": each.low, f"{each.metric}_high": each.high}
        # Last, since scorers may have these names.
        return {**metrics, "accepted": int(self.accepted), "reason": self.reason}


def judge(baseline: Input, candidate: Input, criterion: Criterion) -> Comparison:
    """Compare the evaluations of two models. Raises ValueError, in one sentence, if they are not comparable."""
    before, after = (read_jsonl(item.folder / SAMPLES_FILE) for item in (baseline, candidate))
    scorer = criterion.scorer or next(iter(scorers_of(before)), "")
    require_comparable(baseline.manifest, candidate.manifest, scorer)
    difference = compare(before, after, scorer, criterion.completions)
    prompts = sum(scorer in row["completions"][0]["scores"] for row in before)
    low, bound = difference.low, criterion.bound
    passed = low > bound if criterion.strict else low >= bound
    position = {
        (True, True): "above", (True, False): "not above", (False, True): "at least", (False, False): "below",
    }[criterion.strict, passed]  # fmt: skip
    reason = (
        f"{scorer}, {criterion.completions}: {difference.value:+.3f} ({low:+.3f} to {difference.high:+.3f}) on "
        f"{prompts} prompts; the lower end is {position} {bound:+.3f}"
    )
    return Comparison(
        criterion.metric, scorer, criterion.completions, difference.value, low, difference.high, prompts, passed,
        reason, bound,
    )  # fmt: skip
