"""LoRA adapters on a model.

peft takes seconds to import, and so do the classes of models, which `transformers` imports at their first use. A job's
driver names the classes of its ranks and loads no model, so both are imported lazily.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn

from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.errors import StageError, reason_of
from rlhf_core.models.folders.folder import ADAPTER_WEIGHTS
from rlhf_core.models.folders.targets import saved_modules, saved_problem, target_problem
from rlhf_core.models.folders.vision_models import vision_parts
from rlhf_core.models.sharded_loading import full_shape

if TYPE_CHECKING:
    from peft import PeftModel


_INSIDE = re.compile(r"\.(token_adapter\.)?base_layer\.")  # where peft keeps a layer that it adapts


def is_adapted(model: object) -> TypeGuard[PeftModel]:
    """Return whether `model` has adapters."""
    from peft import PeftModel

    return isinstance(model, PeftModel)


def base_model(model: nn.Module) -> Any:
    """Return the transformers model itself, a PreTrainedModel: adapters are layers inside it, so running it runs
    them.
    """
    return model.get_base_model() if is_adapted(model) else model


def add_lora(model: transformers.PreTrainedModel, lora: LoraConfig, task: str) -> PeftModel:
    """Freeze `model` and add a fresh LoRA adapter, arXiv:2106.09685. `task` is peft's: CAUSAL_LM or SEQ_CLS.

    A scalar model's head is trained in full and saved with the adapter. Raises StageError if no module matches, or if
    the adapter would change stacked experts: engines do not serve that, and it cannot be written per expert.
    """
    import peft

    targets: str | list[str] = list(lora.target_modules)
    layers, linear = adapted_layers(model), _linear_layers(model)
    paths = [name for name, _ in model.named_modules()]
    if problem := saved_problem(lora, paths, tied=bool(model.config.tie_word_embeddings)):
        raise StageError(problem)
    if lora.target_modules == "all-linear":
        # By itself peft would take the experts and their router too, which are no linear layers.
        targets = layers if _expert_blocks(model) else lora.target_modules
    config = peft.LoraConfig(
        exclude_modules=_beside_the_text(model),
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft takes any number
        lora_dropout=lora.dropout,
        use_dora=lora.dora,
        use_rslora=lora.rank_stabilised,
        modules_to_save=saved_modules(lora, paths) or None,
        target_modules=targets,
        task_type=task,
    )
    try:
        # The engine decides the dtype of the working copy; its fp32 master weights are the optimizer's.
        adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        # Missing targets among experts, which are no linear layers, are only reported by peft.
        problem = None if _expert_blocks(model) else _target_problem(model, lora, linear)
        raise StageError(problem or f"lora.target_modules {targets}: {reason_of(error)}") from error
    settings: Any = adapted.peft_config["default"]
    if stacked := settings.target_parameters:
        raise StageError(
            f"lora.target_modules {targets} would adapt the experts of {type(model).__name__} or their router "
            f"({', '.join(sorted(stacked))}), which the rollout engines cannot serve; name other layers, such as "
            f"{', '.join(layers)}, or train all weights"
        )
    if problem := _target_problem(model, lora, linear):
        raise StageError(problem)
    return adapted


def _target_problem(model: transformers.PreTrainedModel, lora: LoraConfig, linear: Collection[str]) -> str | None:
    """Return the problem of `target_modules`. linear: the paths of all linear layers, before adapters are added."""
    return target_problem(lora, linear, tied=bool(model.config.tie_word_embeddings))


def adapted_layers(model: transformers.PreTrainedModel) -> list[str]:
    """Return the names of the layers that `all-linear` adapts: linear layers except the output head, and except all of
    a mixture-of-experts block, whose shared experts have the same names as the stacked ones.
    """
    blocks, head = _expert_blocks(model), model.get_output_embeddings()
    beside = [f"{part}." for part in vision_parts(model.config.to_dict())]
    return sorted(
        {
            name.rpartition(".")[2]
            for name, layer in _linear_layers(model).items()
            if layer is not head and not name.startswith((*blocks, *beside))
        }
    )


def _beside_the_text(model: transformers.PreTrainedModel) -> str | None:
    """Return the pattern of the layers that no adapter changes: it changes the text model alone, whose layers have the
    names of the vision encoder's. None: the model reads text alone.
    """
    parts = vision_parts(model.config.to_dict())
    return rf"({'|'.join(map(re.escape, parts))})\..*" if parts else None


def _linear_layers(model: transformers.PreTrainedModel) -> dict[str, nn.Module]:
    """Return the linear layers by path, without the head of a scalar model, which is trained in full."""
    from transformers.pytorch_utils import Conv1D

    score = getattr(model, "score", None)
    modules = model.named_modules()
    return {name: layer for name, layer in modules if isinstance(layer, nn.Linear | Conv1D) and layer is not score}


def _expert_blocks(model: transformers.PreTrainedModel) -> tuple[str, ...]:
    """Return the prefixes of the blocks whose experts are stacked in tensors (experts, out, in)."""
    stacks = [
        name
        for name, layer in model.named_modules()
        if not isinstance(layer, nn.Conv1d) and any(len(full_shape(p)) == 3 for p in layer.parameters(recurse=False))
    ]
    return tuple(sorted({f"{name.rpartition('.')[0]}." for name in stacks}))


def load_adapter(model: Any, folder: Path, **options: Any) -> PeftModel:
    """Load the adapter in `folder` onto `model`, a PreTrainedModel. options: of peft's `from_pretrained`.

    Raises StageError for tensors of the adapter that are missing, unexpected or misshapen: peft leaves the first as
    initialised, and ignores the second.
    """
    from peft import PeftModel, get_peft_model_state_dict

    stored = adapter_shapes(folder)
    try:
        brought = _brought_embeddings(model, stored)
        _resize(model, {end: stored[name][0] for name, end in brought.items()}, folder)
        adapted = PeftModel.from_pretrained(model, str(folder), use_safetensors=True, **options)
    except (OSError, KeyError, TypeError, RuntimeError, ValueError, SafetensorError) as error:
        raise _unfit(folder, error) from error
    adapter, with_ends = (
        {n: tuple(t.shape) for n, t in get_peft_model_state_dict(adapted, save_embedding_layers=ends).items()}
        for ends in (False, bool(brought))
    )
    expected = adapter | {name: shape for name, shape in with_ends.items() if name in stored}
    wrong = sorted(name for name in {*stored, *expected} if stored.get(name) != expected.get(name))
    if wrong:
        name = wrong[0]
        others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise StageError(
            f"{folder}: this adapter does not fit the model that it is put on: {name}{others} is "
            f"{stored.get(name, 'absent')} in {ADAPTER_WEIGHTS} and {expected.get(name, 'absent')} in the model"
        )
    return adapted


def adapter_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of the adapter in `folder`. Raises StageError if its file cannot be read."""
    try:
        with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _unfit(folder, error) from error


