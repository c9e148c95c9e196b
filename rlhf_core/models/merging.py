"""Merging of an adapter into the weights of its base."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from rlhf_core.errors import StageError, reason_of
from rlhf_core.models.adapters import adapter_shapes, load_adapter
from rlhf_core.models.folders.adapter_check import adapter_problems, has_plain_factors, scaling_of
from rlhf_core.models.folders.folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, copy_tokenizer, stored_dtype
from rlhf_core.models.folders.headers import read_object
from rlhf_core.models.loading import (
    load_causal_model,
    load_scalar_model,
    require_scalar_fit,
    save_model,
    torch_dtype,
    write_folder,
)
from rlhf_core.models.safetensors_file import read_layout, read_safetensors
from rlhf_core.models.stored import stored_layout
from rlhf_core.models.weights import require_fit

_PREFIX = "base_model.model."  # of names in an adapter folder
_NORMS = ".lora_magnitude_vector"
_PROBE_TOKENS = 16
_ROUNDING = 1e-3  # of float32, through all layers


class MergedWeights:
    """The weights of a model's folder with an adapter merged: W + scaling · B A, summed in float32.

    With DoRA (arXiv:2402.09353, eq. 5) each row of the sum is scaled to its trained norm. A module that was trained in
    full replaces that of the folder. The base is the one a trainer in `dtype` computes with, so that a fresh adapter
    changes no bit. A head that is tied to the embedding is left out, as when a model is saved.
    """

    def __init__(
        self,
        model_folder: Path,
        adapter: Mapping[str, Tensor],
        scaling: float,
        dtype: torch.dtype,
        layout: Mapping[str, Tensor] | None = None,
    ) -> None:
        """adapter: its tensors under the names of an adapter folder. layout: of the merged model, whose tensors the
        folder or the adapter has; none: that of the folder.

        Raises StageError if a tensor belongs to no tensor of the folder, or is of another shape.
        """
        self._folder, self._scaling, self._dtype = model_folder, scaling, dtype
        self._factors, self._norms, self._saved = _factors(adapter), _norms(adapter), _saved(adapter)
        self.layout = merged_layout(model_folder, dtype) if layout is None else dict(layout)
        shapes = {name: torch.Size((b.shape[0], a.shape[1])) for name, (a, b) in self._factors.items()}
        shapes |= {name: tensor.shape for name, tensor in self._saved.items()}
        if unknown := shapes.keys() - self.layout.keys():
            raise StageError(
                f"the adapter changes {', '.join(sorted(unknown)[:3])}, which the model's folder does not have: "
                "set rollout.serve_adapter to adapter, or lora.target_modules to other layers"
            )
        for name, shape in shapes.items():
            if shape != self.layout[name].shape:
                raise StageError(f"the adapter's change of {name} is {tuple(shape)}, the weight itself "
                                 f"{tuple(self.layout[name].shape)}")  # fmt: skip

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        saved = dict(self._saved)
        for name, weight in read_safetensors(self._folder):
            if name not in self.layout:  # a head that is tied, or that the merged model has not
                continue
            yield name, self._merged(name, saved.pop(name, weight).to(self.layout[name].dtype))
        for name, weight in saved.items():  # what the folder lacks
            yield name, weight.to(self.layout[name].dtype)

    def _merged(self, name: str, base: Tensor) -> Tensor:
        factors, norms = self._factors.get(name), self._norms.get(name)
        if factors is None:
            return base
        merged = base.float() + self._scaling * (factors[1].float() @ factors[0].float())
        if norms is not None:
            # Rounded as peft does: the norms of a fresh adapter are those of the rows to the bit.
            present = torch.linalg.norm(merged.to(norms.dtype), dim=1)
            merged *= (norms / present).float().unsqueeze(1)
        return merged.to(self._dtype)


def merged_layout(model_folder: Path, dtype: torch.dtype, adapter: Collection[str] = ()) -> dict[str, Tensor]:
    """Return a model's merged weights as tensors without memory, by name; those that `adapter` changes need gradients.

    adapter: names of its tensors.
    """
    layout = read_layout(model_folder, dtype)
    for name in layout.keys() & _changed(adapter):
        layout[name].requires_grad_()
    if read_object(model_folder / "config.json").get("tie_word_embeddings"):
        layout.pop("lm_head.weight", None)
    return layout


def _factors(adapter: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A (rank, in) and B (out, rank) of each weight that has them, by its name in the base model."""
    return {
        f"{module.removeprefix(_PREFIX)}.weight": (
            adapter[f"{module}.lora_A.weight"],
            adapter[f"{module}.lora_B.weight"],
        )
        for module in sorted(_adapted(adapter))
    }


def _adapted(adapter: Iterable[str]) -> set[str]:
    """Return the modules that have LoRA factors, by the names of the adapter's tensors."""
    return {name.rpartition(".lora_")[0] for name in adapter if ".lora_" in name}


def _changed(adapter: Collection[str]) -> set[str]:
    """Return the weights of the base model that an adapter changes, by the names of its tensors."""
    names = [*(f"{module}.weight" for module in _adapted(adapter)), *(name for name in adapter if ".lora_" not in name)]
    return {name.removeprefix(_PREFIX) for name in names}


