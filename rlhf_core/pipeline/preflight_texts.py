"""Templates of judges and reward servers before anything runs: do they end, and have rows what they ask for?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_core.config.rewards import HTTPReward, JudgeReward
from rlhf_core.config.sampled import PairsConfig
from rlhf_core.pipeline.drafting import Draft
from rlhf_core.pipeline.samples import Located
from rlhf_core.rewards.template_trial import template_problem

_TRIED_ROWS = 20  # of each dataset
_ANY_ROW = {"id": "row", "prompt": [{"role": "user", "content": "question"}]}


def check_texts(nodes: Mapping[str, Draft], samples: Mapping[str, list[Located]]) -> Iterator[str]:
    """samples: the rows of each dataset that could be read."""
    for node in nodes.values():
        datasets = {setting.path: setting.names[0] for setting in node.input_settings if setting.names}
        for place, template, dataset, texts, tolerates in _templates(node):
            known = samples.get(datasets[dataset], [])[:_TRIED_ROWS]
            rows: Sequence[Mapping[str, Any]] = [row for _, row in known]
            # Of rows that are not at hand, or may fail, only whether the template ends.
            lenient = tolerates or not rows
            problem = template_problem(template, rows or [_ANY_ROW], texts, lenient=lenient)
            if problem is not None:
                where = next((where for where, row in known if f"row {row['id']}:" in problem), "")
                yield f"{node.section}.{place}: {problem}" + (f" ({where})" if where else "")


def _templates(node: Draft) -> Iterator[tuple[str, str, str, Mapping[str, str], bool]]:
    """The setting of each, its text, the input whose rows it reads, texts in place of completions, and whether it may
    fail for a row."""
    for judged in node.config.judges():
        one = {"completion": "completion"}
        match judged.judge:
            case JudgeReward(template=template, tolerated_failures=share):
                yield f"{judged.setting}.template", template, judged.dataset, one, share > 0
            case HTTPReward(query=str() as template, tolerated_failures=share):
                yield f"{judged.setting}.query", template, judged.dataset, one, share > 0
    if isinstance(node.config, PairsConfig) and (judge := node.config.judge) is not None:
        two = {"first": "one completion", "second": "another one"}
        yield "judge.template", judge.template, "dataset", two, judge.tolerated_failures > 0
