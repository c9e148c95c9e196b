"""Loading and saving of model folders. Weights are safetensors; nothing is unpickled or downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from rlhf_core.config.engines.training import GradientCheckpointing
from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.errors import StageError
from rlhf_core.models.activation_checkpointing import checkpoint_layers
from rlhf_core.models.adapters import add_lora, is_adapted, load_adapter
from rlhf_core.models.flex_attention import IMPLEMENTATION as FLEX
from rlhf_core.models.flex_attention import use_flex_attention
from rlhf_core.models.folders.folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    GENERATION_CONFIG,
    Head,
    copy_tokenizer,
    is_classifier,
    num_labels,
    read_config,
    update_json,
)
from rlhf_core.models.folders.headers import read_object
from rlhf_core.models.folders.readers import in_token_form
from rlhf_core.models.folders.vision_models import VISION_MODELS, reads_images
from rlhf_core.models.quantisation import quantised_loading, require_same_values
from rlhf_core.models.safetensors_file import without_memory, write_safetensors
from rlhf_core.models.sharded_loading import Sharding
from rlhf_core.models.weights import load_weights, require_fit

if TYPE_CHECKING:
    from peft import PeftModel

_MOST_OF_A_FILE = "50GB"  # transformers' own
_SETS = ("target_modules", "modules_to_save", "exclude_modules")  # of an adapter's config


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of EngineConfig.dtype."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def load_causal_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    attention: str,
    lora: LoraConfig | None = None,
    gradient_checkpointing: GradientCheckpointing = False,
    freeze_vision: bool = False,
    sharding: Sharding | None = None,
) -> transformers.PreTrainedModel | PeftModel:
    """Load the causal language model in `folder`; with `lora`, frozen under a fresh adapter (which starts as identity).

    freeze_vision: do not train the vision encoder; the folder's model must read images.
    sharding: divides the weights over the ranks as they are read; none: this rank loads all of them.

    Raises StageError if the weights in the folder are incomplete, or do not match its config.
    """
    model = _load(folder, "causal", lora, dtype=dtype, attention=attention, sharding=sharding)
    if freeze_vision:
        _freeze_vision(model, folder)
    return _prepare(model, folder, "CAUSAL_LM", lora, gradient_checkpointing)


def _freeze_vision(model: transformers.PreTrainedModel, folder: Path) -> None:
    if not reads_images(model.config.to_dict()):
        raise StageError(f"{folder}: engine.freeze_vision: this model reads text alone, remove it")
    parts = VISION_MODELS[model.config.model_type]
    for part in parts.all:
        model.get_submodule(part).requires_grad_(part != parts.encoder)  # a connector may be inside the encoder


def load_scalar_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    attention: str,
    lora: LoraConfig | None = None,
    gradient_checkpointing: GradientCheckpointing = False,
    seed: int = 0,
    head_factor: float = 1.0,
    freeze_vision: bool = False,
    sharding: Sharding | None = None,
) -> transformers.PreTrainedModel | PeftModel:
    """Load a model with one scalar output per token, AutoModelForSequenceClassification with one label.

    A folder of a causal model gives its backbone and a fresh head, drawn from N(0, 1 / (hidden size + 1)) with `seed`.
    head_factor: of the scores. freeze_vision: as for a causal model.
    sharding: divides the weights below the head over the ranks as they are read; none: this rank loads all of them.
    Raises StageError if the architecture has no `score` head, if the folder's head has several labels, or if the
    weights in the folder are incomplete, or do not match its config.
    """
    trained_head = _has_score_head(folder)
    model = _load(
        folder, "scalar", lora, dtype=dtype, attention=attention, new_head=not trained_head, sharding=sharding
    )
    head = _score_head(model)
    if not trained_head:
        _initialise_head(head, seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(head_factor)
    if freeze_vision:
        _freeze_vision(model, folder)
    return _prepare(model, folder, "SEQ_CLS", lora, gradient_checkpointing)


def require_scalar_fit(folder: Path) -> transformers.PreTrainedModel:
    """Return the scalar model of `folder`, its tensors on the meta device. Raises StageError as `load_scalar_model`."""
    model = require_fit(folder, "scalar", new_head=not _has_score_head(folder))
    _score_head(model)
    return model


def _has_score_head(folder: Path) -> bool:
    """Return True if the folder has a trained head. Raises StageError if it is that of no scalar model."""
    config = read_config(folder)
    if in_token_form(config):
        raise StageError(f"{folder}: this is a process reward model in token form, which has no score head")
    if is_classifier(config) and num_labels(config) != 1:
        raise StageError(f"{folder}: this classifier has several labels; a scalar model has one")
    return is_classifier(config)


def _score_head(model: nn.Module) -> nn.Linear:
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        raise StageError(f"{type(model).__name__} has no linear `score` head; scalar models of it are not supported")
    return head


def load_scalar_adapter(folder: Path, adapter: Path, *, dtype: torch.dtype, attention: str) -> PeftModel:
    """Load the scalar model of the causal model in `folder` with the adapter and head in the folder `adapter`."""
    model = load_scalar_model(folder, dtype=dtype, attention=attention)
    return load_adapter(model, adapter, is_trainable=True, autocast_adapter_dtype=False)


@torch.no_grad()
def _initialise_head(head: nn.Linear, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    std = (head.in_features + 1) ** -0.5
    head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * std)
    if head.bias is not None:
        head.bias.zero_()


def _load(
    folder: Path, head: Head, lora: LoraConfig | None, *, dtype: torch.dtype, attention: str, **options: Any
) -> transformers.PreTrainedModel:
    if lora is not None and lora.quantised is not None:
        options |= quantised_loading(folder, dtype)
    is_flex = attention == FLEX  # of ours, which transformers does not know yet
    model = load_weights(folder, head, dtype=dtype, attn_implementation="sdpa" if is_flex else attention, **options)
    if is_flex:
        use_flex_attention(model)
    return model


def _prepare(
    model: transformers.PreTrainedModel,
    folder: Path,
    task: str,
    lora: LoraConfig | None,
    checkpointing: GradientCheckpointing,
) -> transformers.PreTrainedModel | PeftModel:
    checkpoint_layers(model, checkpointing)
    if lora is None:
        return model
    if lora.quantised is not None:
        require_same_values(model, folder)
    adapted, dtype = add_lora(model, lora, task), model.dtype
    for parameter in adapted.parameters():
        if parameter.requires_grad:  # peft takes the dtype of a layer, which packed ones do not show
            parameter.data = parameter.data.to(dtype)
    return adapted


def save_model(
    model: nn.Module,
    layout: Mapping[str, Tensor],
    weights: Iterable[tuple[str, Tensor]],
    folder: Path,
    tokenizer_folder: Path | None,
) -> None:
    """Write `weights` (names and tensors as a folder has them, in any order) with the config of `model` to `folder`.

    A PeftModel gives an adapter folder, any other a transformers folder. The tokenizer's files are copied beside it.
    `model` itself may be sharded: only its config is read. layout: of the weights, shapes and dtypes by name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if is_adapted(model):
        _save_adapter_config(model, folder)
        write_safetensors({folder / ADAPTER_WEIGHTS: layout}, weights)
    else:
        assert isinstance(model, transformers.PreTrainedModel)
        write_folder(model, folder, state_dict={})
        _write_shards(layout, weights, folder)
    if tokenizer_folder is not None:
        copy_tokenizer(tokenizer_folder, folder)


