"""An adapter folded into the weights of its base."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from rlhf_core.errors import StageError
from rlhf_core.models.adapters import load_adapter
from rlhf_core.models.folder import copy_tokenizer, stored_dtype
from rlhf_core.models.headers import read_object
from rlhf_core.models.loading import load_causal_model, load_scalar_model, torch_dtype, write_folder


def merged_tensors(
    model_folder: Path, adapter: Mapping[str, Tensor], scaling: float, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The weights of `model_folder` in `dtype`, the adapter folded in: W + scaling · B A, summed in float32.

    adapter: LoRA factors under the names of an adapter folder. The base is what a trainer in `dtype` computes with, so
    that a fresh adapter changes no bit. A head that is tied to the embedding is left out, as when a model is saved.
    Raises StageError if a factor belongs to no tensor of the folder.
    """
    deltas = _deltas(adapter, scaling)
    settings = read_object(model_folder / "config.json")
    merged: dict[str, Tensor] = {}
    for file in sorted(model_folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (safe_open is no mapping)
                if name == "lm_head.weight" and settings.get("tie_word_embeddings"):
                    continue
                weight = opened.get_tensor(name)
                if weight.is_floating_point():
                    weight = weight.to(dtype)
                if (delta := deltas.pop(name, None)) is not None:
                    if delta.shape != weight.shape:
                        raise StageError(f"the adapter's change of {name} is {tuple(delta.shape)}, the weight itself "
                                         f"{tuple(weight.shape)}")  # fmt: skip
                    weight = (weight.float() + delta).to(dtype)
                merged[name] = weight
    if deltas:
        raise StageError(
            f"the adapter changes {', '.join(sorted(deltas)[:3])}, which the model's folder does not have: "
            "set rollout.serve_adapter to adapter, or lora.target_modules to other layers"
        )
    return merged


def _deltas(adapter: Mapping[str, Tensor], scaling: float) -> dict[str, Tensor]:
    """What the adapter adds to each weight, by its name in the base model, in float32."""
    modules = {name.rpartition(".lora_")[0] for name in adapter}
    return {
        f"{module.removeprefix('base_model.model.')}.weight": scaling
        * (adapter[f"{module}.lora_B.weight"].float() @ adapter[f"{module}.lora_A.weight"].float())
        for module in sorted(modules)
    }


def merge_adapter(model_folder: Path, adapter_folder: Path, out_folder: Path) -> None:
    """Write the model of `model_folder` with the adapter folded into its weights; a complete model folder.

    The sum is taken in float32 and stored in the base model's dtype. An adapter of a scalar model brings its head.
    Raises StageError if the adapter's tensors do not fit the model, or the model's own weights are not whole.
    """
    dtype = torch_dtype(stored_dtype(model_folder))
    scalar = read_object(adapter_folder / "adapter_config.json").get("task_type") == "SEQ_CLS"
    load = load_scalar_model if scalar else load_causal_model
    # Nothing is computed with attention here, and every model has the eager one.
    adapted = load_adapter(load(model_folder, dtype=torch.float32, attention="eager"), adapter_folder)
    merged = adapted.merge_and_unload(safe_merge=True)
    out_folder.mkdir(parents=True, exist_ok=True)
    write_folder(merged.to(dtype), out_folder)
    copy_tokenizer(model_folder, out_folder)
