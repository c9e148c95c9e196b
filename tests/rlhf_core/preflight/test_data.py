"""Datasets that are missing, incomplete, or in another format than their stage needs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.data.sources import data_files
from rlhf_core.preflight.look import preflight
from rlhf_core.preflight.samples import read_samples
from rlhf_core.recipe.loading import load_recipe
from tests.rlhf_core.recipes import (
    Change,
    Problems,
    both,
    file,
    gym,
    put,
    validation,
    write,
)

pytestmark = pytest.mark.parts

EXACT = {"type": "verifier"}
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def in_folder(name: str, make: Callable[[Path], None]) -> Change:
    """Beside a file of the folder `more` that is right."""

    def change(recipe: dict[str, Any], root: Path) -> None:
        (root / "more").mkdir()
        (root / "more" / "first.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
        make(root / "more" / name)

    return change


def mixed(weights: tuple[float, float], stop: str = "first_exhausted", *, again: bool = False) -> Change:
    """The conversations from two files, or from one twice."""
    paths = ["talks.jsonl", "talks.jsonl" if again else "held_out.jsonl"]
    mix = [
        {"source": {"type": "files", "paths": [path]}, "weight": weight}
        for path, weight in zip(paths, weights, strict=True)
    ]
    return put("data", "talks", value={"format": "conversations", "on_overlap": "allow", "mix": mix, "stop": stop})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda r, root: (root / "talks.jsonl").unlink(),
            "data.talks: talks.jsonl: there is no such file (looked for /",
        ),
        (
            put("data", "talks", "source", "paths", value=["trl-lib/tldr"]),
            "trl-lib/tldr); if it is on the hub, write `{type: hub, repository: trl-lib/tldr}`",
        ),
        (
            both(put("data", "talks", "source", "paths", value=["a.txt"]), file("a.txt", "text")),
            "data.talks: a.txt: files must end in .json",
        ),
        (
            both(put("data", "talks", "source", "paths", value=["more"]), lambda r, root: (root / "more").mkdir()),
            "data.talks: more: there is no data file in this folder, whose name ends in .json",
        ),
        (
            put("data", "talks", "source", "paths", value=["more-*.jsonl"]),
            "data.talks: more-*.jsonl: no file matches this pattern (looked in /",
        ),
        (
            both(lambda r, root: (root / "talks.jsonl").unlink(), lambda r, root: os.mkfifo(root / "talks.jsonl")),
            "data.talks: talks.jsonl: is a named pipe, not a file: write its content to a file (looked for /",
        ),
        *(
            (
                both(put("data", "talks", "source", "paths", value=[paths]), in_folder("good.jsonl", make)),
                f"data.talks: more/good.jsonl: {problem} (looked for /",
            )
            for paths in ("more", "more/*.jsonl")
            for make, problem in (
                (os.mkfifo, "is a named pipe, not a file: write its content to a file"),
                (lambda path: path.symlink_to("gone.jsonl"), "is a link to a file that is not there"),
            )
        ),
        (
            both(
                put("rl", "ppo", "rewards", "own", value={"type": "function", "path": "rewards.py"}),
                lambda r, root: (root / "rewards.py").unlink(),
                lambda r, root: os.mkfifo(root / "rewards.py"),
            ),
            "rl.ppo.rewards.own: rewards.py: is a named pipe, not a file",
        ),
        (file("talks.jsonl", "\n"), "data.talks: talks.jsonl: the file has no rows"),
        (file("talks.jsonl", '{"prompt": "a", "completion": "b"}\noops\n'), "data.talks: talks.jsonl line 2: not JSON"),
        (
            file("prompts.jsonl", '{"promt": "a"}\n'),
            "data.prompts: prompts.jsonl line 1: no column `prompt` (did you mean `promt`?); it has promt",
        ),
        (
            put("data", "prompts", "columns", value={"prompt": "ask"}),
            "prompts.jsonl line 1: no column `ask`; it has answer",
        ),
        (
            both(
                put("data", "talks", "columns", value={"sytem": "context"}),
                file("talks.jsonl", '{"prompt": "a", "completion": "b", "context": "c"}\n'),
            ),
            "data.talks.columns: the format conversations has no column `sytem` (did you mean `system`?); it has",
        ),
        (
            both(put("data", "pairs", "columns", value={"chsen": "chosen"})),
            "data.pairs.columns: the format preferences has no column `chsen` (did you mean `chosen`?); it has",
        ),
        (
            both(put("data", "prompts", "columns", value={"id": "answer"})),
            "data.prompts.columns: `id` is made of the content of a row: remove it, or call the column `unused`",
        ),
        (
            put("data", "talks", "source", "paths", value=["x" * 300 + ".jsonl"]),
            "cannot be read (File name too long) (looked for /",
        ),
        (
            put("data", "talks", "source", "paths", value=["~/d.jsonl"]),
            "~/d.jsonl); write the path out: `~` and `$` mean nothing here",
        ),
        (put("data", "talks", "source", value=None), "data.talks: names neither `source` nor `mix`"),
        (put("data", "talks", "exclude", value=["talks"]), "data.talks: `exclude` goes in a circle: talks -> talks"),
        (
            put("data", "talks", "exclude", value=["unused"]),
            "data.unused: nowhere.jsonl: there is no such file",
        ),
        (
            put("reward_model", "dataset", value="talks"),
            "reward_model.dataset: `talks` has the format conversations, reward_model needs preferences",
        ),
        (
            put("sft", "dataset", value="prompts"),
            "sft.dataset: `prompts` has the format prompts, sft needs conversations",
        ),
        (put("rl", "dataset", value="pairs"), "rl.dataset: `pairs` has the format preferences, rl needs prompts"),
        (
            put("rl", "validation", value=validation(dataset="pairs")),
            "rl.validation.dataset: `pairs` has the format preferences, rl.validation needs prompts",
        ),
        (
            put(
                "rl",
                "validation",
                value=validation(also={"far": {"dataset": "pairs", "scorers": validation()["scorers"]}}),
            ),
            "rl.validation.also.far.dataset: `pairs` has the format preferences, rl.validation.also.far needs prompts",
        ),
        (
            put("sft", "validation", value={"dataset": "pairs", "every_steps": 1}),
            "sft.validation.dataset: `pairs` has the format preferences, sft.validation needs conversations",
        ),
        (
            put(
                "sft", "validation", value={"dataset": "talks", "every_steps": 1, "also": {"far": {"dataset": "tlks"}}}
            ),
            "sft.validation.also.far.dataset: there is no dataset `tlks` in `data` (did you mean `talks`?)",
        ),
        (put("rl", "dataset", value="text"), "rl.dataset: `text` has the format text, rl needs prompts"),
        (
            both(put("rl", "dataset", value="talks"), put("rl", "environment", value={"type": "retry"})),
            "rl.dataset: `talks` has the format conversations, rl needs prompts",
        ),
        (
            both(
                put("better", value={"stage": "pairs", "dataset": "prompts"}), put("evaluation", "models", value=["rl"])
            ),
            "better.dataset: `prompts` has the format prompts, better needs completions",
        ),
        (
            both(put("data", "talks", "source", "paths", value=["more"]), in_folder("b\udcff.jsonl", Path.touch)),
            "data.talks: more/b\\udcff.jsonl: its name is not UTF-8, as of an old archive or disk: rename it",
        ),
        (mixed(weights=(1, 1e6), stop="all_exhausted"), "data.talks: stop: about"),
        (mixed(weights=(1, 1), again=True), "data.talks: mix[1]: no row of this source is left"),
        (
            put("data", "talks", "source", value={"type": "function", "path": "rewards.py", "function": "rewrad"}),
            "data.talks: rewards.py: there is no function `rewrad` in this file (did you mean `reward`?)",
        ),
        (
            both(
                put("data", "talks", "source", value={"type": "function", "path": "own.py", "function": "rows"}),
                file("own.py", "async def rows():\n    return []\n"),
            ),
            "data.talks: own.py:rows is `async`: it must return the rows itself",
        ),
        (gym(tasks={"spell_bakward": {}}), "data.prompts: reasoning_gym has no task `spell_bakward` (did you mean"),
        (gym(tasks={"chain_sum": {"min_term": 1}}), "`chain_sum` has no option `min_term` (did you mean `min_terms`?)"),
        (
            put("data", "prompts", "source", value={"type": "files", "paths": ["talks.jsonl", "text.jsonl"]}),
            "data.prompts: text.jsonl line 1: no column `prompt`",
        ),
        (
            file(
                "talks.jsonl",
                json.dumps({"messages": [{"role": "system", "content": "x"}, {"role": "assistant", "content": "y"}]}),
            ),
            "sft.dataset: talks.jsonl line 1: the chat template refuses a conversation: this model knows user",
        ),
    ],
)
def test_one_thing_wrong_with_the_data_is_one_sentence(problems: Problems, change: Change, expected: str) -> None:
    said = problems(change)
    assert any(expected in problem for problem in said), said


def test_several_bad_rows_are_one_sentence_with_the_first_and_the_count(problems: Problems) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        good, lacking = '{"prompt": "a", "completion": "b"}\n', '{"prompt": "a"}\n'
        (root / "talks.jsonl").write_text(good + lacking + "oops\n" + lacking * 3)

    assert problems(change) == [
        "data.talks: 5 bad rows of 6 read: talks.jsonl line 2: no column `completion` (did you mean `prompt`?); it has "
        "prompt (see `columns` in the recipe) (4 such rows, also talks.jsonl line 4, talks.jsonl line 5); "
        "talks.jsonl line 3: not JSON (Expecting value, column 1: 'oops'); "
        "correct them, or drop them (the dataset's on_bad_row)"
    ]


def test_bad_rows_that_will_be_dropped_are_a_note_and_no_problem(problems: Problems, tmp_path: Path) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        recipe["data"]["talks"]["on_bad_row"] = "drop"
        (root / "talks.jsonl").write_text('{"prompt": "a", "completion": "b"}\noops\n{"prompt": "a"}\n')

    assert problems(change) == []
    assert preflight(load_recipe(write(tmp_path, change))) == [
        "data.talks: 2 bad rows are dropped: 1 not JSON, 1 no column `completion`; "
        "first: talks.jsonl line 2: not JSON (Expecting value, column 1: 'oops')"
    ]


@pytest.mark.parametrize(
    ("row", "settings", "unread"),
    [
        (
            {"prompt": "a", "completion": "b", "input": "c", "label": False, "id": 1, "empty": None, "x\ny": 1, "o": 1},
            {"columns": {"unused": "o"}},
            "input, label, x\\ny",
        ),
        ({"prompt": "a", "completion": "b", "answer": "c"}, {}, "answer"),
        ({"prompt": "a", "answer": "b"}, {}, None),
        ({"prompt": "a", "question": "b", "completion": "c"}, {}, "question"),
        ({"prompt": "a", "q": "b", "completion": "c"}, {"columns": {"prompt": "q"}}, "prompt"),
        ({"messages": TURNS, "prompt": "a"}, {}, "prompt"),
        ({"messages": TURNS, "prompt": "a", "completion": "b"}, {}, None),  # compared with the messages
        ({"messages": TURNS, "prompt": "a", "answer": "c"}, {}, "answer, prompt"),
    ],
)
def test_columns_that_count_for_nothing_are_noted(
    tmp_path: Path, row: dict[str, Any], settings: dict[str, Any], unread: str | None
) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        (root / "talks.jsonl").write_text(json.dumps(row))
        recipe["data"]["talks"] |= settings

    note = f"data.talks: columns that are not read: {unread}; `columns` says what one means"
    assert preflight(load_recipe(write(tmp_path, change))) == ([] if unread is None else [note])


def test_a_name_for_rewards_that_is_nearly_one_of_the_format_is_noted(tmp_path: Path) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        (root / "prompts.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b", "s": "c", "t": "d"}))
        recipe["data"]["prompts"]["columns"] = {"sytem": "s", "unit_tests": "t"}

    note = "data.prompts.columns: `sytem` is kept for rewards and environments alone (did you mean `system`?)"
    assert preflight(load_recipe(write(tmp_path, change))) == [note]


def test_folders_and_patterns_stand_for_the_files_in_them(tmp_path: Path) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        recipe["data"]["talks"]["source"]["paths"] = ["more", "part-[0-9].jsonl", "talks.jsonl"]
        (root / "more").mkdir()
        for name in ("more/b.jsonl", "more/a.csv", "part-2.jsonl", "part-1.jsonl", "part-x.jsonl", "more/.c.jsonl"):
            (root / name).write_text(
                "prompt,completion\na,b" if name.endswith("csv") else '{"prompt": "a", "answer": "b"}'
            )
        (root / "more" / "read.me").write_text("text")

    loaded = load_recipe(write(tmp_path, change))
    expected = ("more/a.csv", "more/b.jsonl", "part-1.jsonl", "part-2.jsonl", "talks.jsonl")
    assert loaded.recipe.data["talks"].source.paths == expected  # type: ignore[union-attr]
    assert preflight(loaded) == []


def test_of_many_files_the_beginning_is_read_and_of_each_its_first_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        recipe["data"]["text"]["source"]["paths"] = ["more"]
        (root / "more").mkdir()
        for name in "abc":
            (root / "more" / f"{name}.jsonl").write_text('{"text": "x"}\n{"text": "x"}\n{"text": 3.5}\nno\n')

    monkeypatch.setattr(data_files, "_ROWS", 3)
    loaded = load_recipe(write(tmp_path, change))
    places = [where for where, _ in read_samples(loaded.recipe, ["text"], tmp_path)["text"].rows]
    assert places == [
        "more/a.jsonl line 1",
        "more/a.jsonl line 2",
        "more/a.jsonl line 3",
        "more/b.jsonl line 1",
        "more/c.jsonl line 1",
    ]
    monkeypatch.setattr(data_files, "_BYTES", 20)
    places = [where for where, _ in read_samples(loaded.recipe, ["text"], tmp_path)["text"].rows]
    assert places == ["more/a.jsonl line 1", "more/a.jsonl line 2", "more/b.jsonl line 1", "more/c.jsonl line 1"]


OVERLAP = (
    "data.talks: 1 of 1 rows contain a prompt of a dataset that the recipe evaluates or validates on: "
    "talks.jsonl line 1 contains 'What is two and two?' of `prompts`. "
    "Name that dataset in `exclude` to leave these rows out, or set on_overlap to `allow` to train on them"
)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [OVERLAP]),
        ({"talks": {"on_overlap": "allow"}}, []),
        (
            {"talks": {"exclude": ["prompts"]}},
            [
                "data.talks: all 1 rows occur in prompts, which it excludes: give it others, or remove `exclude`",
            ],
        ),
        ({"prompts": {"limit": 1}}, []),  # only the job knows which row is left
    ],
)
def test_an_overlap_that_can_be_seen_here_is_one_sentence(
    problems: Problems, settings: dict[str, dict[str, Any]], expected: list[str]
) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        recipe["data"]["talks"]["on_overlap"] = "error"
        for name, changed in settings.items():
            recipe["data"][name].update(changed)

    assert problems(change) == expected


def test_a_dataset_that_is_trained_and_evaluated_on_is_an_overlap(problems: Problems) -> None:
    (problem,) = problems(put("data", "prompts", "on_overlap", value="error"))
    assert problem.startswith("data.prompts: 1 of 1 rows contain a prompt")


def test_what_a_supervised_stage_is_validated_on_is_compared_too(problems: Problems) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        recipe["data"]["held"] = {**recipe["data"]["talks"], "source": {"type": "files", "paths": ["held.jsonl"]}}
        recipe["data"]["talks"]["on_overlap"] = "error"
        recipe["data"]["talks"]["exclude"] = ["prompts"]
        recipe["sft"]["validation"] = {"dataset": "held", "every_steps": 1}
        rows = [{"prompt": "What is one?", "completion": "1"}, {"prompt": "And two?", "completion": "2"}]
        (root / "talks.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (root / "held.jsonl").write_text(json.dumps({"prompt": "And  two?", "completion": "two"}))

    (problem,) = problems(change)
    assert problem.startswith(
        "data.talks: 1 of 2 rows contain a prompt of a dataset that the recipe evaluates or validates on: "
        "talks.jsonl line 2 contains 'And two?' of `held`."
    )
