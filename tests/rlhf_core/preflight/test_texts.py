"""Templates of judges, which are programs: they terminate, and use columns that rows have."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.rewards import template_trial
from tests.rlhf_core.recipes import Change, Problems, put

pytestmark = pytest.mark.parts

JUDGE = {"type": "judge", "url": "http://127.0.0.1:9", "model": "m", "pattern": "(.*)", "range": [0, 1]}
PAIRWISE = {
    **{name: value for name, value in JUDGE.items() if name != "range"},
    "type": "pairwise", "template": "{{ first }}{{ second }}{{ row.no }}", "reference": "answer",
}  # fmt: skip
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ completion }}"


def scored_by(template: str, **settings: Any) -> Change:
    return put("evaluation", "scorers", value={"judge": {**JUDGE, "template": template, **settings}})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            scored_by(
                "{{ prompt }} {{ completion }} {{ row.answer }}{% for m in messages %}{{ loop.index }}{% endfor %}"
            ),
            "",
        ),
        (
            scored_by("{{ completion }} {{ row.anser }}"),
            "evaluation.scorers.judge.template: the template cannot be written for row 5e4cbdddea84285f: 'dict object' "
            "has no attribute 'anser' (prompts.jsonl line 1)",
        ),
        (
            scored_by("{{ completion | shout }}"),
            "evaluation.scorers.judge.template: line 1 of the template: No filter named 'shout'.",
        ),
        (scored_by(ENDLESS), "evaluation.scorers.judge.template: the template is not written within 2 s: correct its"),
        (
            scored_by("{{ 'a' * 10 ** 10 }}{{ completion }}"),
            "evaluation.scorers.judge.template: the template needs over 4 GiB of memory: correct it",
        ),
        (
            put("rl", "ppo", "rewards", value={"own": {**JUDGE, "template": "{{ completion }}{{ row.no }}"}}),
            "rl.ppo.rewards.own.template: the template cannot be written for row",
        ),
        (
            put("rl", "ppo", "rewards", value={"own": PAIRWISE}),
            "rl.ppo.rewards.own.template: the template cannot be written for row",
        ),
        (
            put(
                "rl",
                "ppo",
                "rewards",
                value={"own": {**JUDGE, "template": "{{ completion }}{{ row.no }}", "tolerated_failures": 0.5}},
            ),
            "",
        ),
    ],
)
def test_a_template_is_tried_before_a_job(
    problems: Problems, monkeypatch: pytest.MonkeyPatch, change: Change, expected: str
) -> None:
    if "within" in expected:
        monkeypatch.setattr(template_trial, "_TRIAL_SECONDS", 2)
    said = problems(change)
    if not expected:
        assert said == []
        return
    (problem,) = said
    assert problem.startswith(expected)
