from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.data.fitting import RowPolicy
from rlhf_core.data.reading import read_rows, row_policy
from rlhf_core.errors import StageError
from tests.rlhf_core.stages.made_datasets import BAD_LINES, OTHER, SENTENCE, files, make, produce, questions, write

pytestmark = pytest.mark.parts


def test_excluded_and_repeated_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", [{"prompt": "q1"}, {"prompt": "q2"}])
    write(tmp_path / "train.jsonl", [{"prompt": q} for q in ("q0", " q1", "q3", "q0", "q4", "q5")])
    _, _, test = make(tmp_path, {"source": files("test.jsonl")}, name="test")
    settings = {"source": files("train.jsonl"), "exclude": ["test"], "shuffle": False, "limit": 3}
    rows, info, _ = make(tmp_path, settings, exclude=test)
    assert questions(rows) == ["q0", "q3", "q4"]
    assert info["dropped"] == {
        "bad_rows": 0, "excluded": 1, "duplicates": 1, "near_duplicates": 0, "not_drawn": 0,
        "over_limit": 1,
    }  # fmt: skip
    assert info["sources"][0]["read"] == 6
    kept, info, _ = make(tmp_path, {"source": files("train.jsonl"), "drop_duplicates": False}, name="all")
    assert len(kept) == 6
    assert info["dropped"]["duplicates"] == 0


def test_the_seed_alone_decides_the_order(tmp_path: Path) -> None:
    write(tmp_path / "d.jsonl", [{"prompt": f"q{i}"} for i in range(20)])
    settings = {"source": files("d.jsonl")}
    first = make(tmp_path, settings, seed=1, name="a")[2]
    again = make(tmp_path, settings, seed=1, name="b")[2]
    other = make(tmp_path, settings, seed=2, name="c")[2]
    assert (first / "data.arrow").read_bytes() == (again / "data.arrow").read_bytes()
    assert (first / "info.json").read_bytes() == (again / "info.json").read_bytes()
    assert questions(read_rows(first)) != questions(read_rows(other))
    assert sorted(questions(read_rows(first))) == sorted(questions(read_rows(other)))


def test_reasoning_gym_and_function_sources(tmp_path: Path) -> None:
    (tmp_path / "make.py").write_text("def rows(n): return ({'prompt': f'p{i}', 'answer': i} for i in range(n))\n")
    rows, info, _ = make(
        tmp_path, {"source": {"type": "function", "path": "make.py", "function": "rows", "options": {"n": 3}}}
    )
    assert sorted((row["prompt"][0]["content"], row["answer"]) for row in rows) == [
        ("p0", "0"),
        ("p1", "1"),
        ("p2", "2"),
    ]
    gym = {"type": "reasoning_gym", "tasks": {"spell_backward": {}, "chain_sum": {}}, "size": 4, "seed": 1}
    _, info, _ = make(tmp_path, {"source": gym}, name="gym")
    assert info["tasks"] == {"spell_backward": 4, "chain_sum": 4}


@pytest.mark.parametrize(
    ("settings", "content", "message"),
    [
        (
            {"source": files("d.jsonl")},
            '{"prompt": "a"}\n{"promt": "b"}\n',
            "data.train: d.jsonl line 2: no column `prompt`",
        ),
        ({"source": files("d.jsonl")}, '{"prompt": "a"}\n{', "data.train: d.jsonl line 2: not JSON"),
        ({"source": files("d.jsonl")}, "", "data.train: d.jsonl: the file has no rows"),
        ({"source": files("e.jsonl")}, "", "data.train: e.jsonl: there is no such file"),
        ({}, "", "names no `source` and no `mix`"),
        (
            {"source": {"type": "function", "path": "make.py", "function": "boom"}},
            "",
            "ZeroDivisionError: division by zero",
        ),
        (
            {"source": {"type": "function", "path": "make.py", "function": "numbers"}},
            "",
            "make.py:numbers item 0: is int, expected a dict",
        ),
        (
            {"source": {"type": "function", "path": "make.py", "function": "boom", "options": {"size": 3}}},
            "",
            "make.py:boom does not take the options ['size']",
        ),
        *(
            ({"source": {"type": "function", "path": "make.py", "function": name}}, "", message)
            for name, message in (
                ("nothing", "make.py:nothing returned NoneType: it must return the rows, a list of dicts"),
                ("no_rows", "data.train: there is no row in what it reads"),
                ("leaves", "make.py:leaves raised SystemExit: 0\nTraceback"),
            )
        ),
    ],
)
def test_what_is_wrong_stops_the_stage(tmp_path: Path, settings: dict[str, Any], content: str, message: str) -> None:
    (tmp_path / "d.jsonl").write_text(content)
    (tmp_path / "make.py").write_text(
        "import sys\n\ndef boom(): return 1 / 0\ndef numbers(): return [1, 2]\ndef nothing(): pass\n"
        "def no_rows(): return []\ndef leaves(): sys.exit(0)\n"
    )
    with pytest.raises(StageError) as raised:
        make(tmp_path, settings)
    assert message in str(raised.value)


