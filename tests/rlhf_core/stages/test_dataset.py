from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.data import DatasetConfig
from rlhf_core.contract import Input
from rlhf_core.data.reading import read_rows
from rlhf_core.errors import StageError
from rlhf_core.stages.dataset import run
from tests.rlhf_core.stages.context import LocalContext, local_input


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make(
    tmp_path: Path, settings: dict[str, Any], *, seed: int = 0, exclude: Path | None = None, name: str = "work"
) -> tuple[list[dict[str, Any]], dict[str, Any], Path]:
    inputs: dict[str, Input] = {} if exclude is None else {"exclude.test": local_input(exclude, Kind.DATASET)}
    context = LocalContext(tmp_path / name, user_files_root=tmp_path, name="data.train", seed=seed)
    output = run(DatasetConfig.model_validate_json(json.dumps({"format": "prompts"} | settings)), inputs, context)
    assert output.kind is Kind.DATASET
    info = json.loads((output.folder / "info.json").read_text())
    rows = read_rows(output.folder)
    assert output.metrics["rows"] == info["rows"] == len(rows)
    return rows, info, output.folder


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
    assert info["dropped"] == {"excluded": 1, "duplicates": 1, "not_drawn": 0, "over_limit": 1}
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
    assert (first / "data.jsonl").read_bytes() == (again / "data.jsonl").read_bytes()
    assert (first / "info.json").read_bytes() == (again / "info.json").read_bytes()
    assert questions(read_rows(first)) != questions(read_rows(other))
    assert sorted(questions(read_rows(first))) == sorted(questions(read_rows(other)))


def test_a_mix_keeps_its_weights(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"prompt": f"a{i}"} for i in range(60)])
    write(tmp_path / "b.jsonl", [{"prompt": f"b{i}"} for i in range(60)] + [{"prompt": "a0"}])
    mixed = [{"source": files("a.jsonl"), "weight": 3.0}, {"source": files("b.jsonl"), "weight": 1.0}]
    rows, info, _ = make(tmp_path, {"mix": mixed, "limit": 40})
    assert [entry["used"] for entry in info["sources"]] == [30, 10]
    assert info["dropped"]["duplicates"] == 1
    assert len(set(questions(rows))) == 40
    assert "".join(q[0] for q in questions(rows[:12])) != "ababab" * 2
    assert info["dropped"]["not_drawn"] + info["dropped"]["over_limit"] == 80


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
            "item 0 is int, expected a dict",
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


def test_it_loads_no_torch() -> None:
    code = (
        "import sys, rlhf_core.stages.dataset, rlhf_core.pipeline.preflight, rlhf_core.rewards, rlhf_core.data.chat; "
        "print(sorted({'torch', 'transformers', 'datasets', 'reasoning_gym', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
