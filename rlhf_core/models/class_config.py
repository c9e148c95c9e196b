"""What transformers' class makes of a config.json, with its defaults: can a model be built from it? Loads no torch.

`python -m rlhf_core.models.class_config FOLDER FILE` prints it, in a process in which transformers finds no torch, and
which takes no more memory than a config needs.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_core.errors import StageError, did_you_mean, reason_of
from rlhf_core.models.folder import GENERATION_CONFIG
from rlhf_core.models.remote_code import causal_models
from rlhf_core.models.transformers_source import module_of, names_in

_UNFIT = {
    "config.json": "config.json is not what transformers expects of its model_type: correct it",
    GENERATION_CONFIG: f"{GENERATION_CONFIG} is not what transformers expects: correct it or remove it",
}
_MEMORY = 8 * 2**30  # bytes, most of them addresses that libraries only reserve
# A setting of a model's module that names an activation, where the module looks names up.
_ACTIVATION = re.compile(r"\bconfig\.(\w*(?:_act|act_fn|activation|activation_function))\b")
_LOOKS_UP_ACTIVATIONS, _LOOKS_UP_POSITIONS = ("ACT2FN[", "get_activation("), "ROPE_INIT_FUNCTIONS["
_TIED_HEAD = re.compile(
    r'"(?:lm_head|embed_out)\.weight": "[\w.]*(?:embed_tokens|wte|embed_in|word_embeddings)\.weight"'
)
# A linear layer of a module: its name, and its arguments with brackets two deep; and the setting that gives it a bias.
_LINEAR = re.compile(r"self\.(\w+) = nn\.Linear\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)")
_BIAS = re.compile(r"\bbias=config\.(\w+)(?![\w.])")
_DIVISOR = re.compile(r"(?:%|//|/) (?:self\.)?config\.(\w+)")
_EXPERTS, _CHOSEN = ("num_local_experts", "num_experts", "n_routed_experts"), "num_experts_per_tok"


def class_config(folder: Path) -> dict[str, Any]:
    """The settings of the folder's language model, also those that its config.json leaves to the class.

    Raises StageError where transformers has no config for them.
    """
    from transformers import AutoConfig

    with _refused("config.json"):
        return settings_of(AutoConfig.from_pretrained(folder, local_files_only=True))


def settings_of(config: Any) -> dict[str, Any]:
    """config: a PreTrainedConfig. A setting that has a name of its own in this class is also under the usual one."""
    text = config.get_text_config(decoder=True)
    if isinstance(text, Mapping):
        raise ValueError("the class has no parts, so no `text_config`: remove it")
    settings = {**config.to_dict(), **text.to_dict(), "model_type": config.model_type}
    return {usual: settings[own] for usual, own in text.attribute_map.items() if own in settings} | settings


def require_generation_config(folder: Path) -> None:
    """Raise StageError for one with which transformers would load no model."""
    from transformers import GenerationConfig

    with _refused(GENERATION_CONFIG):
        GenerationConfig.from_pretrained(folder, local_files_only=True)


def ties_head(settings: Mapping[str, Any]) -> bool:
    """Whether output head and embedding are one tensor: not all classes have the setting that others go by."""
    return bool(settings.get("tie_word_embeddings")) and may_tie_head(settings)


def may_tie_head(settings: Mapping[str, Any]) -> bool:
    """Whether the class has an output head that can be one with the embedding."""
    return _TIED_HEAD.search(_module(settings)) is not None


def bias_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Name of a linear layer of the class -> the setting that gives it a bias, where all of this name have the same."""
    found: dict[str, set[str | None]] = {}
    for layer, arguments in _LINEAR.findall(_module(settings)):
        bias = _BIAS.search(arguments)
        found.setdefault(layer, set()).add(bias[1] if bias else None)
    return {layer: name for layer, names in found.items() if len(names) == 1 and (name := next(iter(names)))}


