"""An adapter folded into the weights of its base."""

from __future__ import annotations

from pathlib import Path

import torch

from rlhf_core.models.adapters import load_adapter
from rlhf_core.models.folder import copy_tokenizer, stored_dtype
from rlhf_core.models.headers import read_object
from rlhf_core.models.loading import load_causal_model, load_scalar_model, torch_dtype


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
    merged.to(dtype).save_pretrained(out_folder)
    copy_tokenizer(model_folder, out_folder)
