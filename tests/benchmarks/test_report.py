"""Stored measurements, and the pages that are made of them."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks import evaluations, record, report
from benchmarks.record import FOLDER, Measurement, read, store_figures
from benchmarks.report import BENCHMARKS, RESULTS, Figure, Row, figures, pages, source, table
from rlhf_core.errors import RecipeError

ROOT = Path(__file__).resolve().parents[2]


def measurement(**changed: Any) -> Measurement:
    fields = {"command": "c", "seeds": [0], "machine": "2 cores", "commit": "abc", "date": "2026-11-29", "figures": {}}
    return Measurement(**(fields | changed))


def test_the_pages_have_the_stored_figures() -> None:
    """`make pages` writes them again."""
    for page, text in pages().items():
        assert page.read_text(encoding="utf-8") == text, f"{page.name} is not what `python -m benchmarks.report` writes"


def test_every_stored_measurement_has_a_row() -> None:
    stored = {path.stem for path in FOLDER.glob("*.json")}
    assert stored == {name for row in (*RESULTS, *BENCHMARKS) for name in row.measurements}
    for name in stored:
        assert read(name).command
        assert (FOLDER / f"{name}.json").read_text(encoding="utf-8").endswith("}\n")


def test_the_result_on_the_first_page_is_the_stored_one() -> None:
    words = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    shown = re.search(r"held-out questions rise from ([\d., and]+) to ([\d., and]+) \(", words)
    assert shown is not None
    before, after = ([float(value) for value in re.findall(r"\d\.\d+", part)] for part in shown.groups())
    assert {"sft": before, "rl": after} == read("tiny").figures


MINUTES = {2: "two", 3: "three", 4: "four", 5: "five"}


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("README.md", "runs this block, in about {words} minutes."),
        ("docs/tutorials/first-run.md", "in [about {words} minutes](../reference/benchmarks.md)"),
        ("docs/operate/scale.md", "| `tiny` (0.65 M) | 2 CPU cores | [{minutes} min]"),
    ],
)
def test_the_pages_that_tell_how_long_the_demo_takes(page: str, text: str) -> None:
    minutes = round(statistics.mean(cast(Any, read("demo").figures["seconds"])) / 60)
    words = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert text.format(minutes=minutes, words=MINUTES[minutes]) in words


def test_the_page_on_cost_has_the_least_and_most_planned_memory() -> None:
    planned = [
        cast(Any, case)["planned_of_peak"]
        for name in ("plan-memory", "plan-memory-135m", "plan-memory-300m")
        for case in read(name).figures.values()
    ]
    values = [value for each in planned for value in (each if isinstance(each, list) else [each])]
    page = " ".join((ROOT / "docs/operate/cost.md").read_text(encoding="utf-8").split())
    assert f"the prediction was {min(values):.2f} to {max(values):.2f} of" in page


def test_the_speed_on_the_first_page_is_the_stored_one() -> None:
    speed = {name: cast(Any, read("gpu").figures[name])["of_trl"] for name in ("grpo-tree", "grpo-packed")}
    with_tree, without = (" and ".join(map(str, speed[name])) for name in speed)
    assert f"**{with_tree}** × TRL; {without} |" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("values", "significant", "spec", "shown"),
    [
        ([0.5, 0.03, 0], [False] * 3, ".3f", "0.500, 0.030, 0"),
        ([0.5, 0.4692, 0.359], [True, True, False], ".3f", "**0.500, 0.469**, 0.359"),
        ([0.84, 1.22], [False] * 2, ".2f and >1", "0.84 and **1.22**"),
        ([1.36, 1.56], [False] * 2, ".2f and >1", "**1.36 and 1.56**"),
        ([0.64, 1.02], [False] * 2, ".2f and <1", "**0.64** and 1.02"),
        ([0.96, 1], [True, True], ".3f to", "**0.960 to 1**"),
        ([25811.4], [False], ",.0f", "25,811"),
        ([0.1024], [False], ".1%", "10.2 %"),
        ([136, 123], [False] * 2, "min and", "2 min 16 s and 2 min 3 s"),
        ([1.6], [False], ".1f <1", "1.6"),
    ],
)
def test_figures_are_shown_as_the_text_asks(
    values: list[float], significant: list[bool], spec: str, shown: str
) -> None:
    assert f"{Figure(values, significant):{spec}}" == shown


def test_an_unknown_format_is_an_error() -> None:
    with pytest.raises(ValueError, match="is no format of a figure"):
        format(Figure([1.0], [False]), ".2f or")


def test_figures_of_two_measurements_are_side_by_side() -> None:
    both = [
        measurement(figures={"a": {"speed": 3.68}, "n": [1, 2]}),
        measurement(figures={"a": {"speed": 3.3}, "n": 3}),
    ]
    assert "{a[speed]:.1f and} {n:d}".format_map(figures(both)) == "3.7 and 3.3 1, 2, 3"


def test_what_was_not_recorded_is_said() -> None:
    assert source([measurement()], {}, with_machine=True) == "2 cores, abc"
    unknown = [measurement(machine=None, commit=None, lab="2026-11-28.md#x")]
    assert source(unknown, {"a": 1}, with_machine=True) == "[machine not recorded, commit not recorded][2]"


def test_a_table_ends_with_its_links_to_the_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    record.write(tmp_path / "one.json", measurement(figures={"speed": 2.0}, lab="2026-11-28.md#x"))
    record.write(tmp_path / "two.json", measurement(figures={"speed": 3.0}, lab="2026-11-28.md#x"))
    rows = [Row("a", ("one",), "{speed:.1f}"), Row("b", ("one", "two"), "{speed:.1f}")]
    assert table(rows, ("what", "figure", "from"), with_machine=False).splitlines()[2:] == [
        "| a | 2.0 | [abc][1] |", "| b | 2.0, 3.0 | the same |", "", "[1]: ../lab/2026-11-28.md#x",
    ]  # fmt: skip


def test_a_row_of_the_same_measurement_is_not_said_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    record.write(tmp_path / "one.json", measurement(figures={"speed": 2.0}))
    rows = [Row("a", ("one",), "{speed:.1f}"), Row("b", ("one",), "{speed:.2f}")]
    assert table(rows, ("what", "figure", "from"), with_machine=False) == (
        "| what | figure | from |\n|---|---|---|\n| a | 2.0 | abc |\n| b | 2.00 | the same |\n"
    )


def test_a_page_without_marks_is_an_error() -> None:
    with pytest.raises(LookupError, match="lacks its marks"):
        report._filled("no marks", "table")


def test_a_benchmark_stores_what_ran_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "device", lambda: "2 cores of a CPU")
    monkeypatch.setattr(record, "commit", lambda: "abc-dirty")
    monkeypatch.delenv(record.VARIABLE, raising=False)
    store_figures({"speed": 1.5})
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(record.VARIABLE, str(tmp_path / "new.json"))
    store_figures({"speed": [1.5, 2]}, seeds=range(2), command="python -m benchmarks.x")
    stored = json.loads((tmp_path / "new.json").read_text())
    assert stored | {"date": "", "machine": ""} == {
        "command": "python -m benchmarks.x", "seeds": [0, 1], "machine": "", "commit": "abc-dirty", "date": "",
        "figures": {"speed": [1.5, 2]}, "significant": {}, "lab": None,
    }  # fmt: skip
    assert re.fullmatch(r"2 cores of a CPU, load average \d+\.\d", stored["machine"])


def test_evaluations_of_runs_are_lists_by_model() -> None:
    def run(seed: int, **models: float) -> Any:
        measured = {"evaluation": {model: {"pass@1": value, "note": "x"} for model, value in models.items()}}
        overrides = ("rl.steps=2", f"seed={seed}")
        return SimpleNamespace(evaluations=measured, recipe={"name": "tiny", "seed": seed}, overrides=overrides)

    runs = [run(0, sft=0.4, rl=0.9), run(1, sft=0.3, rl=0.8, other=0.1)]
    assert evaluations.figures(cast(Any, runs), "pass@1") == {"sft": [0.4, 0.3], "rl": [0.9, 0.8]}
    assert evaluations.command(cast(Any, runs)) == "alignment run tiny rl.steps=2 seed=S"
    with pytest.raises(RecipeError, match="no model has the metric `reward`"):
        evaluations.figures(cast(Any, runs), "reward")
