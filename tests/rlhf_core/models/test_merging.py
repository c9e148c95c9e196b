"""Merging adapters into their base."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.errors import StageError
from rlhf_core.models import merging
from rlhf_core.models.folders.adapter_check import adapter_problems
from rlhf_core.models.folders.folder import ADAPTER_WEIGHTS
from rlhf_core.models.loading import load_causal_model, load_scalar_model
from rlhf_core.models.merging import MergedWeights, merge_adapter
from tests.rlhf_core.models.saved import save_state

pytestmark = pytest.mark.parts

IDS = torch.tensor([[3, 1, 4, 1, 5]])


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["causal", "scalar"])
def test_merging_gives_what_the_adapted_model_gives(model_folder: Path, tmp_path: Path, kind: str) -> None:
    load = load_causal_model if kind == "causal" else load_scalar_model
    adapted = load(model_folder, dtype=torch.float32, attention="sdpa", lora=LoraConfig(rank=2))
    assert isinstance(adapted, PeftModel)
    torch.manual_seed(1)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    save_state(adapted, get_peft_model_state_dict(adapted), tmp_path / "adapter", model_folder)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    (tmp_path / "base").mkdir()
    for path in model_folder.iterdir():
        shutil.copy(path, tmp_path / "base")
    (tmp_path / "base" / "metrics.jsonl").write_text("{}")
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged = load(tmp_path / "merged", dtype=torch.float32, attention="sdpa")
    expected = adapted(input_ids=IDS).logits
    assert (
        expected - load(model_folder, dtype=torch.float32, attention="sdpa")(input_ids=IDS).logits
    ).abs().max() > 0.1
    torch.testing.assert_close(merged(input_ids=IDS).logits, expected, rtol=0, atol=1e-5)
    assert (tmp_path / "merged" / "tokenizer.json").is_file()
    # Artifacts carry the figures of the stage that made them; a merge has its own.
    assert not (tmp_path / "merged" / "metrics.jsonl").exists()


def randomise(adapted: torch.nn.Module) -> None:
    torch.manual_seed(1)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.2)


KINDS = [
    {}, {"rank_stabilised": True}, {"dora": True}, {"modules_to_save": ["model.norm", "input_layernorm"]},
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: next(iter(kind), "lora"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_published_weights_are_the_merged_model(model_folder: Path, dtype: torch.dtype, kind: dict[str, Any]) -> None:
    lora = LoraConfig.model_validate_json(json.dumps({"rank": 2, "alpha": 3.0, **kind}))
    adapted = load_causal_model(model_folder, dtype=dtype, attention="sdpa", lora=lora)
    fresh = dict(MergedWeights(model_folder, get_peft_model_state_dict(adapted), lora.scaling, dtype))
    base = parameters(load_causal_model(model_folder, dtype=dtype, attention="sdpa"))
    assert fresh.keys() == base.keys()
    assert all(torch.equal(base[name], tensor) for name, tensor in fresh.items())

    randomise(adapted)
    merged = dict(MergedWeights(model_folder, get_peft_model_state_dict(adapted), lora.scaling, dtype))
    expected = parameters(adapted.float().merge_and_unload())
    assert expected.keys() == merged.keys()
    for name, tensor in merged.items():
        assert tensor.dtype == dtype
        rtol = 2e-6 if dtype.itemsize == 4 else 2e-2
        torch.testing.assert_close(tensor, expected[name].to(dtype), rtol=rtol, atol=rtol)
    assert any(not torch.equal(fresh[name], tensor) for name, tensor in merged.items())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: next(iter(kind), "lora"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_of_linear_layers_is_merged_without_the_model_in_memory(
    model_folder: Path, tmp_path: Path, dtype: torch.dtype, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the bits of peft's merge in float32."""
    lora = LoraConfig.model_validate_json(json.dumps({"rank": 2, "alpha": 3.0, **kind}))
    base = load_causal_model(model_folder, dtype=dtype, attention="sdpa")
    save_state(base, parameters(base), tmp_path / "base", model_folder)
    adapted = load_causal_model(tmp_path / "base", dtype=torch.float32, attention="sdpa", lora=lora)
    assert isinstance(adapted, PeftModel)
    randomise(adapted)
    save_state(adapted, get_peft_model_state_dict(adapted), tmp_path / "adapter", None)
    monkeypatch.delattr(merging, "_merge_whole")
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    expected = {name: tensor.to(dtype) for name, tensor in parameters(adapted.merge_and_unload()).items()}
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == expected.keys()
    assert [name for name, tensor in merged.items() if not torch.equal(tensor, expected[name])] == []
    assert (tmp_path / "merged" / "config.json").read_text() == (tmp_path / "base" / "config.json").read_text()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trained", [False, True], ids=["of a causal model", "of a reward model"])
