"""Rewards and scorers that cannot work."""

from __future__ import annotations

import json

import pytest

from rlhf_core.preflight import loading as preflight_loading
from tests.rlhf_core.recipes import (
    Change,
    Problems,
    both,
    file,
    put,
    validation,
)

pytestmark = pytest.mark.parts


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            file("rewards.py", "def reward(\n"),
            "rl.ppo.rewards.own: rewards.py: syntax error in line 1: '(' was never closed",
        ),
        (file("rewards.py", "x = 1\n"), "rl.ppo.rewards.own: rewards.py: there is no function `reward`"),
        (
            put("rl", "ppo", "rewards", "own", "path", value="no.py"),
            "rl.ppo.rewards.own: no.py: there is no such file",
        ),
        (
            put(
                "rl",
                "validation",
                value=validation(
                    also={
                        "far": {
                            "dataset": "prompts",
                            "scorers": {"gym": {"type": "verifier", "kind": "reasoning_gym"}},
                        }
                    }
                ),
            ),
            "rl.validation.also.far.scorers.gym: the verifier `reasoning_gym` needs the column `task`",
        ),
        (
            file("prompts.jsonl", json.dumps({"prompt": "a"})),
            "evaluation.scorers.exact: the verifier `exact` needs the column `answer`, "
            "which `data.prompts` lacks at prompts.jsonl line 1",
        ),
        (
            both(
                file("prompts.jsonl", json.dumps({"prompt": "a"})),
                put("evaluation", "scorers", "exact", "kind", value="math"),
            ),
            "evaluation.scorers.exact: the verifier `math` needs the column `answer`, "
            "which `data.prompts` lacks at prompts.jsonl line 1",
        ),
        (
            put("evaluation", "scorers", "exact", "kind", value="code_tests"),
            "evaluation.scorers.exact: the verifier `code_tests` needs the column `tests`, "
            "which `data.prompts` lacks at prompts.jsonl line 1",
        ),
        (
            both(
                file("prompts.jsonl", json.dumps({"prompt": "a", "answer": "b", "tests": [{"input": "1"}]})),
                put("evaluation", "scorers", "exact", "kind", value="code_tests"),
            ),
            "evaluation.scorers.exact: prompts.jsonl line 1 in `data.prompts`: a test must be {input, output}, this is "
            "{'input': '1'}",
        ),
        (
            both(
                file("prompts.jsonl", json.dumps({"prompt": "a"})),
                put("rl", "environment", value={"type": "retry", "max_turns": 2}),
            ),
            "rl.environment: `retry` needs the column `answer`, which `data.prompts` lacks at prompts.jsonl line 1",
        ),
        (
            both(
                file("prompts.jsonl", json.dumps({"prompt": "a", "environment": "rety"})),
                put("rl", "environment", value={"type": "by_row", "choices": {"retry": {"type": "retry"}}}),
            ),
            "rl.environment: `environment` is 'rety', an unknown environment (did you mean `retry`?); there "
            "are retry (prompts.jsonl line 1 in `data.prompts`)",
        ),
        (
            both(
                file("prompts.jsonl", json.dumps({"prompt": "a", "environment": "retry"})),
                put("rl", "environment", value={"type": "by_row", "choices": {"retry": {"type": "retry"}}}),
            ),
            "rl.environment: `retry` needs the column `answer`, which `data.prompts` lacks at prompts.jsonl line 1",
        ),
        (
            put(
                "rl",
                "environment",
                value={"type": "by_row", "choices": {"game": {"type": "function", "path": "no.py"}}},
            ),
            "rl.environment.choices.game: no.py: there is no such file",
        ),
        (
            both(
                file(
                    "game.py",
                    "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
                    "class Environment:\n    def step(self, reply): ...\n",
                ),
                put("rl", "environment", value={"type": "function", "path": "game.py", "function": "Environment"}),
            ),
            "rl.environment: game.py: loading this file starts a thread (Thread-",
        ),
        (
            both(
                file("shop.py", "class Shop:\n    def put(self, thing: str):\n        return thing\n"),
                put(
                    "rl",
                    "environment",
                    value={
                        "type": "tools",
                        "parser": "hermes",
                        "tools": {"shop": {"type": "function", "path": "shop.py", "function": "Shop"}},
                    },
                ),
            ),
            "rl.environment.tools.shop: shop.py:Shop.put has no docstring: it tells the policy what the tool does",
        ),
        (
            put("rl", "environment", value={"type": "nemo_gym", "url": "http://127.0.0.1:1"}),
            "rl.environment: `nemo_gym` needs the column `nemo_gym`, which `data.prompts` lacks at prompts.jsonl line",
        ),
        (
            both(
                file(
                    "prompts.jsonl",
                    json.dumps({"request": {"input": "a", "tools": [{"type": "function", "name": "add"}]}}),
                ),
                put("data", "prompts", "columns", value={"nemo_gym": "request"}),
                put("rl", "environment", value={"type": "nemo_gym", "url": "http://127.0.0.1:1"}),
            ),
            "rl.environment: the row has tools: set the environment's `parser` to how the model writes calls "
            "(prompts.jsonl line 1 in `data.prompts`)",
        ),
        (
            file("prompts.jsonl", json.dumps({"prompt": "a", "answer": ""})),
            "the verifier `exact` needs the column `answer`, which `data.prompts` lacks at prompts.jsonl line 1",
        ),
        (
            both(
                file("prompts.jsonl", json.dumps({"prompt": "a", "task": "spell_bakward", "metadata": {}})),
                put("evaluation", "scorers", "exact", "kind", value="reasoning_gym"),
            ),
            "exact: `task` of prompts.jsonl line 1 in `data.prompts`: reasoning_gym has no task `spell_bakward`",
        ),
        (
            put("evaluation", "scorers", "exact", "kind", value="reasoning_gym"),
            "the verifier `reasoning_gym` needs the column `task`",
        ),
    ],
)
def test_one_thing_wrong_with_a_reward_is_one_sentence(
    problems_of_code: Problems, change: Change, expected: str
) -> None:
    said = problems_of_code(change)
    assert any(expected in problem for problem in said), said


