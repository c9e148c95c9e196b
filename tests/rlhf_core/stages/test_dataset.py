from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.data import DatasetConfig
from rlhf_core.contract import Input, Output
from rlhf_core.data.fitting import RowPolicy
from rlhf_core.data.reading import read_rows, row_policy, write_dataset
from rlhf_core.data.remote import file_identity
from rlhf_core.errors import StageError
from rlhf_core.stages.dataset import run
from tests.rlhf_core.stages.context import LocalContext, local_input
from tests.rlhf_core.web_files import web_files


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make(
    tmp_path: Path,
    settings: dict[str, Any],
    *,
    seed: int = 0,
    exclude: Path | None = None,
    name: str = "work",
    pins: dict[str, str] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any], Path]:
    output = produce(tmp_path, settings, seed=seed, exclude=exclude, name=name, pins=pins)
    assert output.kind is Kind.DATASET
    info = json.loads((output.folder / "info.json").read_text())
    rows = read_rows(output.folder)
    assert output.metrics["rows"] == info["rows"] == len(rows)
    return rows, info, output.folder


def produce(
    tmp_path: Path,
    settings: dict[str, Any],
    *,
    seed: int = 0,
    exclude: Path | None = None,
    name: str = "work",
    pins: dict[str, str] | None = None,
) -> Output:
    inputs: dict[str, Input] = {}
    if exclude is not None:
        inputs["exclude.test"] = local_input(exclude, Kind.DATASET)
    context = LocalContext(tmp_path / name, user_files_root=tmp_path, name="data.train", seed=seed)
    context.pins = pins or {}
    return run(DatasetConfig.model_validate_json(json.dumps({"format": "prompts"} | settings)), inputs, context)


def files(*paths: str) -> dict[str, Any]:
    return {"type": "files", "paths": list(paths)}


def questions(rows: list[dict[str, Any]]) -> list[str]:
    return [row["prompt"][0]["content"] for row in rows]


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


def mixed_files(tmp_path: Path, first: int, second: int) -> dict[str, Any]:
    """Two sources of a mix, the first drawn three times as often, and an earlier row of it once more in the second."""
    write(tmp_path / "a.jsonl", [{"prompt": f"a{i}"} for i in range(first)])
    write(tmp_path / "b.jsonl", [{"prompt": f"b{i}"} for i in range(second)] + [{"prompt": "a0"}])
    return {"mix": [{"source": files("a.jsonl"), "weight": 3.0}, {"source": files("b.jsonl"), "weight": 1.0}]}


def test_a_mix_is_drawn_by_weight_until_one_source_has_given_all_its_rows(tmp_path: Path) -> None:
    settings = mixed_files(tmp_path, 3000, 2000)
    rows, info, _ = make(tmp_path, settings)
    drawn = [question[0] for question in questions(rows)]
    used = [entry["used"] for entry in info["sources"]]
    assert (drawn[-1], used[0]) == ("a", 3000)  # the last row is the one that exhausts it
    assert len(set(questions(rows))) == len(rows)
    assert info["dropped"]["not_drawn"] == 5000 - len(rows) == 2000 - used[1]
    assert info["dropped"]["duplicates"] == 1
    for end in (400, 1600, len(drawn)):  # four standard deviations
        assert abs(drawn[:end].count("a") / end - 0.75) < 4 * (0.75 * 0.25 / end) ** 0.5
    assert questions(rows)[:20] != sorted(questions(rows)[:20], key=lambda q: int(q[1:]))
    limited, info, _ = make(tmp_path, settings | {"limit": 400}, name="limited")
    assert limited == rows[:400]
    assert info["dropped"]["over_limit"] == len(rows) - 400


def test_without_shuffle_a_mix_keeps_the_order_of_each_source(tmp_path: Path) -> None:
    rows, _, _ = make(tmp_path, mixed_files(tmp_path, 40, 40) | {"shuffle": False})
    for name in "ab":
        of_source = [question for question in questions(rows) if question[0] == name]
        assert of_source == [f"{name}{i}" for i in range(len(of_source))]


