"""The picture of a run's lineage: columns by depth, lines that touch no other stage, links, and states."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from deployments.ui.demo_run import RUN_ID, write_demo_run
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.pipeline.record import NodeRecord, RunStart, write_start
from rlhf_core.report.lineage import Picture, lineage_picture
from rlhf_core.report.node_view import NodeView
from tests.deployments.ui.made_runs import AT, publish, record, ref_of
from tests.deployments.ui.served import browsing

pytestmark = pytest.mark.parts

HOSTILE = "<script>alert(1)</script>\"'"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def page_of(store: LocalStore, tmp_path: Path, run_id: str) -> str:
    with browsing(store, tmp_path / "cache") as browser:
        return browser.get(f"/runs/{run_id}").text


def picture(parents: Mapping[str, Sequence[str]]) -> Picture:
    nodes = [NodeView(name, ref_of(name), "computed", None) for name in parents]
    inputs = {name: {f"input.{each}": ref_of(each) for each in read} for name, read in parents.items()}
    return lineage_picture(nodes, inputs)


def columns(drawn: Picture) -> list[list[str]]:
    """The names of each column, from left to right and from top to bottom."""
    by_place = sorted(drawn.boxes, key=lambda box: (box.x, box.y))
    return [[box.node.name for box in by_place if box.x == x] for x in sorted({box.x for box in drawn.boxes})]


def test_a_run_is_drawn_with_its_links_and_states(store: LocalStore, tmp_path: Path) -> None:
    write_demo_run(ArtifactRepository(store))
    svg = page_of(store, tmp_path, RUN_ID).partition('<svg class="lineage"')[2].partition("</svg>")[0]
    links = re.findall(rf'<a href="/runs/{RUN_ID}/([\w.]+)" class="([\w-]+)" aria-label="([^"]*)">', svg)
    words = {name: (state, text) for name, state, text in links}
    assert len(words) == 12
    assert words["rl"] == ("computed", "rl, computed; made from dpo (model), prompts (dataset), sft (reference)")
    assert words["base"] == ("reused", "base, reused")
    assert words["report"] == ("not-run", "report, not run")
    # It has no manifest: its inputs are those of its spec.
    assert words["evaluation.rl"] == ("failed", "evaluation.rl, failed; made from rl (model), test (dataset)")
    lines = re.findall(r'<path d="M[^"]+"><title>([^<]+)</title>', svg)
    assert len(lines) == 14
    assert "test is the held_out.test of overlap.prompts" in lines


def test_a_stage_stands_behind_all_that_it_was_made_from() -> None:
    drawn = picture({"d": ["b", "c", "a"], "a": [], "b": ["a"], "c": ["b"], "alone": ["of another run"]})
    assert columns(drawn) == [["a", "alone"], ["b"], ["c"], ["d"]]
    assert {line.text for line in drawn.lines} == {
        "b is the input.b of d", "c is the input.c of d", "a is the input.a of d", "a is the input.a of b",
        "b is the input.b of c",
    }  # fmt: skip


def test_two_inputs_from_one_stage_are_one_line() -> None:
    nodes = [NodeView(name, ref_of(name), "computed", None) for name in ("a", "b")]
    drawn = lineage_picture(nodes, {"b": {"model": ref_of("a"), "reference": ref_of("a")}})
    assert [line.text for line in drawn.lines] == ["a is the model and reference of b"]


def places_of(path: str) -> list[tuple[int, int]]:
    """The ends of the pieces of a line."""
    places: list[tuple[int, int]] = []
    for kind, numbers in re.findall(r"([MCH])([\d -]+)", path):
        values = [int(each) for each in numbers.split()]
        places.append((values[0], places[-1][1]) if kind == "H" else (values[-2], values[-1]))
    return places


@pytest.mark.parametrize("seed", range(5))
def test_no_box_covers_another_and_no_line_runs_behind_one(seed: int) -> None:
    draw = random.Random(seed)
    names = [f"s{n}" for n in range(60)]
    parents = {name: draw.sample(names[:n], min(n, draw.randint(0, 3))) for n, name in enumerate(names)}
    drawn = picture(parents)
    spans = [(box.x, box.y, box.x + drawn.box_width, box.y + drawn.box_height) for box in drawn.boxes]
    for n, (left, top, _, bottom) in enumerate(spans):
        assert not any(left == x and y < bottom and top < end for x, y, _, end in spans[n + 1 :])
        assert 0 <= top < bottom <= drawn.height
    ends = {box.node.name: box for box in drawn.boxes}
    assert len(drawn.lines) == sum(map(len, parents.values()))
    for line in drawn.lines:
        first, last = line.text.split(" ")[0], line.text.split(" ")[-1]
        places = places_of(line.path)
        assert places[0] == (ends[first].x + drawn.box_width, ends[first].y + drawn.box_height // 2)
        assert places[-1] == (ends[last].x, ends[last].y + drawn.box_height // 2)
        for (start, y), (end, next_y) in pairwise(places):
            if y == next_y and end - start == drawn.box_width:  # it passes a column
                assert not any(left == start and top <= y <= bottom for left, top, _, bottom in spans)


def test_a_circle_of_damaged_manifests_is_drawn_as_far_as_it_goes_forward() -> None:
    drawn = picture({"a": ["c"], "b": ["a"], "c": ["b"], "self": ["self"]})
    assert len(drawn.boxes) == 4
    assert len(drawn.lines) == 2


def test_a_long_chain_and_many_stages_and_none() -> None:
    chain = picture({f"s{n}": [f"s{n - 1}"] if n else [] for n in range(100)})
    assert (len(chain.boxes), chain.left_out, len(columns(chain))) == (60, 40, 60)
    assert chain.width == 59 * 210 + 150 + 12
    assert (len(picture({}).boxes), picture({}).height > 0) == (0, True)


def test_names_are_shortened_in_the_box_and_whole_in_words_and_never_markup(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_text("x")
    publish(store, ref_of("a", "sft"), tmp_path / "d")
    publish(store, ref_of("b", "sft"), tmp_path / "d", parents={HOSTILE: ref_of("a", "sft")})
    long = HOSTILE + "x" * 40
    record(
        store,
        [NodeRecord(name=name, ref=ref_of(key, "sft"), outcome="computed") for name, key in ((long, "a"), ("b", "b"))],
    )
    page = page_of(store, tmp_path, "made")
    assert "<script>alert" not in page
    svg = page.partition('<svg class="lineage"')[2].partition("</svg>")[0]
    assert re.search(r"<text [^>]*>&lt;script&gt;alert\(1\)&lt;/…</text>", svg)
    assert f"b, computed; made from &lt;script&gt;alert(1)&lt;/script&gt;&#34;&#39;{'x' * 40} (" in svg


def test_a_run_without_stages_and_a_damaged_spec(store: LocalStore, tmp_path: Path) -> None:
    write_start(store, RunStart(run_id="empty", recipe={"name": "e"}, overrides=(), started_at=AT, nodes={}))
    assert '<svg class="lineage"' not in page_of(store, tmp_path, "empty")
    ref = ref_of("a", "sft")
    write_start(store, RunStart(run_id="damaged", recipe={"name": "e"}, overrides=(), started_at=AT, nodes={"a": ref}))
    store.put(f"{ref.path}/spec.json", b"{")
    assert "spec.json is not a stage" in page_of(store, tmp_path, "damaged").replace("&#39;", "'")
