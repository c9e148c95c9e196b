"""Checks whether a model has the layers to be trained. Loads no torch.

Used before a run, for every available model, and by the job.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.models.folders.folder import has_experts
from rlhf_core.models.folders.vision_models import reads_images

LANGUAGE_HEAD = "lm_head"
_EMBEDDING = "embed_tokens"


def head_problems(*, tied: bool) -> Iterator[str]:
    """Yield the reason why a reward model cannot be trained with a language-model loss. tied: the head is the
    embedding.
    """
    if not tied:
        yield (
            "it needs a model with tied embeddings, which this is not: its language head is lost when the reward model "
            "is made; set it 0"
        )


def target_problem(lora: LoraConfig, layers: Collection[str], *, tied: bool) -> str | None:
    """Return the reason why `lora.target_modules` does not fit a model; None if it does.

    layers: paths of the linear layers that an adapter may change; tied: the language head is the embedding.
    """
    if lora.target_modules == "all-linear":
        return None
    if tied and any(_names(target, LANGUAGE_HEAD) for target in lora.target_modules):
        return (
            f"lora.target_modules names {LANGUAGE_HEAD}, whose weights are the embedding's too in this model: merged, "
            "the adapter would change both; remove it"
        )
    wrong = [target for target in lora.target_modules if not any(_names(target, layer) for layer in layers)]
    if not wrong:
        return None
    names = sorted({layer.rpartition(".")[2] for layer in layers})
    return f"lora.target_modules names {', '.join(wrong)}; the linear layers of this model are {', '.join(names)}"


def saved_modules(lora: LoraConfig, modules: Iterable[str]) -> list[str]:
    """Return the paths, of `modules`, that `lora.modules_to_save` names: peft would take any with such an end."""
    return [module for module in modules if any(_names(saved, module) for saved in lora.modules_to_save)]


def saved_problem(lora: LoraConfig, modules: Collection[str] | None, *, tied: bool) -> str | None:
    """Return the reason why `lora.modules_to_save` does not fit a model; None if it does.

    modules: paths of the model's modules; None: unknown. tied: the language head is the embedding.
    """
    for saved in lora.modules_to_save:
        if tied and any(_names(saved, module) for module in (LANGUAGE_HEAD, f"model.{_EMBEDDING}")):
            return (
                f"lora.modules_to_save names {saved}, but embedding and {LANGUAGE_HEAD} are one tensor in this model, "
                "of which a copy would be trained for one of them; remove it, or train all weights"
            )
        if modules is None:
            continue
        named = [module for module in modules if _names(saved, module)]
        if not named:
            return f"lora.modules_to_save names {saved}, which is not a module of this model; remove it, or correct it"
        if lora.target_modules != "all-linear" and any(
            _names(target, module) for target in lora.target_modules for module in named
        ):
            return f"lora.modules_to_save names {saved}, which lora.target_modules names too; remove it from one"
    return None


def quantised_problem(settings: Mapping[str, Any]) -> str | None:
    """Return the reason why a model's linear layers cannot be quantised; None if they can.

    settings: its config.json.
    """
    if reads_images(settings):
        return "models that read images are not quantised here; remove it"
    if has_experts(settings):
        return "most weights of this model are in stacked experts, which are not quantised; remove it"
    return None


def _names(target: str, layer: str) -> bool:
    """Return whether a target, read as by peft, is the path of a layer or its end."""
    return layer == target or layer.endswith(f".{target}")