def test_a_mix_that_ends_with_its_last_source_repeats_the_others(tmp_path: Path) -> None:
    """Drawn three times as often, ten rows come again and again until the other source has given its forty."""
    rows, info, _ = make(tmp_path, mixed_files(tmp_path, 10, 40) | {"stop": "all_exhausted"})
    drawn = questions(rows)
    of_a, of_b = ([question for question in drawn if question[0] == name] for name in "ab")
    assert set(drawn) == {f"a{i}" for i in range(10)} | {f"b{i}" for i in range(40)}
    assert (drawn[-1], len(of_b), info["sources"][1]["repeated"]) == (of_b[-1], 40, 0)
    assert info["sources"][0]["repeated"] == len(of_a) - 10 > 40
    assert max(map(of_a.count, of_a)) - min(map(of_a.count, of_a)) <= 1
    assert info["dropped"]["not_drawn"] == 0
    # A repeated row is the same row.
    assert {row["id"] for row in rows if row["prompt"][0]["content"] == "a1"} == {
        next(row["id"] for row in rows if row["prompt"][0]["content"] == "a1")
    }


def test_a_mix_that_would_be_drawn_for_ever_or_never_is_refused(tmp_path: Path) -> None:
    settings = mixed_files(tmp_path, 10, 40)
    settings["mix"][1]["weight"] = 0.001
    with pytest.raises(StageError, match=r"^data\.train: stop: about 1\.2e\+05 rows would be drawn of 50 until every"):
        make(tmp_path, settings | {"stop": "all_exhausted"})
    (tmp_path / "b.jsonl").write_text('{"prompt": "a0"}')
    with pytest.raises(StageError, match=r"^data\.train: mix\[1\]: no row of this source is left"):
        make(tmp_path, settings, name="empty")
    with pytest.raises(ValueError, match="stop: it says when a `mix` ends, and there is none"):
        make(tmp_path, {"source": files("a.jsonl"), "stop": "all_exhausted"}, name="no mix")


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
    ],
)
def test_what_is_wrong_stops_the_stage(tmp_path: Path, settings: dict[str, Any], content: str, message: str) -> None:
    (tmp_path / "d.jsonl").write_text(content)
    (tmp_path / "make.py").write_text("def boom(): return 1 / 0\ndef numbers(): return [1, 2]\n")
    with pytest.raises(StageError) as raised:
        make(tmp_path, settings)
    assert message in str(raised.value)


def test_nothing_left_is_an_error_that_says_why(tmp_path: Path) -> None:
    write(tmp_path / "d.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    _, _, test = make(tmp_path, {"source": files("d.jsonl")}, name="test")
    with pytest.raises(StageError, match=r"data\.train: no row is left of 2 read: 2 occur in test, 0 are duplicates"):
        make(tmp_path, {"source": files("d.jsonl"), "exclude": ["test"]}, exclude=test)


BAD_LINES = [
    b'{"prompt": "a"}', b"{", b'{"promt": "b"}', b"[1]", b'{"prompt": "\xff"}', b'{"prompt": "c"}', b'{"promt": "d"}',
    b'{"prompt": [{"role": "narrator", "content": "x"}]}', b'{"prompt": "\\ud800"}', b'{"prompt": "e", "x": NaN}',
]  # fmt: skip


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
            "NaN or infinity is no JSON": 1,
        },
        "examples": [
            "d.jsonl line 2: not JSON (Expecting property name enclosed in double quotes, column 2): is it cut off?",
            "d.jsonl line 3: no column `prompt`, did you mean `promt`?; it has promt (see `columns` in the recipe)",
            "d.jsonl line 4: a row must be a JSON object, this is list",
        ],
    }  # fmt: skip
    with pytest.raises(StageError, match=r"^data\.train: d\.jsonl line 2: not JSON"):
        produce(tmp_path, settings, name="error")


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


SENTENCE = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
OTHER = "red blue green black white grey pink brown gold teal navy plum rust lime sand jade"
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


def test_a_share_is_held_out_and_the_other_dataset_has_no_prompt_of_it(tmp_path: Path) -> None:
    """One file for both: with several rows of a prompt, all of them are on one side."""
    write(tmp_path / "d.jsonl", [{"prompt": f"q{i // 2}", "completion": f"c{i}"} for i in range(200)])
    settings = {"format": "conversations", "source": files("d.jsonl")}
    held_out, _, folder = make(tmp_path, settings | {"share": 0.1}, name="test")
    trained, info, _ = make(tmp_path, settings | {"exclude": ["test"]}, exclude=folder, name="train")
    asked, trained_on = ({row["messages"][0]["content"] for row in rows} for rows in (held_out, trained))
    assert len(held_out) == 20
    assert trained_on == {f"q{i}" for i in range(100)} - asked
    assert info["dropped"]["excluded"] == 2 * len(asked) == 200 - len(trained)
    with pytest.raises(ValueError, match="share: `limit` says how many rows; leave one of them out"):
        make(tmp_path, settings | {"share": 0.1, "limit": 3}, name="both")


