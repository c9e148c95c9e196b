"""Where the rows of a dataset come from, and in which order: mixes, shares, processes, streams."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from rlhf_core.data.reading import read_rows, write_dataset
from rlhf_core.data.sources.remote import file_identity
from rlhf_core.errors import StageError
from tests.rlhf_core.stages.made_datasets import BAD_LINES, OTHER, files, make, produce, questions, write
from tests.rlhf_core.web_files import web_files

pytestmark = pytest.mark.parts


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
    with pytest.raises(ValueError, match="stop: it applies only to a `mix`"):
        make(tmp_path, {"source": files("a.jsonl"), "stop": "all_exhausted"}, name="no mix")


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
    with pytest.raises(ValueError, match="share: `limit` sets the number of rows too; remove one of them"):
        make(tmp_path, settings | {"share": 0.1, "limit": 3}, name="both")


@pytest.mark.endurance("chaos")
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
    with pytest.raises(StageError, match=r"data\.arrow is damaged, or not an Arrow stream"):
        read_rows(tmp_path / "new")
