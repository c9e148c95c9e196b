"""Preflight checks of the templates of judges and reward servers: they terminate, and rows have their columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_core.config.rewards.rewards import HTTPReward, JudgeReward, PairwiseReward
from rlhf_core.data.sources.base import Located
from rlhf_core.graph.drafting import Draft
from rlhf_core.rewards.template_trial import template_problem

_TRIED_ROWS = 20  # of each dataset
_ANY_ROW = {"id": "row", "prompt": [{"role": "user", "content": "question"}]}


def check_texts(nodes: Mapping[str, Draft], samples: Mapping[str, list[Located]]) -> Iterator[str]:
    """Check the templates of rewards and scorers. samples: the readable rows of each dataset."""
    for node in nodes.values():
        datasets = {setting.path: setting.names[0] for setting in node.input_settings if setting.names}
        for judged in node.config.judges():
            rows = samples.get(datasets[judged.dataset], []) if judged.dataset else []
            texts = {"completion": "completion"}
            match judged.judge:
                case JudgeReward(template=template, tolerated_failures=share):
                    setting = "template"
                case PairwiseReward(template=template, tolerated_failures=share):
                    setting, texts = "template", {"first": "one completion", "second": "another one"}
                case HTTPReward(query=str() as template, tolerated_failures=share):
                    setting = "query"
                case _:
                    continue
            problem = text_problem(template, rows, texts, tolerates=share > 0)
            if problem is not None:
                yield f"{node.section}.{judged.setting}.{setting}: {problem}"


def text_problem(template: str, located: list[Located], texts: Mapping[str, str], *, tolerates: bool) -> str | None:
    """Return the reason why the template cannot be rendered for the readable rows; None if it can.

    texts: in place of completions; tolerates: it may fail for a row.
    """
    located = located[:_TRIED_ROWS]
    rows: Sequence[Mapping[str, Any]] = [row for _, row in located]
    # For unavailable rows, or rows that may fail, only termination of the template is checked.
    problem = template_problem(template, rows or [_ANY_ROW], texts, lenient=tolerates or not rows)
    if problem is None:
        return None
    where = next((where for where, row in located if f"row {row['id']}:" in problem), "")
    return problem + (f" ({where})" if where else "")