def test_the_number_of_processes_changes_neither_rows_nor_errors(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"{OTHER} {i % 900}"}).encode() for i in range(1000)]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*lines[:600], *BAD_LINES]))
    (tmp_path / "b.jsonl").write_bytes(b"\n".join([*lines[600:], b"{"]))
    (tmp_path / "c.csv").write_text('prompt\na\n"b\nc\n')  # no division into rows, after an error in b.jsonl
    settings: dict[str, Any] = {"source": files("a.jsonl", "b.jsonl"), "on_bad_row": "drop"}
    alone, shared = (produce(tmp_path, settings | {"processes": n}, name=f"{n}") for n in (1, 2))
    for name in ("data.arrow", "info.json"):
        assert (alone.folder / name).read_bytes() == (shared.folder / name).read_bytes()
    assert alone.metrics == shared.metrics
    assert alone.metrics["near_duplicates"] == alone.metrics["rows"] - 3
    with pytest.raises(StageError, match=r"^data\.train: b\.jsonl line 401: not JSON"):
        produce(tmp_path, {"source": files("b.jsonl", "c.csv"), "processes": 2}, name="error")


STREAMED = b'{"prompt": "a"}\n{"prompt": "a"}\n{"prompt": "b"}\n{'


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz"])
def test_a_source_that_streams_is_read_until_there_are_enough_rows(tmp_path: Path, name: str) -> None:
    """The last line is no JSON: it does not matter to two rows, and is an error to three."""
    with web_files() as web:
        web.contents[f"/{name}"] = gzip.compress(STREAMED) if name.endswith(".gz") else STREAMED
        url = f"{web.url}/{name}"
        settings = {"source": files(url) | {"streaming": True}, "shuffle": False}
        rows, info, _ = make(tmp_path, settings | {"limit": 2}, pins={url: file_identity(url)})
        assert questions(rows) == ["a", "b"]
        assert (info["sources"][0]["read"], info["dropped"]["over_limit"]) == (3, 0)
        with pytest.raises(StageError, match=rf"^data\.train: {url} line 4: not JSON"):
            produce(tmp_path, settings | {"limit": 3}, name="three")
        with pytest.raises(StageError, match=f"^{url}: the content changed since the run was planned"):
            produce(tmp_path, settings | {"limit": 2}, name="changed", pins={url: "ETag of another, 20 bytes"})


def test_no_row_is_held_in_memory_or_left_behind(tmp_path: Path) -> None:
    write(tmp_path / "d.jsonl", [{"prompt": f"q{i}"} for i in range(5)])
    output = produce(tmp_path, {"source": files("d.jsonl")})
    assert [path.name for path in output.folder.parent.iterdir()] == ["dataset"]


def test_rows_come_back_as_they_were_and_the_library_reads_them(tmp_path: Path) -> None:
    """Each row has the keys of its own alone, and nulls and numbers as they were."""
    rows: list[dict[str, Any]] = [
        {"id": "a", "metadata": {"x": None, "n": 2**60, "f": 0.1, "é\U0001f600": [1, {"q": "\n"}]}},
        {"id": "b", "metadata": {"y": {}, "n": "text"}, "tools": []},
    ] * 700  # more than a record batch
    write_dataset(tmp_path / "new", rows, {})
    write_dataset(tmp_path / "again", iter(rows), {})
    (tmp_path / "old").mkdir()
    write(tmp_path / "old" / "data.jsonl", rows)  # as before version 7
    assert read_rows(tmp_path / "new") == read_rows(tmp_path / "old") == rows
    file = tmp_path / "new" / "data.arrow"
    assert file.read_bytes() == (tmp_path / "again" / "data.arrow").read_bytes()
    assert Dataset.from_file(str(file))[1399] == {"id": "b", "row": rows[1]}
    file.write_bytes(b"{}")
    with pytest.raises(StageError, match=r"data\.arrow: is damaged, or no stream of Arrow"):
        read_rows(tmp_path / "new")


def test_it_loads_no_torch() -> None:
    code = (
        "import sys, rlhf_core.stages.dataset, rlhf_core.pipeline.preflight, rlhf_core.rewards, rlhf_core.data.chat; "
        "print(sorted({'torch', 'transformers', 'datasets', 'reasoning_gym', 'pyarrow', 'rensa'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
