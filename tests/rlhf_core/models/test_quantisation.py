"""A quantised base: the trainer, a folder, merges and engines have the same values."""

from __future__ import annotations

from pathlib import Path

import bitsandbytes
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.config.base import Dtype
from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.errors import StageError
from rlhf_core.models.folders.targets import quantised_problem
from rlhf_core.models.loading import load_causal_model, load_scalar_model, torch_dtype
from rlhf_core.models.merging import MergedWeights, merge_adapter
from rlhf_core.models.quantisation import rounded, write_rounded
from tests.rlhf_core.models.saved import save_state

pytestmark = pytest.mark.parts

IDS = torch.tensor([[3, 1, 4, 1, 5]])
QLORA = LoraConfig(rank=2, alpha=3.0, quantised="nf4")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=23, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            tie_word_embeddings=True, initializer_range=0.3, attention_bias=True,
        )
    ).save_pretrained(folder)  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def folder(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rounded")
    write_rounded(original, folder, "float32")
    return folder


def loaded(folder: Path, lora: LoraConfig | None = None, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return load_causal_model(folder, dtype=dtype, attention="sdpa", lora=lora)


def trained_a_little(model: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            values = 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.data = values.to(parameter.dtype)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rounded_weight_has_sixteen_values_a_block_and_stays_as_it_is(dtype: torch.dtype) -> None:
    weight = torch.randn(5, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[0, :64] = 0
    values = rounded(weight)
    assert (values.dtype, values.shape) == (dtype, weight.shape)
    assert len(values.flatten()[64:128].unique()) <= 16
    assert values.flatten()[64:128].abs().max() == weight.flatten()[64:128].abs().max()
    assert not values[0, :64].any()
    assert not torch.equal(values, weight)
    assert torch.equal(rounded(values), values)


def test_the_linear_layers_alone_are_rounded(original: Path, folder: Path) -> None:
    before, after = load_file(original / "model.safetensors"), load_file(folder / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys()
    assert changed == {name for name in before if name.endswith("_proj.weight")}
    assert len(changed) == 2 * 7


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_trainer_computes_with_the_values_of_the_folder(original: Path, tmp_path: Path, dtype: Dtype) -> None:
    write_rounded(original, tmp_path, dtype)
    plain = trained_a_little(loaded(tmp_path, QLORA.model_copy(update={"quantised": None}), torch_dtype(dtype)))
    packed = trained_a_little(loaded(tmp_path, QLORA, torch_dtype(dtype)))
    layers = [layer for layer in packed.modules() if isinstance(layer, Linear4bit)]
    assert len(layers) == 2 * 7
    assert {layer.weight.dtype for layer in layers} == {torch.uint8}
    outputs = [model(input_ids=IDS).logits for model in (plain, packed)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.float().square().sum().backward()
    gradients = [{n: p.grad for n, p in m.named_parameters() if p.requires_grad} for m in (plain, packed)]
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
    with torch.no_grad():
        assert torch.equal(*[model.eval()(input_ids=IDS).logits for model in (plain, packed)])


def test_no_layer_is_packed_in_place_on_a_cpu_that_could(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: True)
    plain, packed = (loaded(folder, lora).eval() for lora in (None, QLORA))
    with torch.no_grad():
        for _ in range(2):  # a layer that is packed computes otherwise from then on
            assert torch.equal(plain(input_ids=IDS).logits, packed(input_ids=IDS).logits)


def test_a_base_that_is_not_rounded_is_refused(original: Path, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"_proj\.weight differs from the dequantised weight of its layer,"):
        loaded(original, QLORA)
    write_rounded(original, tmp_path, "bfloat16")
    with pytest.raises(StageError, match="differs from the dequantised weight of its layer"):
        loaded(tmp_path, QLORA)  # of another dtype than its training


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"num_experts_per_tok": 2}, "most weights of this model are in stacked experts, which are not quantised"),
     ({"model_type": "idefics3", "vision_config": {}}, "models that read images are not quantised here; remove it")],
)  # fmt: skip
def test_models_that_are_not_quantised(settings: dict[str, object], says: str) -> None:
    assert (quantised_problem(settings) or "").startswith(says)
    assert quantised_problem({"model_type": "llama"}) is None


@pytest.mark.parametrize("kind", [{}, {"dora": True}], ids=str)
def test_an_adapter_is_merged_into_the_dequantised_weights(folder: Path, tmp_path: Path, kind: dict[str, bool]) -> None:
    lora = QLORA.model_copy(update=kind)
    adapted = trained_a_little(loaded(folder, lora)).eval()
    assert isinstance(adapted, PeftModel)
    save_state(adapted, get_peft_model_state_dict(adapted), tmp_path / "adapter", None)
    merge_adapter(folder, tmp_path / "adapter", tmp_path / "merged")
    expected = adapted(input_ids=IDS).logits
    torch.testing.assert_close(loaded(tmp_path / "merged")(input_ids=IDS).logits, expected, rtol=0, atol=2e-5)
    published = dict(MergedWeights(folder, get_peft_model_state_dict(adapted), lora.scaling, torch.float32))
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert published.keys() == merged.keys()
    for name, weight in merged.items():
        torch.testing.assert_close(published[name], weight, rtol=1e-6, atol=1e-6)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(rounded(merged[name]), merged[name])  # the sum is not quantised again


def test_a_scalar_model_has_a_quantised_base_and_a_plain_head(folder: Path) -> None:
    plain, packed = (
        load_scalar_model(folder, dtype=torch.float32, attention="sdpa", lora=lora) for lora in (None, QLORA)
    )
    assert torch.equal(plain(input_ids=IDS).logits, packed(input_ids=IDS).logits)
    assert packed.get_base_model().score.weight.dtype == torch.float32
