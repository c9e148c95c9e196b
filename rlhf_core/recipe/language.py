"""The grammar of recipes as types: valid keys at each place, and the types of their values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from rlhf_core.config.base import NULL_WORDS, Config, KeyedConfig
from rlhf_core.config.typed import config_classes
from rlhf_core.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a location in a recipe."""

    key: Any
    tag: bool  # not a key, but the tag of a union or the name of a type, which pydantic puts into a location too
    siblings: Sequence[Any]  # the types of what has this key
    below: Sequence[Any]  # the types of its value


def walk(data: Any, location: Sequence[Any]) -> Iterator[Part]:
    """Yield each part of a location in `data`.

    Only the place distinguishes a tag from a key: `reward_model` is a stage, and a tag below `rl.ppo.rewards.*`.
    """
    here: list[Any] = [Recipe]
    tagged: list[type[Config]] = []
    for part in location:
        # After a tag comes a key, also one of the same name, such as `function` of a reward of the type `function`.
        # Nor is there a tag where no type is written, such as before the setting `vllm` of engines of that type.
        typed = not tagged and _has(data, "type")
        tagged = [config for config in configs_of(here) if part in get_args(_tag(config))] if typed else []
        if tagged:
            yield Part(part, True, here, tagged)
            here = tagged
        elif isinstance(part, str) and "[" in part and not _has(data, part):
            yield Part(part, True, here, here)  # `tuple[str, ...]`: one of several types
        else:
            data = item_of(data, part)
            below = [below_annotation for annotation in here for below_annotation in _below(annotation, part, data)]
            yield Part(part, False, here, below)
            here = below


def with_nulls(value: Any, types: Sequence[Any] = (Recipe,)) -> Any:
    """Replace words that mean null by null in `value`, of one of `types`, where null is valid."""
    if isinstance(value, str):
        return None if value in NULL_WORDS and any(map(_may_be_null, types)) else value
    if isinstance(value, list):
        return [with_nulls(item, [b for t in types for b in _below(t, i, item)]) for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {
            key: None
            if isinstance(item, str) and item in NULL_WORDS and _is_block(types, key)
            else with_nulls(item, [below for t in types for below in _below(t, key, item)])
            for key, item in value.items()
        }
    return value


def keys_of(config: type[Config]) -> list[str]:
    """Return the keys of a mapping of this class that are known in advance."""
    blocks = config.block_names() if issubclass(config, KeyedConfig) else ()
    return list(dict.fromkeys([*config.model_fields, *blocks]))


def configs_of(annotations: Sequence[Any]) -> Iterator[type[Config]]:
    """Yield the config classes of values of these types, without nested ones."""
    for annotation in annotations:
        yield from config_classes(annotation)


def _may_be_null(annotation: Any) -> bool:
    if annotation is NoneType or annotation is None:
        return True
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return any(map(_may_be_null, get_args(annotation)))
    return False


def _is_block(types: Sequence[Any], key: str) -> bool:
    return any(issubclass(config, KeyedConfig) and key in config.block_names() for config in configs_of(types))


def _tag(config: type[Config]) -> Any:
    return config.model_fields["type"].annotation if "type" in config.model_fields else None


def _has(data: Any, part: str) -> bool:
    return isinstance(data, dict) and part in data


def item_of(data: Any, part: Any) -> Any:
    """Return the item of a mapping or a list; None if there is none."""
    if isinstance(data, dict):
        return data.get(part)
    return data[part] if isinstance(data, list) and isinstance(part, int) and part < len(data) else None


def _below(annotation: Any, part: Any, raw: Any) -> Iterator[Any]:
    """Yield the types of the item `part`, written as `raw`, in a value of the type `annotation`."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        for config in config_classes(annotation):
            if part in config.model_fields:
                yield config.model_fields[part].annotation
            elif issubclass(config, KeyedConfig):
                yield _block_class(config, part, raw)
    elif get_origin(annotation) is dict:
        yield get_args(annotation)[1]
    elif get_origin(annotation) in (tuple, list):
        yield from (item for item in get_args(annotation) if item is not Ellipsis)
    else:
        yield from (below for option in get_args(annotation) for below in _below(option, part, raw))


def _block_class(config: type[KeyedConfig], key: str, raw: Any) -> type[Config] | None:
    try:
        return config.block_class(key, raw)
    except (ValueError, TypeError):
        return None