def _write_shards(layout: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """In files of at most 50 GB, as transformers divides them, with its index if there are several."""
    empty = {name: without_memory(tensor) for name, tensor in layout.items()}
    split = split_torch_state_dict_into_shards(
        empty, filename_pattern="model{suffix}.safetensors", max_shard_size=_MOST_OF_A_FILE
    )
    files = split.filename_to_tensors.items()
    write_safetensors({folder / file: {name: empty[name] for name in names} for file, names in files}, weights)
    if split.is_sharded:
        metadata = {"total_parameters": sum(tensor.numel() for tensor in empty.values()), **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")


def write_folder(model: transformers.PreTrainedModel, folder: Path, **options: Any) -> None:
    """Run transformers' `save_pretrained`, keeping the generation config as it was read.

    Many models have one that transformers reads with a warning and refuses to write: a temperature without `do_sample`.
    options: of `save_pretrained`; with an empty `state_dict` nothing but the configs is written.
    """
    if not model.can_generate():
        model.save_pretrained(folder, **options)
        return
    holder: Any = model
    generation_config = holder.generation_config
    holder.generation_config = type(generation_config)()
    try:
        model.save_pretrained(folder, **options)
    finally:
        holder.generation_config = generation_config
    generation_config.to_json_file(folder / GENERATION_CONFIG, keys_to_pop=["compile_config"])


def _save_adapter_config(model: PeftModel, folder: Path) -> None:
    """Write the same bytes for the same adapter: peft writes sets in any order, and the base model's path on this
    node.
    """
    model.peft_config["default"].save_pretrained(str(folder))
    path = folder / ADAPTER_CONFIG
    stored = read_object(path)
    ordered = {name: sorted(stored[name]) for name in _SETS if isinstance(stored[name], list)}
    update_json(path, base_model_name_or_path=None, **ordered)