def _unfit(folder: Path, error: Exception) -> StageError:
    return StageError(f"{folder}: this adapter does not fit the model that it is put on ({reason_of(error)})")


def _brought_embeddings(model: Any, names: Iterable[str]) -> dict[str, nn.Module]:
    """Return the embedding and the head that the adapter contains in full, by their names in it.

    peft saves them if they were resized or trained, or with the factors that change them.
    """
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    weights = {f"{name}.weight": module for name, module in model.named_modules() if any(module is e for e in ends)}
    plain = {name: _INSIDE.sub(".", name.removeprefix("base_model.model.")) for name in names}
    return {name: weights[shown] for name, shown in plain.items() if shown in weights}


def _resize(model: Any, rows: Mapping[nn.Module, int], folder: Path) -> None:
    """Resize `model` to the rows of an adapter that was made after `resize_token_embeddings`, which contains them all.

    rows: of the embedding and the head in the adapter.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    before = embedding.num_embeddings
    if set(rows.values()) <= {before}:
        return
    tied = head is not None and head.weight is embedding.weight
    brings_all = tied or all(end is None or end in rows for end in (embedding, head))
    if len({*rows.values()}) > 1 or not brings_all:
        raise StageError(
            f"{folder}: its embedding was resized from {before} rows to {max(rows.values())}, "
            "but it does not bring embedding and output head: save it again with save_embedding_layers=True"
        )
    model.resize_token_embeddings(max(rows.values()), mean_resizing=False)


def adapter_state(model: PeftModel, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the adapter's share of a PeftModel's `state_dict`, with the names of an adapter folder."""
    import peft

    chosen: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(
        model, state_dict=state_dict, save_embedding_layers=False
    )
    return chosen


def share_base(model: PeftModel, other: PeftModel) -> None:
    """Make `model` share the Parameters of `other` as frozen weights below the head, so that they are in memory once.

    Both are adapters of one base model, whose head may differ. Adapters, heads, buffers and modules stay separate:
    disabling one model's adapter does not change the other. Raises StageError if the weights do not fit.
    """
    weights_of_model, weights_of_other = _frozen_weights(model), _frozen_weights(other)
    for name in sorted({*weights_of_model, *weights_of_other}):
        kinds = [
            _kind(weights[name].value) if name in weights else "absent"
            for weights in (weights_of_model, weights_of_other)
        ]
        if kinds[0] != kinds[1]:
            raise StageError(
                f"adapters cannot share their base: {name} is {kinds[0]} in one and {kinds[1]} in the other"
            )
    for name, weight in weights_of_model.items():
        weight.layer.register_parameter(weight.name, weights_of_other[name].value)


class _Weight(NamedTuple):
    layer: nn.Module
    name: str  # in the layer
    value: nn.Parameter


def _frozen_weights(model: PeftModel) -> dict[str, _Weight]:
    """Return the frozen weights below the head, by their names in the base model."""
    base = base_model(model)
    layers: nn.Module = getattr(base, base.base_model_prefix)
    return {
        f"{path}.{name}".replace(".base_layer.", ".").replace(".original_module.", "."): _Weight(layer, name, parameter)
        for path, layer in layers.named_modules()
        for name, parameter in layer.named_parameters(recurse=False)
        if not parameter.requires_grad
    }


def _kind(parameter: nn.Parameter) -> str:
    return f"{parameter.dtype} {tuple(full_shape(parameter))}"
