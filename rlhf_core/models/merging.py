"""An adapter folded into the weights of its base."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

from rlhf_core.errors import StageError
from rlhf_core.models.folder import copy_tokenizer, stored_dtype
from rlhf_core.models.loading import torch_dtype


def merge_adapter(model_folder: Path, adapter_folder: Path, out_folder: Path) -> None:
    """Write the model of `model_folder` with the adapter folded into its weights; a complete model folder.

    The sum is taken in float32 and stored in the base model's dtype. An adapter of a scalar model brings its head.
    Raises StageError if the adapter's tensors do not fit the model.
    """
    from peft import PeftModel

    settings = json.loads((adapter_folder / "adapter_config.json").read_text(encoding="utf-8"))
    dtype = torch_dtype(stored_dtype(model_folder))
    options = {"dtype": torch.float32, "local_files_only": True, "use_safetensors": True}
    if settings.get("task_type") == "SEQ_CLS":
        base = transformers.AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1, **options)
    else:
        base = transformers.AutoModelForCausalLM.from_pretrained(model_folder, **options)
    try:
        adapted = PeftModel.from_pretrained(base, str(adapter_folder), use_safetensors=True)
    except (RuntimeError, ValueError) as error:
        raise StageError(f"the adapter does not fit the model it is merged into: {error}") from error
    merged = adapted.merge_and_unload(safe_merge=True)
    out_folder.mkdir(parents=True, exist_ok=True)
    merged.to(dtype).save_pretrained(out_folder)
    copy_tokenizer(model_folder, out_folder)
