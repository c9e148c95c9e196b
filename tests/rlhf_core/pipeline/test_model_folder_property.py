"""Model folders with something changed at random: `plan` says what is wrong, or a model loads with its own weights."""

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

from rlhf_core.config.base_model import BaseModelConfig
from rlhf_core.errors import StageError
from rlhf_core.models.class_config import class_config, require_generation_config
from rlhf_core.models.loading import load_causal_model
from rlhf_core.pipeline import preflight_model
from rlhf_core.stages import base
from tests.mutations import PATIENCE, examples
from tests.rlhf_core.pipeline.recipes import model_folder
from tests.rlhf_core.stages.context import LocalContext

pytestmark = PATIENCE

# What no header says: the shapes that the model's class expects.
TORCH_ONLY = ("the weights are not those of config.json", "transformers cannot load a model with this config.json")

VALUES = st.sampled_from(
    [
        None, True, False, 0, 1, -1, 2, 3, 7, 10**6, 10**12, 2**63, 0.5, float("nan"), "", "x", "llama", "1",
        [], [1], {}, {"a": 1},
    ]
)  # fmt: skip
TENSORS = st.sampled_from(["drop", "rename", "shape", "dtype", "add"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model in one file, and in two with an index."""
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
    return {"model": root / "model", "shards": root / "shards"}


def change(folder: Path, draw: Any) -> None:
    """One change of one file."""
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


def read_here(text: str, name: str) -> tuple[bool, str]:
    """`_as_read` in this process, which has torch."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_text(text)
        try:
            if name == "generation_config.json":
                require_generation_config(Path(folder))
                return True, ""
            return True, json.dumps(class_config(Path(folder)), default=str)
        except StageError as error:
            return False, str(error)


@examples(40)
@given(data=st.data())
def test_a_changed_folder_is_refused_or_loads_with_its_own_weights(whole: dict[str, Path], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        root, source = Path(name), data.draw(st.sampled_from(["model", "shards"]))
        shutil.copytree(whole[source], root / "given")
        for _ in range(data.draw(st.integers(1, 2))):
            change(root / "given", data.draw)
        check(root)


def check(root: Path) -> str:
    """Who refuses the folder `given` in `root`: `plan`, `base`, or nobody."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight_model, "_as_read", read_here)
        said = list(preflight_model.model_folder_problems(root / "given", reward_model=False, needs_template=True))
    if said:
        assert all(sentence and "\n" not in sentence for sentence in said)
        return "plan"
    config = BaseModelConfig.model_validate({"source": {"type": "folder", "path": "given"}, "dtype": "float32"})
    refusal, folder = "", root
    try:
        folder = base.run(config, {}, LocalContext(root / "work", user_files_root=root)).folder
    except StageError as error:
        refusal = str(error)
    if refusal:
        assert any(reason in refusal for reason in TORCH_ONLY), refusal
        return "base"
    stored: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
    loaded = load_causal_model(folder, dtype=torch.float32, attention="sdpa").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in stored.items() if name in loaded)
    assert set(loaded) - set(stored) <= {"lm_head.weight"}
    return "nobody"
