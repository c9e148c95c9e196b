"""A frozen base in 4 bits under an adapter, QLoRA: NF4 in blocks of 64, arXiv:2305.14314, section 3.

The folder of such a base holds the values that its 4 bits stand for, in the trainer's dtype, made once by
`write_rounded`. Engines, merges and references read it as any other model; the trainer packs its layers, which changes
no value. bitsandbytes takes seconds to import, and is imported lazily.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.config.base import Dtype
from rlhf_core.errors import StageError
from rlhf_core.models.folders.folder import GENERATION_CONFIG, copy_tokenizer, read_config, update_json
from rlhf_core.models.folders.headers import WEIGHTS_INDEX, stored_tensors
from rlhf_core.models.folders.targets import quantised_problem
from rlhf_core.models.safetensors_file import read_layout, read_safetensors, write_safetensors
from rlhf_core.models.weights import require_fit

_BLOCK = 64  # weights that share one factor


def rounded(weight: Tensor) -> Tensor:
    """Return `weight` with the values of its NF4 quantisation, in its dtype; of a rounded one the same bits."""
    from bitsandbytes import functional

    packed, state = functional.quantize_4bit(
        weight.contiguous(), blocksize=_BLOCK, compress_statistics=False, quant_type="nf4"
    )
    values: Tensor = functional.dequantize_4bit(packed, state)
    return values


def write_rounded(folder: Path, out_folder: Path, dtype: Dtype) -> None:
    """Write the model of `folder` with its quantised layers rounded, in `dtype`; one tensor in memory at a time.

    Raises StageError for a model that cannot be quantised.
    """
    names = {f"{layer}.weight" for layer in _linear_layers(folder)[0]}
    kind = getattr(torch, dtype)
    layout, files = read_layout(folder, kind), defaultdict[Path, dict[str, Tensor]](dict)
    for name, tensor in stored_tensors(folder).items():
        files[out_folder / tensor.file][name] = layout[name]
    out_folder.mkdir(parents=True, exist_ok=True)
    weights = ((name, weight.to(layout[name].dtype)) for name, weight in read_safetensors(folder))
    write_safetensors(files, ((name, rounded(w) if name in names else w) for name, w in weights))
    for name in ("config.json", GENERATION_CONFIG, WEIGHTS_INDEX):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out_folder / name)
    update_json(out_folder / "config.json", dtype=dtype)
    copy_tokenizer(folder, out_folder)


def _linear_layers(folder: Path) -> tuple[list[str], list[str]]:
    """Return the paths of the linear layers that are quantised, and of the output head, which is not.

    Raises StageError for a model that cannot be quantised.
    """
    if (problem := quantised_problem(read_config(folder))) is not None:
        raise StageError(f"{folder}: {problem}")
    model: Any = require_fit(folder, "causal")
    head = model.get_output_embeddings()
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    return [n for n, layer in linear.items() if layer is not head], [n for n, layer in linear.items() if layer is head]


def quantised_loading(folder: Path, dtype: torch.dtype) -> Mapping[str, Any]:
    """Return the options of transformers' `from_pretrained` that quantise the model in `folder` as it is read."""
    from transformers import BitsAndBytesConfig

    _, heads = _linear_layers(folder)
    settings: Any = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=[*heads, "score"],
    )  # fmt: skip
    # On the CPU, whose bits then move to the device: a GPU's kernel may round a value in the middle otherwise.
    return {"quantization_config": settings, "device_map": {"": "cpu"}}


def require_same_values(model: nn.Module, folder: Path) -> None:
    """Raise StageError unless the quantised layers of `model` compute with the very weights in `folder`.

    Also keeps bitsandbytes from packing them otherwise: on CPUs with AVX512-BF16 a layer in eval mode would replace its
    weight, and compute in bfloat16 from then on.
    """
    from bitsandbytes.nn import Linear4bit

    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear4bit)}
    for layer in layers.values():
        layer.support_avx512bf16_for_cpu = False
    for name, stored in read_safetensors(folder):
        layer = layers.get(name.removesuffix(".weight"))
        if layer is None:
            continue
        del layers[name.removesuffix(".weight")]
        weight = stored.to(layer.weight.quant_state.dtype)
        if not torch.equal(_values(layer), weight) or not _computes_with(layer, weight):
            raise StageError(
                f"{folder}: {name} differs from the dequantised weight of its layer, so engines and merges would "
                "have other weights than the trainer: train on the result of a stage `quantise`"
            )
    if layers:
        raise StageError(
            f"{folder}: {min(layers)} was quantised, and has no weight in this folder: remove lora.quantised"
        )


def _values(layer: Any) -> Tensor:
    from bitsandbytes import functional

    values: Tensor = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return values


@torch.no_grad()
def _computes_with(layer: Any, weight: Tensor) -> bool:
    """Return whether the layer in eval mode multiplies two inputs by `weight` to the bit."""
    inputs = torch.randn(2, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    training = layer.training
    outputs = layer.eval()(inputs)
    layer.train(training)
    return torch.equal(outputs, nn.functional.linear(inputs, weight, layer.bias))
