"""The weights of a model as its folder has them: their names, their shapes, and what they are converted from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
import transformers
from torch import Tensor, nn

from rlhf_core.models.adapters import adapter_state, is_adapted
from rlhf_core.models.sharded_loading import full_shape


def stored_state(model: nn.Module, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state_dict` under the names, and in the shapes, that a folder of `model` has; of a PeftModel the adapter's.

    In memory transformers stacks all experts of a layer in one tensor; on disk, where engines look, each has its own.
    The tensors may be views of the given ones.
    """
    if is_adapted(model):
        return adapter_state(model, dict(state_dict))
    from transformers.core_model_loading import revert_weight_conversion

    assert isinstance(model, transformers.PreTrainedModel)
    stored: dict[str, Tensor] = revert_weight_conversion(model, dict(state_dict))
    return stored


def stored_groups(model: nn.Module, names: Iterable[str]) -> list[list[str]]:
    """`names` of weights in memory, those together that `stored_state` needs at once to convert one of them.

    Nearly always one by one. An adapter is one group: it is small, and peft converts it whole.
    """
    if is_adapted(model):
        return [list(names)]
    from transformers import core_model_loading as conversion

    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        # A model that was not loaded from a folder: transformers derives its conversions from all weights together.
        return [list(names)]
    reverse = [each.reverse_transform() for each in reversed(conversions)]
    renamings = [each for each in reverse if isinstance(each, conversion.WeightRenaming)]
    converters = [each for each in reverse if isinstance(each, conversion.WeightConverter)]
    groups = defaultdict(list)
    for name in names:
        stored, _ = conversion.rename_source_key(name, renamings, converters, reverse=True)
        groups[stored].append(name)
    return [*groups.values()]


def saved_weights(model: nn.Module) -> dict[str, Tensor]:
    """The live tensors that a folder of `model` is made of, by their names in memory; tied ones once.

    Parameters and the buffers of the state dict; of a PeftModel what is trained. They may be sharded.
    """
    if is_adapted(model):
        return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    kept = set(model.state_dict(keep_vars=True)) - set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in kept)
    return {**{name: p for name, p in model.named_parameters() if name in kept}, **dict(buffers)}


def stored_layout(model: nn.Module) -> dict[str, Tensor]:
    """Name, shape and dtype of each tensor of a folder of `model`, and whether it is trained, as tensors without
    memory.
    """
    empty = {
        name: torch.empty(full_shape(tensor), dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)
        for name, tensor in saved_weights(model).items()
    }
    return {
        stored: tensor
        for names in stored_groups(model, empty)
        for stored, tensor in stored_state(model, {name: empty[name] for name in names}).items()
    }
