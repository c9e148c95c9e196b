"""Write the settings of recipes as pages by stage, generated from the config classes.

Usage: `python -m rlhf_core.recipe.settings_page docs/reference/settings`.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from textwrap import wrap
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from rlhf_core.config.base import Config, KeyedConfig, is_operational
from rlhf_core.config.engines.passed import DEEPSPEED, VLLM, Library
from rlhf_core.config.typed import config_classes
from rlhf_core.recipe.recipe import Recipe

_INDEX = """# Settings

Written by `python -m rlhf_core.recipe.settings_page docs/reference/settings`: edit the descriptions in
`rlhf_core/config` instead. Each stage has a page; [shared](shared.md) has the settings that several stages have, such
as `optimizer`, `rollout` and rewards. [Recipes](../../guides/recipes.md) shows how they work together.

A setting **not in the key** changes only how fast or where a stage runs, or what it shows: change it, and nothing is
computed again ([the key of a stage](../../guides/recipes.md#the-key-of-a-stage)).
"""
_SHARED = "# Settings of several stages\n"
_OF_THE_RECIPE = ("", "loop", "report", "prices", "tracking", "watchdog", "notify")  # on the page of the recipe itself
_WIDTH = 120


@dataclass(frozen=True)
class _Link:
    """The heading of a config class, and how other entries call it."""

    page: str
    title: str
    label: str

    def written(self, page: str) -> str:
        anchor = re.sub(r"[^\w\- ]", "", self.title.lower()).replace(" ", "-")
        return f"[{self.label}]({'' if self.page == page else self.page}#{anchor})"


@dataclass(frozen=True)
class _Entry:
    name: str
    value: tuple[str, ...]
    in_key: bool
    meaning: str


def pages() -> dict[str, str]:
    """Return the text of each page by its file name: the recipe itself, `data`, one for each stage in the order of the
    table of stages, and the mappings that several of them have.
    """
    places = config_places()
    page_of = {config: _page(at) for config, at in places.items()}
    links = _links(places, page_of)
    heads = {"README.md": _INDEX, "shared.md": _SHARED}
    parts: dict[str, list[str]] = {}
    for config, at in places.items():
        page = page_of[config]
        parts.setdefault(page, [heads[page]] if page in heads else [])
        parts[page].append(_section(config, at, links, page, is_first=not parts[page]))
    parts["shared.md"] += map(_refused, (DEEPSPEED, VLLM))
    return {page: "\n\n".join(part.rstrip() for part in sections) + "\n" for page, sections in parts.items()}


def undescribed() -> list[str]:
    """Return the settings without a description."""
    return [
        f"{config.__name__}.{name}"
        for config in config_places()
        for name, field in config.model_fields.items()
        if name != "type" and not field.description
    ]


def config_places() -> dict[type[Config], dict[str, bool]]:
    """Return the places of each config class in a recipe, and whether it is part of a stage key there."""
    places: dict[type[Config], dict[str, bool]] = {Recipe: {"": True}}
    pending: list[tuple[type[Config], str, bool]] = [(Recipe, "", True)]
    while pending:
        config, at, counts = pending.pop(0)
        for name, annotation, in_key in _settings(config):
            place = f"{at}.{name}".removeprefix(".") + (".*" if get_origin(annotation) is dict else "")
            for below in _configs(annotation):
                if place not in places.setdefault(below, {}):
                    places[below][place] = counts and in_key
                    pending.append((below, place, places[below][place]))
    return places


def _settings(config: type[Config]) -> Iterator[tuple[str, Any, bool]]:
    """Yield name, type, and whether it is part of a key, of each field and block."""
    for name, field in config.model_fields.items():
        yield name, field.annotation, not is_operational(config, name)
    for name, block in _blocks(config).items():
        yield name, block, True


def _blocks(config: type[Config]) -> dict[str, type[Config] | None]:
    if not issubclass(config, KeyedConfig):
        return {}
    return {name: config.block_class(name, None) for name in config.block_names()}


def _configs(annotation: Any) -> Iterator[type[Config]]:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        yield from config_classes(annotation)
        return
    for argument in get_args(annotation):
        yield from _configs(argument)


def _page(places: Mapping[str, bool]) -> str:
    """Return the file name of the page of a config class that stands at `places`."""
    roots = {"README" if root in _OF_THE_RECIPE else root for root in (place.partition(".")[0] for place in places)}
    return f"{roots.pop() if len(roots) == 1 else 'shared'}.md"


def _links(places: Mapping[type[Config], Mapping[str, bool]], page_of: Mapping[type[Config], str]) -> dict[str, _Link]:
    """Return the link of each config class by its name."""
    titles = {config: _title(config, at) for config, at in places.items()}
    counts = Counter((page_of[config], title) for config, title in titles.items())
    links = {}
    for config, title in titles.items():
        if counts[page_of[config], title] > 1:
            title = f"{title} ({config.__name__})"
        links[config.__name__] = _Link(page_of[config], title, _type(config) or _names(places[config])[0])
    return links


def _title(config: type[Config], places: Mapping[str, bool]) -> str:
    """Return the heading of a config class: its place if it has one, else its keys; with `type`, if it has one."""
    keys = [place.replace(".*", "") for place in places] if len(places) == 1 else _names(places)
    tag = _type(config)
    return ", ".join(keys) + (f": {tag}" if tag else "")


def _names(places: Mapping[str, bool]) -> list[str]:
    """Return the last key of each place, each once."""
    return list(dict.fromkeys(place.removesuffix(".*").rpartition(".")[2] for place in places))


def _type(config: type[Config]) -> str:
    kind = config.model_fields.get("type")
    return str(get_args(kind.annotation)[0]) if kind else ""


def _section(
    config: type[Config], places: Mapping[str, bool], links: Mapping[str, _Link], page: str, *, is_first: bool
) -> str:
    """Return the heading and the settings of a config class as a list."""
    lines = [f"{'#' if is_first else '##'} {links[config.__name__].title}" if config is not Recipe else "## The recipe"]
    entries = _entries(config, links, page, any(places.values()))
    is_out = len(entries) > 1 and not any(entry.in_key for entry in entries)
    stages = dict.fromkeys(place.partition(".")[0] for place in places)
    stands = f"Of {', '.join(f'`{name}`' for name in stages)}." if len(stages) > 1 else ""
    text = " ".join(filter(None, [_first_paragraph(config), stands, "Not in the key." if is_out else ""]))
    lines += ["", *_wrapped(text)] if text else []
    lines += [""] if entries else []
    for entry in entries:
        left_out = [] if entry.in_key or is_out else ["not in the key"]
        meaning = f": {entry.meaning}" if entry.meaning else ""
        lines += _wrapped(f"- `{entry.name}` ({'; '.join([*entry.value, *left_out])}){meaning}")
    return "\n".join(lines)


def _entries(config: type[Config], links: Mapping[str, _Link], page: str, counts: bool) -> list[_Entry]:
    schema = config.model_json_schema()
    entries = []
    for name, field in config.model_fields.items():
        if name == "type":
            continue
        shown = _value(schema["properties"][name], schema.get("$defs", {}), links, page)
        # A stage key includes the stage's own section of the recipe, and one seed: the stage's or the recipe's.
        is_setting = config is not Recipe or any(_configs(field.annotation))
        in_key = name == "seed" or (counts and is_setting and not is_operational(config, name))
        entries.append(_Entry(name, (shown, _default(field)), in_key, field.description or ""))
    for name, block in _blocks(config).items():
        if name in config.model_fields:
            continue  # `merge`: a stage, but never under that name
        assert block is not None
        entries.append(_Entry(name, (links[block.__name__].written(page),), counts, _first_paragraph(block)))
    return entries


def _wrapped(text: str) -> list[str]:
    indent = "  " if text.startswith("- ") else ""
    return wrap(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _refused(library: Library) -> str:
    """Return the settings that a recipe cannot pass on to the library, one entry for each reason."""
    names: dict[str, list[str]] = {}
    for name, reason in library.refused.items():
        names.setdefault(reason, []).append(f"`{name}`")
    entries = [_wrapped(f"- {', '.join(sorted(refused))}: {reason}") for reason, refused in names.items()]
    return "\n".join([f"## Refused settings of {library.name}", "", *chain.from_iterable(entries)])


def _first_paragraph(config: type[Config]) -> str:
    docstring = vars(config).get("__doc__") or ""
    return " ".join(docstring.partition("\n\n")[0].split())


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "default none"
    if isinstance(value, Config):
        return "default: its own defaults"
    if isinstance(value, bool):
        return f"default `{str(value).lower()}`"
    if value in ({}, (), ""):
        return "default empty"
    if isinstance(value, tuple):
        return f"default `[{', '.join(map(str, value))}]`"
    return f"default `{value}`"


def _value(schema: dict[str, Any], definitions: dict[str, Any], links: Mapping[str, _Link], page: str) -> str:
    """Return the valid values of a field, from its JSON schema."""
    if "$ref" in schema or "properties" in schema:
        name = schema["$ref"].rpartition("/")[2] if "$ref" in schema else schema["title"]
        return links[name].written(page)
    options = schema.get("anyOf", []) + schema.get("oneOf", [])
    if options:
        shown = dict.fromkeys(_value(option, definitions, links, page) for option in options)
        return " or ".join(sorted(shown, key=lambda text: text == "none"))
    if "enum" in schema:
        return ", ".join(f"`{_written(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{_written(schema['const'])}`"
    match schema.get("type"):
        case "array":
            inner = schema.get("items") or schema["prefixItems"][0]
            count = f"{len(schema['prefixItems'])} of: " if "prefixItems" in schema else "list of "
            return count + _value(inner, definitions, links, page)
        case "object":
            inner = schema.get("additionalProperties")
            return f"name → {_value(inner, definitions, links, page)}" if isinstance(inner, dict) else "mapping"
        case kind:
            return _scalar(str(kind), schema)


def _written(value: Any) -> str:
    """Return a value as YAML writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _scalar(kind: str, schema: dict[str, Any]) -> str:
    names = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false", "null": "none"}
    shown = names.get(kind, "anything")
    if {"minimum", "maximum"} <= schema.keys():
        return f"{shown} {schema['minimum']:.15g} to {schema['maximum']:.15g}"
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    limits = ", ".join(f"{sign} {schema[key]:.15g}" for key, sign in signs.items() if key in schema)
    return f"{shown} {limits}".rstrip()


if __name__ == "__main__":
    for name, text in pages().items():
        (Path(sys.argv[1]) / name).write_text(text, encoding="utf-8")