def test_an_adapter_of_a_reward_model_is_merged_without_the_model_in_memory(
    model_folder: Path, tmp_path: Path, dtype: torch.dtype, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is to the byte the one that peft's merge writes."""
    base = (load_scalar_model if trained else load_causal_model)(model_folder, dtype=dtype, attention="sdpa")
    save_state(base, parameters(base), tmp_path / "base", model_folder)
    lora = LoraConfig(rank=2, modules_to_save=("input_layernorm",))
    adapted = load_scalar_model(tmp_path / "base", dtype=torch.float32, attention="sdpa", lora=lora)
    assert isinstance(adapted, PeftModel)
    randomise(adapted)
    save_state(adapted, get_peft_model_state_dict(adapted), tmp_path / "adapter", None)
    with monkeypatch.context() as patched:
        patched.delattr(merging, "_merge_whole")
        merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    monkeypatch.setattr(merging, "_plain_adapter", lambda *_: None)
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "whole")
    merged, whole = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("merged", "whole")
    )
    assert merged == whole


@pytest.mark.parametrize("target", ["q_proj", "lm_head"])
def test_an_adapter_that_is_not_finite_is_refused(untied_folder: Path, tmp_path: Path, target: str) -> None:
    foreign(untied_folder, tmp_path / "adapter", target_modules=[target])
    path = tmp_path / "adapter" / ADAPTER_WEIGHTS
    save_file({name: torch.full_like(tensor, torch.inf) for name, tensor in load_file(path).items()}, path)
    with pytest.raises(StageError, match=r"this adapter cannot be merged"):
        merge_adapter(untied_folder, tmp_path / "adapter", tmp_path / "merged")


def test_an_adapter_file_that_cannot_be_read_is_named(model_folder: Path, tmp_path: Path) -> None:
    foreign(model_folder, tmp_path / "adapter")
    path = tmp_path / "adapter" / ADAPTER_WEIGHTS
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StageError, match=r"/adapter: this adapter does not fit the model that it is put on \("):
        merge_adapter(model_folder, tmp_path / "adapter", tmp_path / "merged")


def test_a_factor_of_no_tensor_of_the_folder_is_named(model_folder: Path) -> None:
    factors = {f"base_model.model.nowhere.lora_{f}.weight": torch.ones(2, 2) for f in "AB"}
    with pytest.raises(
        StageError, match=r"the adapter changes nowhere\.weight, which the model's folder does not have"
    ):
        MergedWeights(model_folder, factors, 1.0, torch.float32)


def test_merging_keeps_the_dtype_of_the_base(model_folder: Path, tmp_path: Path) -> None:
    base = load_causal_model(model_folder, dtype=torch.bfloat16, attention="sdpa")
    save_state(base, parameters(base), tmp_path / "base", model_folder)
    adapted = load_causal_model(tmp_path / "base", dtype=torch.bfloat16, attention="sdpa", lora=LoraConfig(rank=2))
    save_state(adapted, get_peft_model_state_dict(adapted), tmp_path / "adapter", None)
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}
    assert all(torch.equal(tensor, parameters(merged)[name]) for name, tensor in parameters(base).items())


def test_an_adapter_of_another_model_is_refused(model_folder: Path, tmp_path: Path) -> None:
    adapted = load_causal_model(model_folder, dtype=torch.float32, attention="sdpa", lora=LoraConfig(rank=2))
    wrong = {name: torch.zeros(3, 3) for name in get_peft_model_state_dict(adapted)}
    save_state(adapted, wrong, tmp_path / "adapter", None)
    with pytest.raises(StageError, match=r"this adapter does not fit the model that it is put on .*size mis") as raised:
        merge_adapter(model_folder, tmp_path / "adapter", tmp_path / "merged")
    assert "\n" not in str(raised.value)


def foreign(model_folder: Path, folder: Path, rows: int | None = None, **settings: Any) -> PeftModel:
    """An adapter that peft made by itself and saved in `folder`, none of its tensors as they are initialised.

    rows: to which the embedding is resized before.
    """
    base = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    if rows is not None:
        base.resize_token_embeddings(rows)
    options = {"r": 2, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **settings}
    with warnings.catch_warnings(action="ignore"):
        adapted = get_peft_model(base, PeftLoraConfig(**options))
    torch.manual_seed(1)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(str(folder))
    return adapted.eval()


FEATURES: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True, "lora_alpha": 3},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"down_proj": 5}, "layers_to_transform": [1]},
    "whole head": {"modules_to_save": ["lm_head"]},
    "whole embedding": {"modules_to_save": ["embed_tokens"]},
    "new tokens": {"trainable_token_indices": [3, 4]},
    "biases": {"bias": "all"},
    "pissa": {"init_lora_weights": "pissa"},
}


