"""Randomly changed model folders: `plan` reports the problem, or a model loads with its own weights.

Where torch is installed, as here, `plan` rejects everything that the job of the base stage would.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from benchmarks.small_models import small_config, small_model
from rlhf_core.config.stages.base_model import BaseModelConfig
from rlhf_core.models.folders.inspection import Inspection, inspect
from rlhf_core.models.loading import load_causal_model
from rlhf_core.models.stored import stored_state
from rlhf_core.preflight import model as preflight_model
from rlhf_core.stages import base
from tests.mutations import PATIENCE, examples
from tests.rlhf_core.recipes import model_folder
from tests.rlhf_core.stages.context import LocalContext

pytestmark = [pytest.mark.endurance("mutations"), PATIENCE]

VALUES = st.sampled_from(
    [
        None, True, False, 0, 1, -1, 2, 3, 7, 10**6, 10**12, 2**63, 0.5, float("nan"), "", "x", "llama", "1",
        [], [1], {}, {"a": 1},
    ]
)  # fmt: skip
KINDS = ("bert", "gemma2", "gpt2", "lfm2", "mixtral", "opt", "phi3", "qwen2", "qwen3", "qwen3_5_text")
TENSORS = st.sampled_from(["drop", "rename", "shape", "dtype", "add"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Llama in one file, and in two with an index; and a model of each other architecture."""
    root = tmp_path_factory.mktemp("whole")
    model_folder(root)
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "model")
    torch.manual_seed(0)
    model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()})
    model.tie_weights()
    shutil.copytree(root / "model", root / "shards")
    (root / "shards" / "model.safetensors").unlink()
    model.save_pretrained(root / "shards", max_shard_size="3KB")
    model.save_pretrained(root / "model")
    for kind in KINDS:
        shutil.copytree(root / "model", root / kind, ignore=shutil.ignore_patterns("model*", "config.json"))
        small_model(small_config(kind, vocab_size=model.config.vocab_size)).save_pretrained(root / kind)
    return {name: root / name for name in ("model", "shards", *KINDS)}


def change(whole: dict[str, Path], folder: Path, draw: Any) -> None:
    """One change of one file, or the config.json of another model."""
    if draw(st.integers(0, 5)) == 0:
        shutil.rmtree(folder / "config.json", ignore_errors=True)
        shutil.copyfile(whole[draw(st.sampled_from(sorted(whole)))] / "config.json", folder / "config.json")
        return
    file = draw(st.sampled_from(sorted(path for path in folder.iterdir() if path.is_file())))
    kinds = ["cut", "flip", "delete", "folder", "pointer", "empty"]
    kinds += ["json"] * 8 if file.suffix == ".json" else ["tensor"] * 5 if file.suffix == ".safetensors" else []
    match draw(st.sampled_from(kinds)):
        case "cut":
            content = file.read_bytes()
            file.write_bytes(content[: draw(st.integers(0, len(content)))])
        case "flip":
            content = bytearray(file.read_bytes())
            header = min(len(content) - 1, 600)  # of weights: where names, shapes and offsets are
            if content:
                content[draw(st.integers(0, max(header, 0)))] ^= 1 << draw(st.integers(0, 7))
            file.write_bytes(bytes(content))
        case "delete":
            file.unlink()
        case "folder":
            file.unlink()
            file.mkdir()
        case "pointer":
            file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        case "empty":
            file.write_bytes(b"")
        case "json":
            change_json(file, draw)
        case "tensor":
            change_tensor(file, draw)


def change_json(file: Path, draw: Any) -> None:
    """Another value, or none, at some key of the object or of one below it."""
    try:
        content = json.loads(file.read_text())
    except ValueError:
        return
    place = content
    while isinstance(place, dict | list) and place:
        key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(min(len(place), 20))))
        inner = place[key]
        if isinstance(inner, dict | list) and inner and draw(st.booleans()):
            place = inner
            continue
        if draw(st.booleans()) or isinstance(place, list):
            place[key] = (
                inner + draw(st.integers(-3, 3)) if type(inner) is int and draw(st.booleans()) else draw(VALUES)
            )
        else:
            del place[key]
        break
    file.write_text(json.dumps(content))


def change_tensor(file: Path, draw: Any) -> None:
    try:
        tensors = load_file(file)
    except Exception:  # an earlier change broke the file
        return
    name = draw(st.sampled_from(sorted(tensors))) if tensors else "a"
    value = tensors.pop(name, torch.ones(2, 2))
    match draw(TENSORS):
        case "rename":
            tensors[name.replace("0", "1").replace("weight", "bias")] = value
        case "shape":
            tensors[name] = value[:-1].clone() if draw(st.booleans()) else value.flatten().clone()
        case "dtype":
            tensors[name] = value.to(draw(st.sampled_from([torch.int8, torch.bfloat16, torch.float8_e4m3fn])))
        case "add":
            tensors |= {name: value, "model.layers.7.extra.weight": torch.ones(2)}
    save_file(tensors, file, metadata={"format": "pt"})


def inspected_here(folder: Path, *, reward_model: bool) -> Inspection:
    """`inspected` in this process."""
    return inspect(folder, "scalar" if reward_model else "causal")


@examples(40)
@given(data=st.data())
def test_a_changed_folder_is_refused_or_loads_with_its_own_weights(whole: dict[str, Path], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        root, source = Path(name), data.draw(st.sampled_from(["model", "shards", *KINDS]))
        shutil.copytree(whole[source], root / "given")
        for _ in range(data.draw(st.integers(1, 2))):
            change(whole, root / "given", data.draw)
        check(root)


def check(root: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight_model, "inspected", inspected_here)
        said = list(preflight_model.base_folder_problems(root / "given", reward_model=False, needs_template=True))
    if said:
        assert all(sentence and "\n" not in sentence for sentence in said)
        return
    config = BaseModelConfig.model_validate({"source": {"type": "folder", "path": "given"}, "dtype": "float32"})
    folder = base.run(config, {}, LocalContext(root / "work", user_files_root=root)).folder
    stored: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
    model: Any = load_causal_model(folder, dtype=torch.float32, attention="sdpa")
    loaded = stored_state(model, model.state_dict())
    assert all(torch.equal(loaded[name], value) for name, value in stored.items() if name in loaded)
    assert set(loaded) - set(stored) <= set(model.all_tied_weights_keys)
