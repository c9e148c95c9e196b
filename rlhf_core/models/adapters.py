"""LoRA adapters: put one on a model, fold one into its base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from rlhf_core.config.training import LoraConfig
from rlhf_core.errors import StageError


def base_model(model: nn.Module) -> Any:
    """The transformers model itself, a PreTrainedModel: adapters are layers inside it, so running it runs them."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def add_lora(model: PreTrainedModel, lora: LoraConfig, task: str) -> PeftModel:
    """`model` frozen under a fresh LoRA adapter, arXiv:2106.09685. `task` is peft's: CAUSAL_LM or SEQ_CLS.

    A scalar model's head is trained in full and saved with the adapter. Raises StageError if no module matches.
    """
    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft takes any number
        lora_dropout=lora.dropout,
        target_modules=targets,
        task_type=task,
    )
    try:
        # The engine decides the dtype of the working copy; its fp32 master weights are the optimizer's.
        return peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        names = sorted({name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise StageError(
            f"lora.target_modules {targets}: {error}; linear modules here are {', '.join(names)}"
        ) from error


def adapter_state(model: PeftModel, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapter's share of a PeftModel's `state_dict`, with the names of an adapter folder."""
    chosen: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(
        model, state_dict=state_dict, save_embedding_layers=False
    )
    return chosen


def merge_adapter(model_folder: Path, adapter_folder: Path, out_folder: Path) -> None:
    """Write the model of `model_folder` with the adapter folded into its weights; a complete model folder.

    The sum is taken in float32 and stored in the base model's dtype. An adapter of a scalar model brings its head.
    Raises StageError if the adapter's tensors do not fit the model.
    """
    settings = json.loads((adapter_folder / "adapter_config.json").read_text(encoding="utf-8"))
    stored = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    dtype = getattr(torch, stored.get("dtype") or stored.get("torch_dtype") or "float32")
    options = {"dtype": torch.float32, "local_files_only": True, "use_safetensors": True}
    if settings.get("task_type") == "SEQ_CLS":
        base = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1, **options)
    else:
        base = AutoModelForCausalLM.from_pretrained(model_folder, **options)
    try:
        adapted = PeftModel.from_pretrained(base, str(adapter_folder), use_safetensors=True)
    except (RuntimeError, ValueError) as error:
        raise StageError(f"the adapter does not fit the model it is merged into: {error}") from error
    merged = adapted.merge_and_unload(safe_merge=True)
    out_folder.mkdir(parents=True, exist_ok=True)
    merged.to(dtype).save_pretrained(out_folder)
    _copy_missing_files(model_folder, out_folder)


def _copy_missing_files(source: Path, folder: Path) -> None:
    """The tokenizer and whatever else the base carries, weights excepted."""
    for path in source.iterdir():
        is_weights = path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")
        if path.is_file() and not is_weights and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
