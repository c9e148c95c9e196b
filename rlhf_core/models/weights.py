"""A model's weights against its config: every tensor there, none too many, each of its shape.

By itself transformers fills what is missing or misshapen with random numbers, and says so in a warning.
`python -m rlhf_core.models.weights FOLDER causal|scalar` is `require_fit`, for a process that has no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors import safe_open

from rlhf_core.errors import StageError, reason_of
from rlhf_core.models.attention import attention_problem
from rlhf_core.models.expected_tensors import misfit
from rlhf_core.models.folder import read_config
from rlhf_core.models.headers import StoredTensor, stored_tensors
from rlhf_core.models.remote_code import reads_images

Head = Literal["causal", "scalar"]  # logits over the vocabulary; one number a token, `score`


def load_weights(folder: Path, head: Head, *, new_head: bool = False, **options: Any) -> transformers.PreTrainedModel:
    """The model in `folder`, all of its weights from there. options: of transformers' `from_pretrained`.

    new_head: the folder is a causal model's, and the head of the scalar one is still to be initialised.
    Raises StageError for weights that are missing, unexpected or misshapen: except what transformers leaves out on
    purpose (`_keys_to_ignore_on_load_…`, buffers of old checkpoints, a head that is the embedding).
    """
    problem = attention_problem(read_config(folder), options.get("attn_implementation", "eager"))
    if problem is not None:
        raise StageError(f"{folder}: {problem}")
    if new_head:
        require_fit(folder, "causal")  # the output head, which the scalar model leaves out, belongs to that
    model, info = _from_pretrained(folder, head, options)
    if new_head:
        missing = {name for name in info["missing_keys"] if not name.startswith("score.")}
        info = {**info, "missing_keys": missing, "unexpected_keys": set()}
    require_all_loaded(folder, model, info)
    for untied, source in _tied(model).items() - dict(getattr(model, "all_tied_weights_keys", {})).items():
        raise StageError(_untied(folder, untied, source))
    return model


def require_fit(folder: Path, head: Head) -> None:
    """Raise StageError unless `load_weights` would find every tensor of the model in `folder`. Reads no weights but
    those of a head that is stored although it is the embedding."""
    stored = stored_tensors_of(folder)
    state = {name: torch.empty(tensor.shape, device="meta") for name, tensor in stored.items()}
    model, info = _from_pretrained(folder, head, {"state_dict": state, "device_map": {"": "meta"}})
    require_all_loaded(folder, model, info)
    for target, source in _tied(model).items():
        if target in stored and source in stored and not _equal(folder, stored[target], target, stored[source], source):
            raise StageError(_untied(folder, target, source))


def stored_tensors_of(folder: Path) -> Mapping[str, StoredTensor]:
    """`stored_tensors`, with the folder in the message."""
    try:
        return stored_tensors(folder)
    except StageError as error:
        raise StageError(f"{folder}: {error}") from error


def _from_pretrained(
    folder: Path, head: Head, options: Mapping[str, Any]
) -> tuple[transformers.PreTrainedModel, Mapping[str, Any]]:
    auto: Any = transformers.AutoModelForCausalLM
    of_config: dict[str, Any] = {"local_files_only": True}
    if head == "scalar":
        auto, of_config["num_labels"] = transformers.AutoModelForSequenceClassification, 1
    elif reads_images(read_config(folder)):
        auto = transformers.AutoModelForImageTextToText
    source: Path | None = folder
    try:
        with _no_report():
            if "state_dict" in options:  # taken in place of the folder, and only by the class itself
                config = transformers.AutoConfig.from_pretrained(folder, **of_config)
                with torch.device("meta"):
                    auto, source, of_config = type(auto.from_config(config)), None, {"config": config}
            model, info = auto.from_pretrained(
                source, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True,
                **of_config, **options,
            )  # fmt: skip
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # configs and models raise types of every kind; all mean that this folder cannot be used
        raise StageError(
            f"{folder}: transformers cannot load a model with this config.json and these weights: correct config.json, "
            f"or fetch the folder again ({reason_of(error)})"
        ) from error
    return model, info


@contextmanager
def _no_report() -> Iterator[None]:
    """transformers writes a table of what it could not load; ours is the error, or it is as intended."""
    logging = transformers.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def require_all_loaded(source: object, model: object, info: Mapping[str, Any]) -> None:
    """Raise StageError unless `info`, as `from_pretrained` returns it, says that the weights were those of the model.

    source: where they come from, as the message names it.
    """
    problem = misfit(info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"])
    if problem is not None:
        raise StageError(
            f"{source}: the weights are not those of config.json ({type(model).__name__}): {problem}: "
            "give config.json and weights of one model"
        )


def _tied(model: Any) -> dict[str, str]:
    """Names of the weights that the config makes one: the one left out -> the one stored."""
    return dict(model.get_expanded_tied_weights_keys(all_submodels=True))


def _equal(folder: Path, first: StoredTensor, first_name: str, second: StoredTensor, second_name: str) -> bool:
    def load(tensor: StoredTensor, name: str) -> torch.Tensor:
        with safe_open(folder / tensor.file, framework="pt") as file:
            loaded: torch.Tensor = file.get_tensor(name)
            return loaded

    return first.shape == second.shape and torch.equal(load(first, first_name), load(second, second_name))


def _untied(folder: Path, target: str, source: str) -> str:
    return (
        f"{folder}: config.json makes {target} one with {source}, but the weights have another tensor of each: set "
        "tie_word_embeddings false in config.json"
    )


def _main(folder: str, head: str) -> None:
    try:
        require_fit(Path(folder), "scalar" if head == "scalar" else "causal")
    except StageError as refusal:
        sys.exit(str(refusal))


if __name__ == "__main__":
    _main(*sys.argv[1:])