def shipping(*names: str) -> Change:
    return put("rl", "ppo", "rewards", "own", "files", value=list(names))


REWARD = "def reward(completions, prompts, rows): return [0.0]\n"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (file("rewards.py", "def reward(completions, answer): ..."), "by these names: missing a required"),
        (put("rl", "ppo", "rewards", "own", "options", value={"a-b": 1}), "by these names: it takes no argument 'a-b'"),
        (file("rewards.py", f"{REWARD}import sys; sys.exit()"), "own: rewards.py: loading this file ended the process"),
        (file("rewards.py", f"{REWARD}1 / 0"), "ZeroDivisionError: division by zero"),
        (file("rewards.py", f"{REWARD}raise ValueError('a\\nb')"), "rewards.py, line 2: ValueError: a b"),
        (file("rewards.py", f"{REWARD}raise ValueError('a' * 9999)"), "line 2: ValueError: " + "a" * 288 + "…"),
        (
            file("rewards.py", f"{REWARD}raise ExceptionGroup('g', [KeyError('a')])"),
            "line 2: ExceptionGroup: g (1 sub-exception) KeyError: 'a'",
        ),
        (
            file("rewards.py", f"{REWARD}compile('def (', 'other.py', 'exec')"),
            "line 2: SyntaxError: invalid syntax",
        ),
        (file("rewards.py", f"{REWARD}class E(BaseException): ...\nraise E(3)"), "line 3: user_code_"),
        (file("rewards.py", f"{REWARD}import os; os._exit(3)"), "cannot be loaded: its process ended with status 3, w"),
        (
            file("rewards.py", f"{REWARD}raise KeyboardInterrupt"),
            "rewards.py cannot be loaded: rewards.py, line 2: KeyboardInterrupt",
        ),
        (
            file("rewards.py", f"{REWARD}print('here')\nimport os; os._exit(5)"),
            "its process ended with status 5, while it ran the file; the last it wrote: here",
        ),
        (
            file("rewards.py", f"{REWARD}import os; os.closerange(3, 64); os._exit(5)"),
            "rewards.py cannot be loaded: its process ended with status 5, while it ran the file",
        ),
        (
            file("rewards.py", f"{REWARD}import os; os.closerange(0, 64)"),
            "rewards.py cannot be loaded: its process ended with status 1, while it ran the file",
        ),
        (
            file("rewards.py", f"x = (1, {'1, ' * 500}\n"),
            "rewards.py: syntax error in line 1: '(' was never closed: ",
        ),
        (file("rewards.py", f"# coding: klingon\n{REWARD}"), "rewards.py: is not a Python file (unknown enc"),
        (file("rewards.py", f"{REWARD}import no_such_module"), "imports `no_such_module`, which is not installed here"),
        (file("rewards.py", f"{REWARD}open('words.txt')"), "directory: 'words.txt': name files that it reads"),
        # It is where this test is run, and not where the job works.
        (file("rewards.py", f"{REWARD}open('pyproject.toml')"), "directory: 'pyproject.toml': name files that it"),
        (
            both(file("rewards.py", f"def f():\n import beside\n{REWARD}"), file("beside.py", "from . import further"),
                 file("further.py", "")),
            "rewards.py imports beside.py, which lies next to it but would not be sent with it: "
            "add `files: [beside.py, further.py]`",
        ),
        (
            both(file("rewards.py", f"from kit.inner import word\n{REWARD}"), file("kit/__init__.py", ""),
                 file("kit/inner.py", "word = 1"), shipping("kit/inner.py")),
            "add `files: [kit/inner.py, kit/__init__.py]`",
        ),
        (shipping("no.py"), "no.py, which `files` names beside rewards.py: there is no such file"),
        (shipping(f"{'x' * 300}.py"), "which `files` names beside rewards.py: cannot be read (File name too long)"),
        (file("rewards.py", f"import {'x' * 300}\n{REWARD}"), "which is not installed here"),
        (both(file("json.py", ""), shipping("json.py")), "has the name of an installed module: rename it"),
    ],
)  # fmt: skip
def test_code_that_a_job_could_not_load_is_one_sentence(
    problems_of_code: Problems, change: Change, expected: str
) -> None:
    said = problems_of_code(change)
    assert any(expected in problem for problem in said), said
    assert all(len(problem) < 500 for problem in said)


@pytest.mark.parametrize("text", ["while True: pass", "import os, signal; os.kill(os.getpid(), 9)", "print('{}')"])
def test_a_file_cannot_hurt_its_check(problems_of_code: Problems, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(preflight_loading, "LOADING_SECONDS", 5.0)
    said = problems_of_code(file("rewards.py", f"{text}\n{REWARD}"))
    expected = {
        "w": "could not be loaded within 5 s and was stopped",
        "i": "its process was killed (signal 9), usually because memory ran out, while it ran the file",
        "p": None,
    }[text[0]]
    assert len(said) == (expected is not None)
    assert any(expected in problem for problem in said) if expected else said == []


def test_files_go_with_the_function(problems_of_code: Problems) -> None:
    beside = both(file("beside.py", "from kit import word"), file("kit/__init__.py", "word = 1"))
    assert (
        problems_of_code(
            both(beside, file("rewards.py", f"import beside\n{REWARD}"), shipping("beside.py", "kit/__init__.py"))
        )
        == []
    )