@pytest.mark.parametrize("settings", FEATURES.values(), ids=FEATURES.keys())
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_an_adapter_of_pefts_is_merged_as_peft_merges_it(
    model_folder: Path, untied_folder: Path, tmp_path: Path, settings: dict[str, Any], tied: bool
) -> None:
    folder = model_folder if tied else untied_folder
    adapted = foreign(folder, tmp_path / "adapter", **settings)
    given = adapted(input_ids=IDS).logits
    merge_adapter(folder, tmp_path / "adapter", tmp_path / "merged")
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged")(input_ids=IDS).logits
    torch.testing.assert_close(merged, given, rtol=0, atol=1e-5)
    torch.testing.assert_close(merged, adapted.merge_and_unload()(input_ids=IDS).logits, rtol=0, atol=1e-5)
    assert (merged - LlamaForCausalLM.from_pretrained(folder)(input_ids=IDS).logits).abs().max() > 0.1


@pytest.mark.parametrize("layer", ["lm_head", "embed_tokens"])
def test_an_adapter_of_an_untied_head_or_embedding_is_merged(untied_folder: Path, tmp_path: Path, layer: str) -> None:
    given = foreign(untied_folder, tmp_path / "adapter", target_modules=[layer])(input_ids=IDS).logits
    merge_adapter(untied_folder, tmp_path / "adapter", tmp_path / "merged")
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged")(input_ids=IDS).logits
    torch.testing.assert_close(merged, given, rtol=0, atol=1e-5)


RESIZED: dict[str, dict[str, Any]] = {
    "brought": {},
    "trained": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "adapted": {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "new tokens": {"trainable_token_indices": [3, 30]},
}


@pytest.mark.parametrize("rows", [40, 20])
@pytest.mark.parametrize("settings", RESIZED.values(), ids=RESIZED.keys())
def test_an_adapter_of_a_resized_model_brings_its_rows(
    untied_folder: Path, tmp_path: Path, settings: dict[str, Any], rows: int
) -> None:
    if rows == 20 and "trainable_token_indices" in settings:
        settings = {"trainable_token_indices": [3, 4]}
    given = foreign(untied_folder, tmp_path / "adapter", rows, **settings)(input_ids=IDS).logits
    merge_adapter(untied_folder, tmp_path / "adapter", tmp_path / "merged")
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.vocab_size == merged.lm_head.out_features == rows
    torch.testing.assert_close(merged(input_ids=IDS).logits, given, rtol=0, atol=1e-5)


def without_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if "lm_head" not in name}


def with_a_shorter_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor[:-1].clone() if "lm_head" in name else tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("change", [dict, without_head])
def test_a_resized_model_with_tied_embeddings_stays_tied(model_folder: Path, tmp_path: Path, change: Any) -> None:
    given = foreign(model_folder, tmp_path / "adapter", 40)(input_ids=IDS).logits
    path = tmp_path / "adapter" / ADAPTER_WEIGHTS
    save_file(change(load_file(path)), path)
    merge_adapter(model_folder, tmp_path / "adapter", tmp_path / "merged")
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    torch.testing.assert_close(merged(input_ids=IDS).logits, given, rtol=0, atol=1e-5)


@pytest.mark.parametrize("change", [without_head, with_a_shorter_head])
def test_an_adapter_that_does_not_bring_both_resized_ends_is_refused(
    untied_folder: Path, tmp_path: Path, change: Any
) -> None:
    foreign(untied_folder, tmp_path / "adapter", 40)
    path = tmp_path / "adapter" / ADAPTER_WEIGHTS
    save_file(change(load_file(path)), path)
    with pytest.raises(StageError, match=r"resized from 31 rows to 40, but .* save_embedding_layers=True"):
        merge_adapter(untied_folder, tmp_path / "adapter", tmp_path / "merged")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["lm_head"]}, "an adapter of the output head or the embedding cannot be merged where"),
        ({"target_modules": ["embed_tokens"]}, "would compute other logits than the adapter does"),
        ({"lora_bias": True}, "cannot be merged .*the base layer has no bias"),
        ({"alora_invocation_tokens": [4]}, "it uses alora_invocation_tokens, which cannot be merged"),
    ],
    ids=["tied head", "tied embedding", "bias without one", "activated"],
)
def test_an_adapter_that_no_weights_can_hold_is_refused(
    model_folder: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    foreign(model_folder, tmp_path / "adapter", **settings)
    with pytest.raises(StageError, match=message):
        merge_adapter(model_folder, tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "VERA"}, "its peft_type is VERA, and only LORA can be merged"),
        ({"task_type": "SEQ_2_SEQ_LM"}, "its task_type is SEQ_2_SEQ_LM"),
        ({"init_lora_weights": "loftq"}, r"init_lora_weights='loftq'"),
        ({"of_a_later_peft": {"x": 1}, "arrow_config": None}, "it uses of_a_later_peft, which cannot be merged"),
    ],
    ids=["vera", "task", "loftq", "unknown"],
)
def test_settings_of_an_adapter_that_are_not_merged_are_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / ADAPTER_WEIGHTS).touch()
    (problem,) = adapter_problems(tmp_path, {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, **changes})
    assert re.search(message, problem)