def class_problems(settings: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for each of the settings, as `class_config` gives them, with which no model can be built or run."""
    module = _module(settings)
    if any(lookup in module for lookup in _LOOKS_UP_ACTIVATIONS):
        known = names_in("transformers.activations", "ACT2CLS")
        for name in sorted(set(_ACTIVATION.findall(module))):
            if isinstance(settings.get(name), str):
                yield from _unknown(name, settings[name], known)
    if _LOOKS_UP_POSITIONS in module:
        yield from _position_problems(settings)
    for name in sorted(set(_DIVISOR.findall(module))):
        value = settings.get(name)
        if isinstance(value, int | float) and value == 0 and not re.search(rf"config\.{name} (>|!=) 0", module):
            yield f"config.json: {name} is {json.dumps(value)}, and the model divides by it: correct it"
    experts = next((count for name in _EXPERTS if isinstance(count := settings.get(name), int) and count > 0), None)
    chosen = settings.get(_CHOSEN)
    if experts is not None and isinstance(chosen, int) and not 1 <= chosen <= experts:
        yield f"config.json: {_CHOSEN} is {chosen}; it must be from 1 to the number of experts, {experts}: correct it"
    rows, pad = settings.get("vocab_size"), settings.get("pad_token_id")
    if isinstance(rows, int) and isinstance(pad, int) and pad >= rows:
        yield f"config.json: pad_token_id is {pad} (by default), but the vocabulary ends at {rows - 1}: set it"
    if "sliding_attention" in (settings.get("layer_types") or ()) and not _is_positive(settings.get("sliding_window")):
        window = json.dumps(settings.get("sliding_window"))
        yield f"config.json: sliding_window is {window}, and layers slide (layer_types): give a whole number above 0"


def _module(settings: Mapping[str, Any]) -> str:
    """The text of the module that has the language model's class."""
    return module_of(causal_models().get(settings["model_type"], ""))


def _position_problems(settings: Mapping[str, Any]) -> Iterator[str]:
    known = names_in("transformers.modeling_rope_utils", "ROPE_INIT_FUNCTIONS") | {"default"}
    size = settings.get("head_dim")
    if isinstance(size, int) and size <= 0:
        yield f"config.json: head_dim is {size}, and its rotary positions need one above 0: correct it"
    whole = settings.get("rope_parameters") or {}
    kinds = {f"rope_parameters.{kind}.": part for kind, part in whole.items() if isinstance(part, Mapping)}
    for place, part in ({"rope_parameters.": whole} if "rope_type" in whole else kinds).items():
        if "rope_type" in part:
            yield from _unknown(f"{place}rope_type", part["rope_type"], known)
        if part.get("rope_theta", 1) is None:
            yield f"config.json: {place}rope_theta is null; it must be a number above 0: correct it"
        share = part.get("partial_rotary_factor", 1.0)
        if not isinstance(share, int | float) or not 0 < share <= 1:
            given = json.dumps(share)
            yield f"config.json: {place}partial_rotary_factor is {given}; it must be above 0, and at most 1: correct it"


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and value > 0


def _unknown(name: str, value: object, known: frozenset[str]) -> Iterator[str]:
    if not isinstance(value, str) or value not in known:
        nearest = did_you_mean(value, known) if isinstance(value, str) else ""
        yield (
            f"config.json: {name} is {json.dumps(value)}, which transformers does not know{nearest}: correct it (it "
            f"knows {', '.join(sorted(known))})"
        )


@contextmanager
def _refused(file: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the values are the user's; the library raises what it likes
        raise StageError(f"{_UNFIT[file]} ({reason_of(error)})") from error


def _main(folder: Path, file: str) -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # whose import would take seconds
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY if most == resource.RLIM_INFINITY else min(_MEMORY, most), most))
    try:
        if file == GENERATION_CONFIG:
            require_generation_config(folder)
        else:
            print(json.dumps(class_config(folder)))
    except StageError as refusal:
        sys.exit(str(refusal))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2])
