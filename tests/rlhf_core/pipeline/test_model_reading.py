"""When transformers is asked about a model folder, and what is said if it does not answer."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from rlhf_core.pipeline import model_reading
from rlhf_core.pipeline.model_reading import as_read, misfit_by_class


def config(folder: Path, model_type: str) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


@pytest.mark.parametrize(("model_type", "has_torch"), [("llama", True), ("gpt2", False)])
def test_no_process_starts_where_the_tensors_are_known_or_torch_is_missing(
    model_type: str, has_torch: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def none(*arguments: Any) -> None:
        raise AssertionError("a process was started")

    config(tmp_path, model_type)
    assert as_read((tmp_path / "config.json").read_text(), "config.json")[0]  # what it says is kept
    monkeypatch.setattr(model_reading, "_run", none)
    monkeypatch.setattr(model_reading, "find_spec", lambda name: object() if has_torch else None)
    assert misfit_by_class(tmp_path, reward_model=False) is None


def test_what_takes_too_long_is_ended_and_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config(tmp_path, "gpt2")
    assert as_read((tmp_path / "config.json").read_text(), "config.json")[0]
    monkeypatch.setattr(model_reading, "_SECONDS", 0.01)
    assert as_read("{}", "config.json") == (False, "config.json is not read within 0.01 s: fetch it again")
    assert misfit_by_class(tmp_path, reward_model=False) == (
        "transformers builds no model by config.json within 0.01 s: fetch the folder again"
    )


def test_a_process_that_is_killed_gives_no_line_of_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config(tmp_path, "gpt2")
    assert as_read((tmp_path / "config.json").read_text(), "config.json")[0]
    killed = CompletedProcess([], returncode=-9, stdout="", stderr="a warning of some library\n")
    monkeypatch.setattr(model_reading, "_run", lambda arguments: killed)
    assert misfit_by_class(tmp_path, reward_model=False) == (
        "transformers ended while it built a model by config.json, perhaps out of memory: fetch the folder again"
    )
