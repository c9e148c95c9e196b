from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages.merging import MergeModelsConfig
from rlhf_core.contract import Input, Output
from rlhf_core.errors import StageError
from rlhf_core.stages import merge_models
from tests.rlhf_core.stages.context import LocalContext, local_input
from tests.rlhf_core.stages.supervised_runs import base_model

pytestmark = pytest.mark.parts

HALF = {"model": "a", "weight": 0.5}
IDS = torch.tensor([[1, 3, 10, 11, 4, 12, 2]])


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Input]:
    folder = tmp_path_factory.mktemp("models")
    names = ("model", "others.0.model", "others.1.model")
    return {name: base_model(folder / str(seed), seed=seed) for seed, name in enumerate(names)}


def run(workdir: Path, inputs: dict[str, Input], *weights: float, **settings: Any) -> Output:
    others = [{"model": str(place), "weight": weight} for place, weight in enumerate(weights)]
    config = MergeModelsConfig.model_validate_json(json.dumps({"others": others, **settings}))
    return merge_models.run(config, inputs, LocalContext(workdir, given_seed=None))


def logprobs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = torch.log_softmax(model(input_ids=IDS).logits, dim=-1)
    return found


def test_the_merged_model_gives_the_log_probs_of_the_merged_weights(inputs: dict[str, Input], tmp_path: Path) -> None:
    output = run(tmp_path, inputs, 0.2, 0.5, method="linear")
    assert output.kind == Kind.POLICY
    models = [AutoModelForCausalLM.from_pretrained(inputs[name].folder) for name in sorted(inputs)]
    states = [model.state_dict() for model in models]
    mixed = {
        name: (0.3 * states[0][name].double() + 0.2 * states[1][name].double() + 0.5 * states[2][name].double()).float()
        for name in states[0]
    }
    models[0].load_state_dict(mixed)
    ours = AutoModelForCausalLM.from_pretrained(output.folder)
    assert torch.allclose(logprobs(ours), logprobs(models[0]), atol=1e-6)
    assert (output.folder / "tokenizer.json").read_bytes() == (inputs["model"].folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({"method": "linear"}, [0.0, 0.0]), ({"method": "slerp"}, [0.0]),
        ({"method": "ties", "scale": 0.0}, [1.0, 1.0]),
    ],
)  # fmt: skip
def test_nothing_of_the_others_changes_no_bit(
    inputs: dict[str, Input], tmp_path: Path, settings: dict[str, Any], weights: list[float]
) -> None:
    output = run(tmp_path, inputs, *weights, **settings)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (output.folder, inputs["model"].folder))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_shards_stay_as_they_are(inputs: dict[str, Input], tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    folder.mkdir()
    for path in inputs["model"].folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{1 + place % 2}.safetensors" for place, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        part = {name: tensors[name] for name in places if places[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    whole = run(tmp_path / "whole", inputs, 0.4, method="linear").folder
    given = {**inputs, "model": local_input(folder, Kind.BASE_MODEL)}
    sharded = run(tmp_path / "parts", given, 0.4, method="linear").folder
    assert {path.name for path in sharded.glob("*.safetensors")} == set(places.values())
    expected = load_file(whole / "model.safetensors")
    for file in set(places.values()):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in load_file(sharded / file).items())
    assert torch.equal(logprobs(AutoModelForCausalLM.from_pretrained(sharded)),
                       logprobs(AutoModelForCausalLM.from_pretrained(whole)))  # fmt: skip


def test_models_that_do_not_fit_are_refused(inputs: dict[str, Input], tmp_path: Path) -> None:
    untied = {**inputs, "others.0.model": base_model(tmp_path / "untied", tied=False)}
    with pytest.raises(StageError, match=r"^others\.0\.model: its tie_word_embeddings is False, and that of"):
        run(tmp_path / "1", untied, 0.5, method="linear")
    fewer = base_model(tmp_path / "fewer").folder  # the same tensors, read as other heads
    config = json.loads((fewer / "config.json").read_text())
    config |= {"num_attention_heads": config["num_attention_heads"] // 2}
    (fewer / "config.json").write_text(json.dumps(config))
    with pytest.raises(StageError, match=r"^others\.0\.model: its num_attention_heads is 1, and that of `model` is 2"):
        run(tmp_path / "3", {**inputs, "others.0.model": local_input(fewer, Kind.BASE_MODEL)}, 0.5, method="linear")
    other = base_model(tmp_path / "other").folder
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + " ")
    foreign = {**inputs, "others.0.model": local_input(other, Kind.BASE_MODEL)}
    with pytest.raises(StageError, match=r"^others\.0\.model: its tokenizer is not that of `model`"):
        run(tmp_path / "2", foreign, 0.5, method="linear")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"method": "slerp", "others": [HALF, HALF]},
            "one other model",
        ),
        ({"method": "slerp", "others": [{"model": "a", "weight": 1.5}]}, "a weight from 0 to 1"),
        ({"method": "linear", "density": 0.5}, "density is a setting of ties"),
        ({"method": "ties", "others": [{"model": "a", "weight": -0.5}]}, "each must be more than 0"),
        ({"method": "linear", "others": []}, "at least 1 item"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        MergeModelsConfig.model_validate_json(json.dumps({"others": [HALF], **settings}))
    assert message in str(caught.value)
