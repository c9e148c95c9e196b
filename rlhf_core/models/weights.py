"""Checks of a model's weights against its config: every tensor present, no others, each of its shape.

By itself transformers initialises missing or misshapen ones at random, with a warning.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from rlhf_core.errors import StageError, reason_of
from rlhf_core.models.folders.attention_names import attention_problem, attentions_of
from rlhf_core.models.folders.check import not_one, untied_problem
from rlhf_core.models.folders.class_config import (
    class_config,
    require_generation_config,
    settings_of,
    settings_problems,
)
from rlhf_core.models.folders.folder import GENERATION_CONFIG, Head
from rlhf_core.models.folders.headers import StoredTensor, stored_tensors
from rlhf_core.models.folders.remote_code import REMOTE_CODE
from rlhf_core.models.folders.vision_models import VISION_MODELS, reads_images
from rlhf_core.models.sharded_loading import Sharding, divided_as_loaded
from rlhf_core.models.vision_scalar import scalar_class
from rlhf_core.system.listing import some

Shape = tuple[int, ...]

_MOST_NAMED = 3  # tensors in a message


def load_weights(
    folder: Path, head: Head, *, new_head: bool = False, sharding: Sharding | None = None, **options: Any
) -> transformers.PreTrainedModel:
    """Load the model in `folder`, with all of its weights from there. options: of transformers' `from_pretrained`.

    new_head: the folder is a causal model's, and the head of the scalar one is still to be initialised.
    sharding: divides each parameter over the ranks as soon as it is read.
    Raises StageError for weights that are missing, unexpected or misshapen: except those that transformers leaves out
    on purpose (`_keys_to_ignore_on_load_…`, buffers of old checkpoints, a head that is the embedding).
    """
    if new_head or sharding is not None:
        # The output head, which a scalar model leaves out, belongs to the causal one.
        require_fit(folder, "causal" if new_head else head)
    with ExitStack() as stack:
        if sharding is not None:
            options["state_dict"] = stack.enter_context(divided_as_loaded(folder, sharding))
        model, info = _from_pretrained(folder, head, options)
    if sharding is not None:
        _set_from_folder(model, folder)
    require_all_loaded(folder, model, _without_heads(info) if new_head else info)
    for untied, source in _tied(model).items() - dict(getattr(model, "all_tied_weights_keys", {})).items():
        raise StageError(f"{folder}: {not_one(untied, source)}")
    return model


def _without_heads(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """`info` without the head that is not in the folder, and that of the causal model there, which is left out."""
    missing = {name for name in info["missing_keys"] if not name.startswith("score.")}
    return {**info, "missing_keys": missing, "unexpected_keys": set()}


def _set_from_folder(model: Any, folder: Path) -> None:
    """Set what `from_pretrained` reads from the folder beside the weights, which a state dict replaces."""
    model.config.name_or_path = str(folder)
    if model.can_generate():
        model.adjust_generation_fn(
            None, True, None, str(folder), cache_dir=None, force_download=False, proxies=None, local_files_only=True,
            token=None, revision=None, subfolder="", trust_remote_code=False,
        )  # fmt: skip


def require_fit(folder: Path, head: Head, *, new_head: bool = False) -> transformers.PreTrainedModel:
    """Return the model in `folder`, its tensors on the meta device.

    new_head: the folder is a causal model's, which is checked too, and the head of the scalar one is not in it.
    Raises StageError for settings with which it cannot be built or run, and unless `load_weights` would find every
    tensor of it. Reads no weights but those of tensors that are both stored although the class ties them.
    """
    if new_head:
        require_fit(folder, "causal")
    with _named(folder):
        stored = stored_tensors(folder)
        if (folder / GENERATION_CONFIG).is_file():
            require_generation_config(folder)
        if problems := list(settings_problems(settings_of(class_config(folder)))):
            raise StageError("; ".join(problems))
    state = {name: torch.empty(tensor.shape, device="meta") for name, tensor in stored.items()}
    model, info = _from_pretrained(folder, head, {"state_dict": state, "device_map": {"": "meta"}})
    require_all_loaded(folder, model, _without_heads(info) if new_head else info)
    if (problem := untied_problem(folder, stored_twice(model, stored))) is not None:
        raise StageError(f"{folder}: {problem}")
    return model


def stored_twice(model: transformers.PreTrainedModel, stored: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Return the tied tensors that are both stored: the one left out -> the one used."""
    return {target: source for target, source in _tied(model).items() if target in stored and source in stored}


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Prefix a StageError's message with the folder."""
    try:
        yield
    except StageError as error:
        raise StageError(f"{folder}: {error}") from error


