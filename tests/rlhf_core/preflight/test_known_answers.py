"""A right answer is worth more than a wrong one, or `plan` says why it does not know, or it refuses the reward."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from rlhf_core.config.rewards.rewards import VerifierReward
from rlhf_core.errors import RecipeError, StageError
from rlhf_core.pipeline.prepare import check
from rlhf_core.rewards.known_answers import Asked, compared, require_known_answers
from rlhf_core.rewards.text import RewardOfText
from rlhf_core.rewards.verifier import Verifier
from tests.rlhf_core.recipes import both, file, put, write

pytestmark = pytest.mark.parts

ROWS = [("two and two?", "4"), ("two and three?", "5"), ("six and six?", "12")]
EXACT = "def reward(completions, prompts, rows):\n    return [{} for c, row in zip(completions, rows)]\n"


def asked(*rows: tuple[str, str]) -> list[Asked]:
    return [Asked(f"row {n}", prompt, {"id": str(n), "answer": answer}) for n, (prompt, answer) in enumerate(rows)]


def verifier(**settings: Any) -> VerifierReward:
    return TypeAdapter(VerifierReward).validate_python({"type": "verifier", **settings})


@pytest.mark.parametrize("pattern", [None, r"([0-9]+)", r"Answer: (.*)", r"\\boxed\{(.*)\}", r"<answer>(.*)</answer>"])
def test_usual_forms_of_an_answer_are_known(pattern: str | None) -> None:
    config = verifier(pattern=pattern)
    comparison = compared(config, Verifier(config), asked(*ROWS))
    assert (comparison.problem, comparison.unknown) == ("", "")


def test_a_pattern_that_cuts_every_answer_is_refused() -> None:
    config = verifier(pattern="Answer: ([a-z])")
    rows = asked(("a colour?", "red"), ("another?", "blue"))
    assert compared(config, Verifier(config), rows).problem == (
        "gives 0 for the right answer of row 0, 'Answer: red', and 0 for a wrong one, 'Answer: blue', and tells none "
        "of 2 such pairs apart: correct it, or the rows' `answer`; or set `check` to a completion that it takes for "
        "right, with {answer}, or to false"
    )


def test_what_trains_on_wrong_answers_is_refused() -> None:
    config = verifier(weight=-1.0)
    assert compared(config, Verifier(config), asked(*ROWS)).problem.startswith(
        "gives 1 for the right answer of row 0, '4'"
    )


@pytest.mark.parametrize(
    ("settings", "rows", "why"),
    [
        ({"pattern": "the result, (.*)"}, ROWS, "its pattern finds no answer in what was tried: set `check`"),
        ({"check": False}, ROWS, "`check` is false"),
        ({}, [("a", "same"), ("b", " Same ")], "no two of the rows looked at have different answers"),
        ({}, [("a", ""), ("b", "")], "its rows have no `answer`"),
        ({"kind": "code_tests"}, ROWS, "it reads `tests`, not `answer`: set `check` to a completion"),
    ],
)
def test_why_a_verifier_was_not_compared(settings: Any, rows: Any, why: str) -> None:
    config = verifier(**settings)
    comparison = compared(config, Verifier(config), asked(*rows))
    assert comparison.problem == ""
    assert comparison.unknown.startswith(why)


def test_a_completion_of_ones_own_is_compared() -> None:
    config = verifier(pattern="the result, (.*)", check="the result, {answer}")
    assert compared(config, Verifier(config), asked(*ROWS)).unknown == ""
    wrong = verifier(pattern="the result, (.*)", check="result: {answer}")
    assert "tells none of 3 such pairs apart" in compared(wrong, Verifier(wrong), asked(*ROWS)).problem


@pytest.mark.parametrize(("weight", "problem"), [(1.0, ""), (-1.0, "gives 1 for the right answer of row 0, '1/2'")])
def test_equivalent_answers_are_compared(weight: float, problem: str) -> None:
    config = verifier(kind="math", weight=weight)
    with closing(Verifier(config)) as math:
        comparison = compared(config, math, asked(("half?", "1/2"), ("a third?", r"\\frac{1}{3}")))
    assert (comparison.problem[: len(problem)], comparison.unknown) == (problem, "")
    assert bool(comparison.problem) == bool(problem)


def test_a_solution_in_the_row_is_compared_if_the_recipe_says_so() -> None:
    config = verifier(kind="code_tests", check="{answer}")
    rows = asked(("one?", "x = 1"), ("two?", "x = 2"))
    right, wrong = (
        [
            Asked(each.place, each.prompt, {**each.row, "tests": f"assert x == {n}"})
            for each, n in zip(rows, order, strict=True)
        ]
        for order in ("12", "21")
    )
    with closing(Verifier(config)) as code:
        assert compared(config, code, right).unknown == ""
        assert compared(config, code, wrong).problem.startswith("gives 0 for the right answer of row 0, 'x = 1'")


@pytest.mark.parametrize("value", ["four", True])
def test_a_check_has_the_place_of_the_answer(value: Any) -> None:
    with pytest.raises(ValidationError):
        verifier(check=value)


def test_a_job_refuses_what_a_plan_could_not_see() -> None:
    config = verifier(pattern="Answer: ([a-z])")
    rows = asked(("a colour?", "red"), ("another?", "blue"))
    with pytest.raises(StageError, match=r"^rewards\.exact gives 0 for the right answer of row 0"):
        require_known_answers({"exact": config}, {"exact": RewardOfText(Verifier(config))}, rows, "rewards")
    off = config.model_copy(update={"check": False})
    require_known_answers({"exact": off}, {"exact": RewardOfText(Verifier(off))}, rows, "rewards")


def notes(folder: Path, rewards: dict[str, Any], *changes: Any) -> list[str]:
    rows = "\n".join(json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in ROWS)
    change = both(file("prompts.jsonl", rows), put("rl", "ppo", "rewards", value=rewards), *changes)
    return check(write(folder, change), []).check_answers(None)


def test_a_plan_calls_functions_and_verifiers(tmp_path: Path) -> None:
    own = {"type": "function", "path": "own.py"}
    right = file("own.py", EXACT.format("float(c == row['answer'])"))
    assert not [note for note in notes(tmp_path, {"own": own}, right) if note.startswith("rl")]
    constant = file("own.py", EXACT.format("0.5"))
    (note,) = notes(tmp_path, {"own": own}, constant)
    assert note.startswith("no reward was checked with known answers: rl.ppo.rewards.own (it gives")
    assert notes(tmp_path, {"own": own, "exact": {"type": "verifier"}}, constant) == []
    with pytest.raises(
        RecipeError, match=r"^rl\.ppo\.rewards\.own gives 0\.5 for the right answer of .*, '4', and 0\.5"
    ):
        notes(tmp_path, {"own": {**own, "check": "{answer}"}}, constant)


def test_a_plan_says_why_it_called_nothing(tmp_path: Path) -> None:
    rewards = {
        "model": {"type": "reward_model"}, "server": {"type": "http", "url": "http://127.0.0.1:9/"},
        "off": {"type": "verifier", "check": False},
    }  # fmt: skip
    (note,) = notes(tmp_path, rewards)
    assert note == (
        "no reward was checked with known answers: rl.ppo.rewards.model (it is not of text alone); "
        "rl.ppo.rewards.server (set `check`, and its job calls it); rl.ppo.rewards.off (`check` is false)"
    )
