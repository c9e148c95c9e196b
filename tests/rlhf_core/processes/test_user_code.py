from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhf_core.errors import RecipeError, StageError
from rlhf_core.processes.user_code import check_function, check_maker, last_place, load_function, user_error

pytestmark = pytest.mark.parts

GOOD = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Options:
    scale: float = 2.0

if True:
    def reward(completions, prompts, rows):
        return [Options().scale for _ in completions]
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "rewards.py"
    path.write_text(text)
    return path


def test_a_function_is_loaded(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    check_function(path, "reward", "rewards.py")
    assert load_function(path, "reward", "rewards.py")(["a", "b"], [], []) == [2.0, 2.0]


def test_checking_runs_nothing(tmp_path: Path) -> None:
    check_function(write(tmp_path, "raise SystemExit(3)\nreward = lambda *a: []"), "reward", "rewards.py")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ndef reward(:\n", "my/rewards.py: syntax error in line 2: invalid syntax: def reward(:"),
        (
            "def rewards(c, p, r): ...",
            "my/rewards.py: there is no function `reward` in this file (did you mean `rewards`?)",
        ),
        ("", "my/rewards.py: there is no function `reward` in this file; it defines nothing"),
        ("reward = 3", "my/rewards.py: `reward` is not a function"),
    ],
)
def test_what_is_wrong_with_the_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        load_function(write(tmp_path, text), "reward", "my/rewards.py")
    assert message in str(raised.value)


def test_modules_next_to_it_are_found_also_relatively_and_never_before_installed_ones(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("word = 'beside'\n")
    (tmp_path / "types.py").write_text("word = 'not this'\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("from .inner import word\n")
    (tmp_path / "package" / "inner.py").write_text("word = 'inner'\n")
    text = "import types, beside, package\nfrom .package.inner import word as relative\n"
    text += "def reward(): return [beside.word, package.word, relative, hasattr(types, 'word')]\n"
    loaded = load_function(write(tmp_path, text), "reward", "rewards.py")
    assert loaded() == ["beside", "inner", "inner", False]


def test_a_file_that_exits_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"rewards\.py: loading this file ended the process: it calls `sys.exit`"):
        load_function(write(tmp_path, "def reward(): ...\nimport sys; sys.exit(0)"), "reward", "rewards.py")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"my/rewards\.py: there is no such file"):
        check_function(tmp_path / "rewards.py", "reward", "my/rewards.py")


def test_a_file_that_raises_shows_its_traceback(tmp_path: Path) -> None:
    path = write(tmp_path, "def reward(): ...\nimport no_such_module\n")
    with pytest.raises(StageError, match=r"(?s)rewards\.py.*line 2.*No module named 'no_such_module'"):
        load_function(path, "reward", "rewards.py")


@pytest.mark.parametrize("folder", ["", "../mine/", "/mine/"])
def test_a_traceback_names_the_files_of_the_recipe_and_not_their_copies(tmp_path: Path, folder: str) -> None:
    beside = f"beside_{len(folder)}"  # modules stay
    path = write(tmp_path, f"def reward(x):\n    from {beside} import inner\n    return inner(x)\n")
    (tmp_path / f"{beside}.py").write_text("def inner(x):\n    return open(__file__ + x['key'])\n")
    function = load_function(path, "reward", f"{folder}rewards.py")
    with pytest.raises(KeyError) as caught:
        function({})
    text = user_error(caught.value)
    assert f'File "{folder}rewards.py", line 3, in reward\n    return inner(x)' in text
    assert f"File \"{folder}{beside}.py\", line 2, in inner\n    return open(__file__ + x['key'])" in text
    assert last_place(text, f"{folder}rewards.py", tmp_path) == f"{folder}{beside}.py, line 2"
    with pytest.raises(FileNotFoundError) as missing:
        function({"key": ".txt"})
    assert f"No such file or directory: '{folder}{beside}.py.txt'" in user_error(missing.value)
    assert str(tmp_path) not in text + user_error(missing.value)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("class E:\n    def step(self, reply):\n        yield {}", "E.step yields: it must return what it answers"),
        ("class E:\n    async def step(self, reply):\n        yield {}", "E.step yields"),
        ("class E:\n    def reset(self, row):\n        yield 1\n    def step(self, reply): ...", "E.reset yields"),
        ("class E:\n    @staticmethod\n    def step(self, reply): ...", "E.step must take one argument beside `self`"),
        ("class E:\n    step = 3", "E.step is not a method: write `def step(self, …)`"),
        ("class E:\n    step = property(lambda self: 3)", "E.step is not a method"),
        (
            "import abc\nclass E(abc.ABC):\n    @abc.abstractmethod\n    def step(self, reply): ...",
            "E is abstract, and no object of it can be made",
        ),
        ("import typing\nclass E(typing.Protocol):\n    def step(self, reply): ...", "E is abstract"),
        ("class E:\n    async def __init__(self): ...\n    def step(self, reply): ...", "E.__init__ is `async`"),
        ("async def E(): ...", "E is `async`: it must return an environment itself"),
        ("def E():\n    yield 1", "E yields: it must return an environment"),
    ],
)
def test_environments_that_could_never_be_played(tmp_path: Path, code: str, problem: str) -> None:
    (tmp_path / "e.py").write_text(code)
    with pytest.raises(RecipeError, match=re.escape(problem)):
        check_maker(load_function(tmp_path / "e.py", "E", "e.py"), {}, "E")


@pytest.mark.parametrize(
    "code",
    [
        "class E:\n    @staticmethod\n    def step(reply): ...",
        "class E:\n    @classmethod\n    def step(cls, reply): ...",
        "class E:\n    async def step(self, reply): ...\n    async def reset(self, row): ...",
        "def E():\n    return 1",
    ],
)
def test_environments_that_may_be_played(tmp_path: Path, code: str) -> None:
    (tmp_path / "e.py").write_text(code)
    check_maker(load_function(tmp_path / "e.py", "E", "e.py"), {}, "E")
