"""LoRA adapters on a model."""

from __future__ import annotations

from typing import Any

import peft
import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

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