def test_nothing_left_is_an_error_that_says_why(tmp_path: Path) -> None:
    write(tmp_path / "d.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    _, _, test = make(tmp_path, {"source": files("d.jsonl")}, name="test")
    with pytest.raises(StageError, match=r"data\.train: no row is left of 2 read: 2 occur in test, 0 are duplicates"):
        make(tmp_path, {"source": files("d.jsonl"), "exclude": ["test"]}, exclude=test)


def test_bad_rows_are_dropped_on_request_and_counted_by_reason(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b"\n".join(BAD_LINES))
    settings = {"source": files("d.jsonl"), "shuffle": False}
    output = produce(tmp_path, settings | {"on_bad_row": "drop"})
    assert questions(read_rows(output.folder)) == ["a", "c"]
    assert {name: output.metrics[name] for name in ("rows", "read", "bad_rows")} == {
        "rows": 2, "read": 2, "bad_rows": 8,
    }  # fmt: skip
    info = json.loads((output.folder / "info.json").read_text())
    assert info["dropped"]["bad_rows"] == 8
    assert info["bad_rows"] == {
        "rows": 8,
        "reasons": {
            "not JSON": 1, "no column `prompt`": 2, "not a JSON object": 1, "not UTF-8 text": 1,
            "`prompt` has an unknown role": 1, "`prompt` is not valid Unicode: it holds half a surrogate pair": 1,
            "NaN or infinity is not valid JSON": 1,
        },
        "examples": [
            "d.jsonl line 2: not JSON (Expecting property name enclosed in double quotes, column 2): is it cut off?",
            "d.jsonl line 3: no column `prompt` (did you mean `promt`?); it has promt (see `columns` in the recipe)",
            "d.jsonl line 4: a row must be a JSON object, this is list",
        ],
    }  # fmt: skip
    with pytest.raises(StageError) as raised:
        produce(tmp_path, settings, name="error")
    assert str(raised.value) == (
        "data.train: 8 bad rows of 10 read: "
        "d.jsonl line 2: not JSON (Expecting property name enclosed in double quotes, column 2): is it cut off?; "
        "d.jsonl line 3: no column `prompt` (did you mean `promt`?); it has promt (see `columns` in the recipe) "
        "(2 such rows, also d.jsonl line 7); "
        "d.jsonl line 4: a row must be a JSON object, this is list; 4 for other reasons; "
        "correct them, or drop them (the dataset's on_bad_row)"
    )


def test_one_bad_row_is_its_message_and_many_unreadable_ones_end_the_reading(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text('{"prompt": "a"}\n{\n')
    with pytest.raises(
        StageError, match=r"^data\.train: one\.jsonl line 2: not JSON \([^;]*; correct it, or drop it \("
    ):
        produce(tmp_path, {"source": files("one.jsonl")}, name="one")
    (tmp_path / "many.jsonl").write_text("{\n" * 1000)
    with pytest.raises(StageError, match=r"^data\.train: 256 bad rows of 256 read: .*\(256 such rows, also many"):
        produce(tmp_path, {"source": files("many.jsonl")}, name="many")


def test_only_bad_rows_are_an_error_under_any_policy(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("{\n{\n")
    with pytest.raises(StageError, match=r"no row is left of 0 read: .*; 2 bad rows are not counted as read$"):
        produce(tmp_path, {"source": files("d.jsonl"), "on_bad_row": "drop"})


def test_a_file_that_cannot_be_divided_into_rows_is_an_error_under_any_policy(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text('prompt\na\n"b\nc\n')
    with pytest.raises(
        StageError, match=r"^data\.train: d\.csv line 3: not CSV \(unexpected end of data\): is a quote "
    ):
        produce(tmp_path, {"source": files("d.csv"), "on_bad_row": "drop"})


def test_bad_items_of_a_function_are_dropped_on_request(tmp_path: Path) -> None:
    (tmp_path / "make.py").write_text("def rows(): return [1, {'prompt': 'a'}, {'prompt': ' '}]\n")
    source = {"type": "function", "path": "make.py", "function": "rows"}
    rows, info, _ = make(tmp_path, {"source": source, "on_bad_row": "drop"})
    assert questions(rows) == ["a"]
    assert info["bad_rows"]["reasons"] == {"not a dict": 1, "`prompt` is empty": 1}
    assert info["bad_rows"]["examples"][0] == "make.py:rows item 0: is int, expected a dict"


NEAR = [
    {"text": SENTENCE}, {"text": OTHER}, {"text": SENTENCE.replace("sixteen", "more").title()},
    {"text": OTHER + " 1"}, {"text": "short"}, {"text": OTHER.replace("gold", "silver")},
]  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "kept", "metrics"),
    [
        ("count", [0, 1, 2, 3, 4, 5], {"near_duplicates": 2, "near_excluded": 0}),
        ("drop", [0, 1, 4, 5], {"near_duplicates": 2, "near_excluded": 0}),
        ("off", [0, 1, 2, 3, 4, 5], {}),
    ],
)
def test_near_duplicates_of_earlier_rows(tmp_path: Path, policy: str, kept: list[int], metrics: dict[str, int]) -> None:
    """The third and the fourth row share 11 of 13 and 12 of 13 sequences with an earlier one, the last 7 of 17."""
    write(tmp_path / "d.jsonl", NEAR)
    settings = {"format": "text", "source": files("d.jsonl"), "shuffle": False, "near_duplicates": policy}
    output = produce(tmp_path, settings)
    assert [row["text"] for row in read_rows(output.folder)] == [NEAR[index]["text"] for index in kept]
    assert {name: value for name, value in output.metrics.items() if name.startswith("near")} == metrics
    info = json.loads((output.folder / "info.json").read_text())
    assert info["dropped"]["near_duplicates"] == len(NEAR) - len(kept)
    if metrics:
        assert info["near_duplicates"]["examples"][1] == {"row": OTHER + " 1", "resembles": OTHER}


def test_near_duplicates_of_excluded_prompts(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", [{"prompt": SENTENCE}])
    _, _, test = make(tmp_path, {"source": files("test.jsonl")}, name="test")
    write(
        tmp_path / "d.jsonl", [{"prompt": row["text"], "completion": f"{i} {OTHER}"} for i, row in enumerate(NEAR[1:])]
    )
    settings = {"format": "conversations", "source": files("d.jsonl"), "shuffle": False, "near_duplicates": "drop"}
    output = produce(tmp_path, settings, exclude=test)
    assert output.metrics["near_excluded"] == 1
    asked = [row["messages"][0]["content"] for row in read_rows(output.folder)]
    assert SENTENCE.replace("sixteen", "more").title() not in asked


def test_a_near_duplicate_is_dropped_across_the_sources_of_a_mix(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"prompt": SENTENCE}, {"prompt": "a"}])
    write(tmp_path / "b.jsonl", [{"prompt": SENTENCE + " more"}, {"prompt": "b"}])
    mixed = [{"source": files("a.jsonl")}, {"source": files("b.jsonl")}]
    rows, info, _ = make(tmp_path, {"mix": mixed, "near_duplicates": "drop", "stop": "all_exhausted"})
    assert set(questions(rows)) == {"a", "b", SENTENCE}
    assert info["dropped"]["near_duplicates"] == 1


def test_the_artifact_carries_the_policies_for_the_stages_that_read_it(tmp_path: Path) -> None:
    write(tmp_path / "d.jsonl", [{"text": "a"}])
    settings = {"format": "text", "source": files("d.jsonl")}
    assert row_policy(produce(tmp_path, settings, name="a").folder) == RowPolicy()
    other = settings | {"on_long_row": "truncate", "on_bad_row": "drop"}
    assert row_policy(produce(tmp_path, other, name="b").folder) == RowPolicy(long="truncate", bad="drop")
    with pytest.raises(ValueError, match="a prompt that is cut asks another question"):
        produce(tmp_path, {"source": files("d.jsonl"), "on_long_row": "truncate"})


def test_no_row_is_held_in_memory_or_left_behind(tmp_path: Path) -> None:
    write(tmp_path / "d.jsonl", [{"prompt": f"q{i}"} for i in range(5)])
    output = produce(tmp_path, {"source": files("d.jsonl")})
    assert [path.name for path in output.folder.parent.iterdir()] == ["dataset"]


def test_it_loads_no_torch() -> None:
    code = (
        "import sys, rlhf_core.stages.dataset, rlhf_core.preflight.look, rlhf_core.rewards, rlhf_core.chat.encoding; "
        "print(sorted({'torch', 'transformers', 'datasets', 'reasoning_gym', 'pyarrow', 'rensa'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