def _from_pretrained(
    folder: Path, head: Head, options: Mapping[str, Any]
) -> tuple[transformers.PreTrainedModel, Mapping[str, Any]]:
    with _named(folder):
        config = class_config(folder, **({"num_labels": 1} if head == "scalar" else {}))
        auto = _auto_class(config, head)
        is_ours = issubclass(auto, transformers.PreTrainedModel)
        kind = auto if is_ours else auto._model_mapping[type(config)]
        problem = attention_problem(kind.__name__, attentions_of(kind), options.get("attn_implementation", "eager"))
        if problem is not None:
            raise StageError(problem)
    source: Path | None = folder
    try:
        with _no_report():
            if "state_dict" in options:  # taken in place of the folder, and only by the class itself
                source = None
                with torch.device("meta"):
                    auto = auto if is_ours else type(auto.from_config(config, trust_remote_code=False))
            model, info = auto.from_pretrained(
                source, config=config, local_files_only=True, use_safetensors=True, output_loading_info=True,
                ignore_mismatched_sizes=True, trust_remote_code=False, **options,
            )  # fmt: skip
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # configs and models raise types of every kind; all mean that this folder cannot be used
        raise StageError(
            f"{folder}: transformers cannot load a model with this config.json and these weights: correct config.json, "
            f"or fetch the folder again ({reason_of(error)})"
        ) from error
    return model, info


def _auto_class(config: Any, head: Head) -> Any:
    """Return transformers' auto class, or a class of ours. Raises StageError if there is no model of this kind for the
    config.
    """
    auto: Any = transformers.AutoModelForCausalLM
    if head == "scalar":
        auto = transformers.AutoModelForSequenceClassification
        if reads_images(config.to_dict()) and type(config) not in auto._model_mapping:
            return scalar_class(config.__class__)
    elif reads_images(config.to_dict()):
        auto = transformers.AutoModelForImageTextToText
    if type(config) in auto._model_mapping:
        return auto
    if getattr(config, "auto_map", None):
        raise StageError(REMOTE_CODE)
    if head == "causal" and type(config) in transformers.AutoModelForImageTextToText._model_mapping:
        raise StageError(
            f"config.json: a model of model_type {config.model_type!r} reads images, and its architecture was not "
            f"tested here: take one of {', '.join(VISION_MODELS)}"
        )
    kind = "sequence classifier" if head == "scalar" else "causal language model"
    raise StageError(f"config.json: a model of model_type {config.model_type!r} is not a {kind}: take one that is")


@contextmanager
def _no_report() -> Iterator[None]:
    """Suppress transformers' table of weights that were not loaded: ours is an error, or they are intended."""
    logging = transformers.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def require_all_loaded(source: object, model: object, info: Mapping[str, Any]) -> None:
    """Raise StageError unless `info`, as returned by `from_pretrained`, reports that all weights were loaded.

    source: their origin, for the message.
    """
    problem = _misfit(info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"])
    if problem is not None:
        raise StageError(
            f"{source}: the weights are not those of config.json ({type(model).__name__}): {problem}: "
            "give config.json and weights of one model"
        )


def _tied(model: Any) -> dict[str, str]:
    """Return the names of tied weights: the one left out -> the one stored."""
    return dict(model.get_expanded_tied_weights_keys(all_submodels=True))


def _misfit(
    missing: Collection[str], unexpected: Collection[str], mismatched: Iterable[tuple[str, Shape, Shape]]
) -> str | None:
    """Describe the problem of weights in one sentence; None if there is none. mismatched: name, stored shape, expected
    shape.
    """
    parts = []
    if missing:
        parts.append(f"missing are {some(sorted(missing), _MOST_NAMED)}")
    if unexpected:
        parts.append(f"{some(sorted(unexpected), _MOST_NAMED)} belong to another model")
    shapes = [f"{name} ({_shape(stored)}, expected {_shape(shape)})" for name, stored, shape in mismatched]
    if shapes:
        parts.append(f"of another shape are {some(sorted(shapes), _MOST_NAMED)}")
    return "; ".join(parts) or None


def _shape(shape: Iterable[int]) -> str:
    return "×".join(map(str, shape)) or "a single number"
