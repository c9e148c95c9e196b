"""The page of a dataset: its counts as the stage wrote them, its rows twenty at a time, and files that are damaged."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

from deployments.ui.data_rows import DataRows, StoredRow
from deployments.ui.demo_run import PROMPTS, RUN_ID, write_demo_run
from deployments.ui.row_fields import row_view
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.manifest import Kind, Manifest
from rlhf_core.artifacts.repository import ArtifactRepository, blob_path
from rlhf_core.data.reading import row_text, write_dataset, write_rows
from rlhf_core.errors import IntegrityError
from rlhf_core.evaluation.stored import write_evaluation
from rlhf_core.pipeline.record import NodeRecord
from tests.deployments.ui.made_runs import publish, record, ref_of
from tests.deployments.ui.served import browsing
from tests.rlhf_core.pictures import picture
from tests.rlhf_core.stages.made_datasets import BAD_LINES, SENTENCE, files, produce, write

pytestmark = pytest.mark.parts

HOSTILE = "<script>alert(1)</script>\"'"
Rows = list[dict[str, Any]]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def browser(store: LocalStore, tmp_path: Path) -> Iterator[httpx.Client]:
    with browsing(store, tmp_path / "cache") as client:
        yield client


def put(
    store: LocalStore, rows: Rows, folder: Path, info: dict[str, Any] | None = None, images_from: Path | None = None
) -> Manifest:
    """Publish a dataset as the only stage of the run `made`, which is called `data`."""
    given = [{"id": f"r{n}", **row} for n, row in enumerate(rows)]
    write_dataset(
        folder, given, info or {"format": "prompts"}, images_from=() if images_from is None else (images_from,)
    )
    record(store, [NodeRecord(name="data", ref=ref_of("data"), outcome="computed")])
    return publish(store, ref_of("data"), folder, metrics={"rows": len(rows)})


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def shown(page: str) -> list[int]:
    """The numbers of the rows of a page."""
    return [int(number) for number in re.findall(r">Row (\d+)</a>", page)]


def test_what_the_stage_counted_is_what_the_page_says(browser: httpx.Client, store: LocalStore, tmp_path: Path) -> None:
    near = SENTENCE + " and more"
    lines = [
        b'{"prompt": "a"}',
        b'{"prompt": "out"}',
        *BAD_LINES,
        *(f'{{"prompt": "{t}"}}'.encode() for t in (SENTENCE, near)),
    ]
    (tmp_path / "d.jsonl").write_bytes(b"\n".join(lines))
    write(tmp_path / "test.jsonl", [{"prompt": "out"}])
    held_out = produce(tmp_path, {"source": files("test.jsonl")}, name="held out")
    settings = {
        "source": files("d.jsonl"), "on_bad_row": "drop", "exclude": ["test"], "near_duplicates": "drop",
        "near_duplicate_threshold": 0.7, "limit": 2,
    }  # fmt: skip
    made = produce(tmp_path, settings, exclude=held_out.folder)
    test, data = (
        publish(store, ref_of(name), output.folder, metrics=output.metrics, parents=parents, name=name)
        for name, output, parents in (("test", held_out, {}), ("data", made, {"exclude.test": ref_of("test")}))
    )
    record(store, [NodeRecord(name=each.name, ref=each.ref, outcome="computed") for each in (test, data)])
    assert '<a href="/runs/made/data">data</a>' in browser.get("/runs/made").text
    page = browser.get("/runs/made/data").text
    assert "<b>2 rows</b> of the format prompts: 14 were read, 12 dropped." in page
    dropped = dict(re.findall(r'<tr><td>([^<]+)</td><td class="number">(\d+)</td></tr>', page.partition("Excluded")[0]))
    assert dropped == {
        "bad: not readable, or a field is missing or wrong": "8",
        "their prompt is in a dataset that is excluded": "1",
        "the same as an earlier row": "1",
        "nearly the same as an earlier row, or as an excluded prompt": "1",
        "left over when the mix stopped": "0",
        "beyond the limit": "1",
    }
    assert 'Excluded: <a href="/runs/made/test">test</a>.' in page
    assert '<tr><td>no column `prompt`</td><td class="number">2</td></tr>' in page
    assert "policy <code>drop</code>: 1 of earlier rows, 0 of excluded prompts." in page
    assert f"<td>{near}</td><td>{SENTENCE}</td>" in page
    assert '<td class="number">6</td><td class="number">2</td><td class="number">0</td>' in page  # of the only source


def test_rows_are_paged_by_twenty_and_one_alone_is_whole(
    browser: httpx.Client, store: LocalStore, tmp_path: Path
) -> None:
    put(store, [{"prompt": asked(f"{n} " + "x" * 7000 + "end")} for n in range(45)], tmp_path / "d")
    first = browser.get("/runs/made/data").text
    assert shown(first) == list(range(1, 21))
    assert "1 to 20 of 45" in first
    assert 'rel="next" href="/runs/made/data?from=20#rows"' in first
    assert 'rel="prev"' not in first
    assert "end</pre>" not in first
    assert "… 1006 more characters" in first
    last = browser.get("/runs/made/data?from=40").text
    assert (shown(last), 'rel="next"' in last) == ([41, 42, 43, 44, 45], False)
    assert 'rel="prev" href="/runs/made/data?from=20#rows"' in last
    alone = browser.get("/runs/made/data?from=41&rows=1").text
    assert (shown(alone), "end</pre>" in alone, "more characters" in alone) == ([42], True, False)
    assert 'href="/runs/made/data?from=40#rows">all rows</a>' in alone
    past = browser.get("/runs/made/data?from=60")
    assert past.status_code == 200
    assert "There is no row 61: it has 45." in past.text
    assert 'href="/runs/made/data?from=40#rows">The last ones</a>' in past.text
    for wrong in ("from=x", "from=-1", "rows=1.5", "from=" + "9" * 5000):
        assert browser.get(f"/runs/made/data?{wrong}").status_code == 404


def test_the_last_page_of_full_pages_is_full(browser: httpx.Client, store: LocalStore, tmp_path: Path) -> None:
    put(store, [{"prompt": asked(f"{n}")} for n in range(40)], tmp_path / "d")
    last = browser.get("/runs/made/data?from=20").text
    assert (shown(last)[-1], 'rel="next"' in last) == (40, False)
    assert 'href="/runs/made/data?from=20#rows">The last ones</a>' in browser.get("/runs/made/data?from=40").text


def test_an_empty_dataset_says_so(browser: httpx.Client, store: LocalStore, tmp_path: Path) -> None:
    put(store, [], tmp_path / "d")
    page = browser.get("/runs/made/data").text
    assert "<b>0 rows</b> of the format prompts." in page
    assert "<p>It has none.</p>" in page


class CountingStore(LocalStore):
    """Counts the bytes of blobs that are read in parts, and refuses to read a large one as a whole."""

    read = 0

    def get_range(self, path: str, start: int, size: int) -> bytes | None:
        data = super().get_range(path, start, size)
        self.read += len(data or b"")
        return data

    def get_tagged(self, path: str) -> tuple[bytes, str] | None:
        tagged = super().get_tagged(path)
        assert tagged is None or len(tagged[0]) < 2**20, path
        return tagged

    def get_file(self, path: str, local_path: Path) -> None:
        raise AssertionError(path)


def test_of_a_large_dataset_only_the_shown_part_is_read(tmp_path: Path) -> None:
    store, rows = CountingStore(tmp_path / "store"), [{"prompt": asked(f"{n}" + "x" * 500)} for n in range(20_000)]
    manifest = put(store, rows, tmp_path / "d")
    size = next(each.size for each in manifest.files if each.path == "data.arrow")
    with browsing(store, tmp_path / "cache") as browser:
        assert shown(browser.get("/runs/made/data").text) == list(range(1, 21))
        assert store.read < size / 15  # one of twenty batches
        store.read = 0
        assert shown(browser.get("/runs/made/data?from=19990").text.replace(",", "")) == list(range(19_991, 20_001))
        assert store.read < size / 15 + 20 * 4096  # and the heads of the others
        store.read = 0
        between = browser.get("/runs/made/data?from=1990").text.replace(",", "")
        assert shown(between) == list(range(1991, 2011))  # the last of one batch and the first of the next
        assert store.read < size / 8  # no head is read again


def arrow(column: str, values: list[Any], compression: str | None = None) -> bytes:
    batch = pa.record_batch({column: pa.array(values, pa.string())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as stream:
        stream.write_batch(batch)
    return bytes(sink.getvalue())


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (lambda whole: b"PAR1" * 100, "does not begin where the one before ends"),
        (lambda whole: whole[:-400], "is longer than the file"),
        (lambda whole: whole + b"\0" * 8, "1 to 3 of 3"),  # what stands behind the end of the stream is not read
        (lambda whole: arrow("other", ["{}"]), "has no rows of a dataset"),
        (lambda whole: arrow("row", ["{"]), "has no rows of a dataset"),
        (lambda whole: arrow("row", ['{"a": 1}'], "zstd"), "a batch is compressed"),
        (lambda whole: arrow("row", ["[1]"]), "a row is no mapping"),
        (lambda whole: arrow("row", [None]), "has no rows of a dataset"),
        (lambda whole: arrow("row", ["[" * 100_000]), "has no rows of a dataset"),
        (lambda whole: whole[:4] + b"\xff\xff\xff\x7f" + whole[8:], "has 2147483647 bytes"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_stream_of_rows_is_named_and_the_rest_of_the_page_is_there(
    browser: httpx.Client, store: LocalStore, tmp_path: Path, content: Callable[[bytes], bytes], why: str
) -> None:
    folder = tmp_path / "d"
    write_dataset(folder, [{"id": f"r{n}", "prompt": asked("x" * 200)} for n in range(3)], {"format": "prompts"})
    whole = (folder / "data.arrow").read_bytes()
    (folder / "data.arrow").write_bytes(content(whole))
    publish(store, ref_of("data"), folder, metrics={"rows": 3})
    record(store, [NodeRecord(name="data", ref=ref_of("data"), outcome="computed")])
    answer = browser.get("/runs/made/data")
    assert (answer.status_code, why in answer.text) == (200, True)
    assert "Inputs, files and versions" in answer.text


def test_no_damage_of_a_byte_ends_the_server(store: LocalStore, tmp_path: Path) -> None:
    manifest = put(store, [{"prompt": asked("x" * 50)} for _ in range(3)], tmp_path / "d")
    file = next(each for each in manifest.files if each.path == "data.arrow")
    whole = (tmp_path / "d" / "data.arrow").read_bytes()
    outcomes = set()
    for at in range(len(whole)):
        store.put(blob_path(file.sha256), whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            outcomes.add(len(DataRows(store).read(file, 0, 20)))
        except IntegrityError:
            outcomes.add(-1)
    assert {-1, 3} <= outcomes


def test_a_file_that_is_missing_or_cut_off_is_named(browser: httpx.Client, store: LocalStore, tmp_path: Path) -> None:
    manifest = put(store, [{"prompt": asked("a")}], tmp_path / "d")
    blobs = {each.path: blob_path(each.sha256) for each in manifest.files}
    store.put(blobs["data.arrow"], (tmp_path / "d" / "data.arrow").read_bytes()[:-8])
    assert "it is shorter than its manifest says" in browser.get("/runs/made/data").text
    store.delete(blobs["data.arrow"])
    page = browser.get("/runs/made/data").text
    assert "Settings" in page
    assert "data.arrow is gone from the store: `alignment repair` takes its artifact out of use" in page
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "data.jsonl").write_text("{}\n")
    publish(store, ref_of("old"), tmp_path / "old", metrics={"rows": 1})
    record(store, [NodeRecord(name="data", ref=ref_of("old"), outcome="computed")], run_id="old")
    assert "it has no data.arrow: an earlier release made it, or it is damaged" in browser.get("/runs/old/data").text
    store.put(blobs["info.json"], b"{}")
    damaged = browser.get("/runs/made/data")
    assert (damaged.status_code, "info.json is damaged" in damaged.text) == (502, True)


def test_an_info_file_of_another_form_is_named(browser: httpx.Client, store: LocalStore, tmp_path: Path) -> None:
    put(store, [], tmp_path / "d", info={"format": 1})
    answer = browser.get("/runs/made/data")
    assert answer.status_code == 502
    assert "info.json is not the info file of a dataset (format: input should be a valid string)" in answer.text


def test_text_of_rows_is_never_markup(browser: httpx.Client, store: LocalStore, tmp_path: Path) -> None:
    call = {"function": {"name": HOSTILE, "arguments": {HOSTILE: HOSTILE}}}
    message = {
        "role": HOSTILE, "content": HOSTILE, "reasoning_content": HOSTILE, "tool_calls": [call], "name": HOSTILE
    }  # fmt: skip
    rows: Rows = [
        {"prompt": [message], "chosen": HOSTILE, "rejected": [message], HOSTILE: HOSTILE, "other": {HOSTILE: HOSTILE}},
        {"prompt": [message], "completions": [{"text": HOSTILE, "rewards": {HOSTILE: HOSTILE}}]},
        {"prompt": HOSTILE, "messages": [1, HOSTILE, None], "steps": [HOSTILE], "labels": [HOSTILE]},
        {"prompt": [{"role": [HOSTILE], "content": {HOSTILE: 1}, "images": HOSTILE, "tool_calls": HOSTILE}]},
    ]
    write_rows(tmp_path / "d", ((HOSTILE, row_text({"id": HOSTILE} | row)) for row in rows))
    source = {"source": {HOSTILE: HOSTILE}, "read": 4, "used": 4}
    info = {
        "format": HOSTILE, "sources": [source], "dropped": {HOSTILE: 1}, "tasks": {HOSTILE: 1, "b": 1},
        "bad_rows": {"rows": 1, "reasons": {HOSTILE: 1}, "examples": [HOSTILE]},
        "near_duplicates": {"policy": HOSTILE, "examples": [{"row": HOSTILE, "resembles": HOSTILE}]},
    }  # fmt: skip
    (tmp_path / "d" / "info.json").write_text(json.dumps(info), encoding="utf-8")
    publish(store, ref_of("data"), tmp_path / "d", metrics={"rows": 4, HOSTILE: HOSTILE})
    nodes = [NodeRecord(name="data", ref=ref_of("data"), outcome="computed")]
    overlap = ref_of(HOSTILE, "overlap")
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "overlap.json").write_text("{}")
    parents = {"dataset": ref_of("data"), "held_out.x": ref_of(HOSTILE)}
    publish(store, overlap, tmp_path / "o", kind=Kind.REPORT, parents=parents)
    record(store, [*nodes, NodeRecord(name=HOSTILE, ref=overlap, outcome="failed", error=HOSTILE)])
    answer = browser.get("/runs/made/data")
    assert answer.status_code == 200
    assert shown(answer.text) == [1, 2, 3, 4]
    assert "<script>alert" not in answer.text
    assert answer.text.count("&lt;script&gt;alert") > 30


def test_a_dataset_says_with_what_it_was_compared_and_who_read_it(browser: httpx.Client, store: LocalStore) -> None:
    write_demo_run(ArtifactRepository(store))
    prompts, test, conversations = (
        browser.get(f"/runs/{RUN_ID}/{name}").text for name in ("prompts", "test", "conversations")
    )
    assert f"{PROMPTS} rows" in prompts
    compared = f'<a href="/runs/{RUN_ID}/overlap.prompts">overlap.prompts</a>: no row of prompts has a prompt of test.'
    assert compared in prompts
    assert compared in test
    assert "This run compares it with no other dataset." in conversations
    sft = f'<a href="/runs/{RUN_ID}/sft">sft</a></td><td class="nowrap">dataset</td>'
    assert f"{sft}<td>rows_read 12, rows_dropped_too_long 1</td>" in conversations
    assert "held_out.test" not in test.partition("Rows")[0]


def view(row: dict[str, Any], most: int = 1000) -> Any:
    return row_view(StoredRow(0, 10, {"id": "r", **row}), most)


def test_rows_of_each_format_in_parts() -> None:
    pair = view(
        {"prompt": asked("q"), "chosen": "yes", "rejected": [{"role": "assistant", "content": "no"}], "margin": 2}
    )
    assert [(side.title, side.text, side.shade) for side in pair.sides] == [
        ("chosen", "yes", "high"), ("rejected", None, "low"),
    ]  # fmt: skip
    assert pair.sides[1].messages == [{"role": "assistant", "content": "no"}]
    assert (pair.messages, pair.texts, pair.is_cut) == (asked("q"), {"margin": "2"}, False)
    sampled = view(
        {"prompt": asked("q"), "completions": [{"text": "a", "reward": 0.5, "rewards": {"x": 1.0}, "token_ids": [1]}]}
    )
    assert [(side.text, side.notes) for side in sampled.sides] == [("a", {"reward": 0.5, "x": 1.0})]
    steps = view({"prompt": asked("q"), "steps": ["a", "b", "c"], "labels": [1.0, 0, None]})
    assert [(side.text, side.notes, side.shade) for side in steps.sides] == [
        ("a", {"label": "1.0"}, "high"), ("b", {"label": "0"}, "low"), ("c", {"label": "not judged"}, ""),
    ]  # fmt: skip
    judged = view({"prompt": asked("q"), "completion": "a", "label": False})
    assert [(side.title, side.shade) for side in judged.sides] == [("bad", "low")]
    assert judged.texts == {}
    seen = view({"messages": [{"role": "user", "content": "\ufffc what?", "images": ["a" * 64, "b" * 64]}]})
    assert (seen.images, seen.messages[0]["content"]) == (2, "[image] what?")
    assert seen.messages[0]["images"] == ["a" * 64, "b" * 64]
    plain = view({"text": "once", "metadata": {"a": 1}})
    assert (plain.texts, plain.others) == ({"text": "once"}, {"metadata": '{\n "a": 1\n}'})


def test_all_datasets_are_listed_with_a_link_to_their_rows(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    write_demo_run(ArtifactRepository(store))
    nodes = {name: ref_of(name) for name in ("gone", "still waits")}
    record(store, [NodeRecord(name=name, ref=ref, outcome="not run") for name, ref in nodes.items()], "other")
    with browsing(store, tmp_path / "cache") as browser:
        page = browser.get("/data").text
    assert '<a href="/data">Data</a>' in page
    rows = re.findall(r'<a href="(/runs/[^"]*)">(\w+)</a>.*?<td class="number">(\d*)</td>', page, re.DOTALL)
    assert sorted(rows) == [
        (f"/runs/{RUN_ID}/conversations", "conversations", "12"), (f"/runs/{RUN_ID}/pairs", "pairs", "6"),
        (f"/runs/{RUN_ID}/prompts", "prompts", str(PROMPTS)), (f"/runs/{RUN_ID}/test", "test", "8"),
    ]  # fmt: skip


def test_images_of_rows_are_shown_from_the_files_of_the_dataset(
    browser: httpx.Client, store: LocalStore, tmp_path: Path
) -> None:
    content = picture("red")
    digest = hashlib.sha256(content).hexdigest()
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / digest).write_bytes(content)
    row = {"prompt": [{"role": "user", "content": "\ufffc colour?", "images": [digest]}], "chosen": "red"}
    named = [{"role": "user", "content": "\ufffc", "images": ["../metrics.jsonl"]}]
    put(store, [row], tmp_path / "d", images_from=tmp_path / "images")
    page = browser.get("/runs/made/data").text
    assert re.findall(r'<img [^>]*src="([^"]+)"', page) == [f"/runs/made/data/images/{digest}"]
    assert browser.get(f"/runs/made/data/images/{digest}").content == content
    assert browser.get(f"/runs/made/data/images/{'0' * 64}").status_code == 404
    assert view({"prompt": named}).messages[0]["images"] == []


def test_images_of_an_evaluation_are_beside_its_samples(
    browser: httpx.Client, store: LocalStore, tmp_path: Path
) -> None:
    content = picture("red")
    digest = hashlib.sha256(content).hexdigest()
    said = {"text": "red", "scores": {"exact": 1.0}, "finish_reason": "stop"}
    sample = {"id": "r", "prompt": "colour?", "answer": "red", "images": [digest, "../x"], "completions": [said]}
    write_evaluation(tmp_path / "e", {}, [sample])
    (tmp_path / "e" / "images").mkdir()
    (tmp_path / "e" / "images" / digest).write_bytes(content)
    ref = ref_of("evaluation.sft", "evaluation")
    publish(store, ref, tmp_path / "e", kind=Kind.EVALUATION, name="evaluation.sft", metrics={"pass@1": 1.0})
    record(store, [NodeRecord(name="evaluation.sft", ref=ref, outcome="computed")])
    page = browser.get("/runs/made").text
    assert re.findall(r'<img [^>]*src="([^"]+)"', page) == [f"/runs/made/evaluation.sft/images/{digest}"]
    assert browser.get(f"/runs/made/evaluation.sft/images/{digest}").content == content


@pytest.mark.parametrize(
    "row",
    [
        {"text": "x" * 10_000}, {"messages": asked("x") * 10_000}, {"messages": asked("x" * 10_000)},
        {"other": ["x"] * 10_000}, {"prompt": [], "completions": [{"text": ""}] * 10_000},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": ["x" * 10_000]}]},
    ],
)  # fmt: skip
def test_a_long_row_is_cut_and_says_so(row: dict[str, Any]) -> None:
    cut = view(row, 100)
    assert cut.is_cut
    assert len(str(cut)) < 20_000
    assert not view(row, 200_000).is_cut