def _norms(adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the rows' norms that DoRA has trained, by the name of the weight in the base model."""
    return {
        f"{name.removeprefix(_PREFIX).removesuffix(_NORMS)}.weight": tensor
        for name, tensor in adapter.items()
        if name.endswith(_NORMS)
    }


def _saved(adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of modules trained in full, by name in the base model."""
    return {name.removeprefix(_PREFIX): tensor for name, tensor in adapter.items() if ".lora_" not in name}


def merge_adapter(model_folder: Path, adapter_folder: Path, out_folder: Path) -> None:
    """Write the model of `model_folder` with the adapter merged into its weights; a complete model folder.

    The sum is taken in float32 and stored in the base model's dtype. An adapter of a scalar model contains its head.
    The tokenizer is the adapter's, if its folder has one: its chat template may differ from the base's.
    Factors of linear layers are merged one tensor at a time; an adapter of the embedding or of a causal model's head by
    peft, with the whole model in memory in float32.
    Raises StageError if the adapter is of a kind that cannot be merged, its tensors do not fit the model, the model's
    own weights are incomplete, or the merged model does not compute the same as the adapted one.
    """
    config = read_object(adapter_folder / ADAPTER_CONFIG)
    for problem in adapter_problems(adapter_folder, config):
        raise StageError(f"{adapter_folder}: {problem}")
    dtype, is_scalar = torch_dtype(stored_dtype(model_folder)), config.get("task_type") == "SEQ_CLS"
    if has_plain_factors(config) and (adapter := _plain_adapter(model_folder, adapter_folder, is_scalar)):
        model = _without_memory(model_folder, is_scalar)
        layout = _scalar_layout(model, model_folder, dtype) if is_scalar else None
        merged = MergedWeights(model_folder, adapter, scaling_of(config), dtype, layout)
        save_model(model, merged.layout, _finite(merged, adapter_folder), out_folder, None)
    else:
        _merge_whole(model_folder, adapter_folder, out_folder, is_scalar, dtype)
    copy_tokenizer(adapter_folder if (adapter_folder / "tokenizer.json").is_file() else model_folder, out_folder)


def _without_memory(model_folder: Path, is_scalar: bool) -> transformers.PreTrainedModel:
    return require_scalar_fit(model_folder) if is_scalar else require_fit(model_folder, "causal")


def _scalar_layout(model: transformers.PreTrainedModel, folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the layout of the scalar model of a causal model's folder, in the dtypes of `read_layout`."""
    stored = read_layout(folder, dtype)
    return {name: stored.get(name, tensor.to(dtype)) for name, tensor in stored_layout(model).items()}


def _plain_adapter(model_folder: Path, adapter_folder: Path, is_scalar: bool) -> dict[str, Tensor] | None:
    """Return the adapter's tensors in float32, or None if it changes the embedding, the causal head or no linear layer,
    or if its names are not those of the folder.

    peft puts the adapter on a model without memory, which checks its names and shapes.
    Raises StageError as `_without_memory` and `load_adapter` do.
    """
    model: Any = _without_memory(model_folder, is_scalar)
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    inner = {name: module for name, module in model.named_modules() if all(module is not end for end in ends)}
    linear = {f"{_PREFIX}{name}" for name, module in inner.items() if isinstance(module, nn.Linear)}
    names = adapter_shapes(adapter_folder)
    saved = {name.removeprefix(_PREFIX) for name in names if ".lora_" not in name}
    if not (_adapted(names) <= linear and {name.rpartition(".")[0] for name in saved} <= inner.keys()):
        return None
    if not stored_layout(model).keys() | _changed(names) <= read_layout(model_folder, torch.float32).keys() | saved:
        return None  # the folder has other names for tensors than the adapter or the merged model
    load_adapter(model, adapter_folder, low_cpu_mem_usage=True)
    return {name: tensor.float() for name, tensor in load_file(adapter_folder / ADAPTER_WEIGHTS).items()}


def _finite(weights: Iterable[tuple[str, Tensor]], adapter_folder: Path) -> Iterator[tuple[str, Tensor]]:
    for name, weight in weights:
        if not weight.isfinite().all():
            raise StageError(f"{adapter_folder}: this adapter cannot be merged ({name} would not be finite)")
        yield name, weight


def _merge_whole(
    model_folder: Path, adapter_folder: Path, out_folder: Path, is_scalar: bool, dtype: torch.dtype
) -> None:
    load = load_scalar_model if is_scalar else load_causal_model
    # Hardly anything is computed with attention here, and every model has the eager one.
    adapted = load_adapter(load(model_folder, dtype=torch.float32, attention="eager"), adapter_folder).eval()
    expected = _probe(adapted)
    try:
        merged = adapted.merge_and_unload(safe_merge=True)
    except (RuntimeError, ValueError) as error:  # NaN, or a bias for a layer without one
        raise StageError(f"{adapter_folder}: this adapter cannot be merged ({reason_of(error)})") from error
    _require_same(adapter_folder, _probe(merged), expected)
    out_folder.mkdir(parents=True, exist_ok=True)
    write_folder(merged.to(dtype), out_folder)


@torch.inference_mode()
def _probe(model: Any) -> Tensor:
    """Return the model's output for random tokens, (1, T, vocabulary or labels)."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.get_text_config().vocab_size, (1, _PROBE_TOKENS), generator=generator)
    logits: Tensor = model(input_ids=ids).logits
    return logits


def _require_same(folder: Path, merged: Tensor, expected: Tensor) -> None:
    difference = float((merged - expected).abs().max())
    if not difference <= _ROUNDING * (1 + float(expected.abs().max())):
        raise StageError(
            f"{folder}: the merged model would compute other logits than the adapter does (by up to {difference:.2g}): "
            "an adapter of the output head or the embedding cannot be merged where the two are one tensor"
        )
