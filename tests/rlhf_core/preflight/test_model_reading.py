"""Inspection of a model folder by transformers' class, and the message if it fails."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from rlhf_core.errors import StageError
from rlhf_core.models.folders import inspection
from rlhf_core.models.folders.folder import Head, update_json
from rlhf_core.preflight import model_reading
from rlhf_core.preflight.model_reading import inspected
from tests.rlhf_core.recipes import model_folder

pytestmark = pytest.mark.parts


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "cache"))
    model_folder(tmp_path)
    return tmp_path / "model"


def no_process(*arguments: Any, **options: Any) -> None:
    raise AssertionError("a process was started")


@pytest.mark.endurance("architectures")
def test_an_answer_is_kept_until_config_or_headers_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    first = inspected(folder, reward_model=False)
    assert first is not None
    assert (first.model_class, first.settings["rms_norm_eps"]) == ("LlamaForCausalLM", 1e-6)
    assert first.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    model_reading._answer.cache_clear()  # as in another process
    with monkeypatch.context() as patch:
        patch.setattr(model_reading, "tried", no_process)
        assert inspected(folder, reward_model=False) == first
        save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"] + 1}, path, metadata={"format": "pt"})
        with pytest.raises(
            StageError, match=r"config\.json makes lm_head\.weight one with model\.embed_tokens\.weight"
        ):
            inspected(folder, reward_model=False)
        update_json(folder / "config.json", rms_norm_eps=1e-5)
        with pytest.raises(AssertionError, match="a process was started"):
            inspected(folder, reward_model=False)


@pytest.mark.endurance("architectures")
def test_a_refusal_is_one_sentence_and_asked_for_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update_json(folder / "config.json", hidden_act="sillu")
    with pytest.raises(StageError, match=r"^transformers cannot load a model with this config\.json"):
        inspected(folder, reward_model=False)
    monkeypatch.setattr(model_reading, "tried", no_process)
    with pytest.raises(AssertionError, match="a process was started"):
        inspected(folder, reward_model=False)


def test_no_process_starts_where_torch_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_reading, "tried", no_process)
    monkeypatch.setattr(model_reading, "find_spec", lambda name: None)
    assert inspected(folder, reward_model=False) is None


def test_what_takes_too_long_is_ended_and_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_reading, "_SECONDS", 0.01)
    with pytest.raises(
        StageError, match=r"^transformers builds no model by config\.json within 0\.01 s: fetch the folder"
    ):
        inspected(folder, reward_model=False)


def kill_itself(folder: str, head: Head) -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def test_a_process_that_is_killed_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "inspect_as_json", kill_itself)
    with pytest.raises(
        StageError, match=r"^the process in which transformers builds a model by config\.json was killed"
    ):
        inspected(folder, reward_model=False)


def test_a_model_that_takes_too_much_memory_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "inspect_as_json", fill_memory)
    with pytest.raises(StageError, match=r"^the model of config\.json takes more than 8 GiB without its weights"):
        inspected(folder, reward_model=False)


def fill_memory(folder: str, head: Head) -> str:
    return str(len(bytearray(9 << 30)))
