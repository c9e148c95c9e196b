"""Print the settings of recipes as markdown tables, generated from the config classes.

Usage: `python -m rlhf_core.recipe.settings_page [FILE]`. With a FILE, such as docs/reference/settings.md, its part
between the two marks is replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from rlhf_core.config.base import Config, KeyedConfig, is_operational
from rlhf_core.config.engines.passed import DEEPSPEED, VLLM, Library
from rlhf_core.config.typed import config_classes
from rlhf_core.recipe.recipe import Recipe

BEGIN = "<!-- from here on written by `python -m rlhf_core.recipe.settings_page docs/reference/settings.md` -->"
END = "<!-- until here -->"


def reference() -> str:
    """Return one table for each mapping in a recipe, the recipe itself first, each mapping once, and last those of
    refused settings.
    """
    tables = [_table(config, list(places), any(places.values())) for config, places in _places().items()]
    return "\n\n".join([*tables, *map(_refused, (DEEPSPEED, VLLM))])


def rewrite(text: str) -> str:
    """Replace the reference between the marks of `text`. Raises ValueError if it lacks them."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the text lacks the mark {BEGIN!r} or {END!r}")
    return f"{before}{BEGIN}\n\n{reference()}\n\n{END}{after}"


def undescribed() -> list[str]:
    """Return the settings without a description."""
    return [
        f"{config.__name__}.{name}"
        for config in _places()
        for name, field in config.model_fields.items()
        if name != "type" and not field.description
    ]


def _places() -> dict[type[Config], dict[str, bool]]:
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


def _table(config: type[Config], places: list[str], counts: bool) -> str:
    kind = config.model_fields.get("type")
    where = ", ".join(f"`{place}`" for place in places if place) or "a recipe"
    tag = f" of type `{get_args(kind.annotation)[0]}`" if kind else ""
    lines = [
        f"### {config.__name__}",
        "",
        f"{where[0].upper()}{where[1:]}{tag}. {_first_paragraph(config)}".rstrip(),
        "",
    ]
    if config.model_fields.keys() - {"type"}:
        lines += ["| key | value | default | in the key | meaning |", "|---|---|---|---|---|"]
    schema = config.model_json_schema()
    for name, field in config.model_fields.items():
        if name == "type":
            continue
        shown = _value(schema["properties"][name], schema.get("$defs", {}))
        # A stage key includes the stage's own section of the recipe, and one seed: the stage's or the recipe's.
        is_setting = config is not Recipe or any(_configs(field.annotation))
        in_key = "yes" if name == "seed" or (counts and is_setting and not is_operational(config, name)) else "no"
        meaning = (field.description or "").replace("|", "\\|")
        lines.append(f"| `{name}` | {shown} | {_default(field)} | {in_key} | {meaning} |")
    for name, block in _blocks(config).items():
        if name in config.model_fields:
            continue  # `merge`: a stage, but never under that name
        assert block is not None
        link = f"[{block.__name__}](#{block.__name__.lower()})"
        lines.append(f"| `{name}` | {link} | none | {'yes' if counts else 'no'} | {_first_paragraph(block)} |")
    return "\n".join(lines).rstrip()


def _refused(library: Library) -> str:
    """Return the table of settings that a recipe cannot pass on to the library, one row for each reason."""
    names: dict[str, list[str]] = {}
    for name, reason in library.refused.items():
        names.setdefault(reason, []).append(f"`{name}`")
    rows = [f"| {', '.join(sorted(refused))} | {reason} |" for reason, refused in names.items()]
    return "\n".join([f"### Refused settings of {library.name}", "", "| setting | reason |", "|---|---|", *rows])


def _first_paragraph(config: type[Config]) -> str:
    docstring = vars(config).get("__doc__") or ""
    return " ".join(docstring.partition("\n\n")[0].split())


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**needed**"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "none"
    if isinstance(value, Config):
        return "its own defaults"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value in ({}, (), ""):
        return "empty"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`"


def _value(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Return the valid values of a field, from its JSON schema."""
    if "$ref" in schema or "properties" in schema:
        name = schema["$ref"].rpartition("/")[2] if "$ref" in schema else schema["title"]
        return f"[{name}](#{name.lower()})"
    options = schema.get("anyOf", []) + schema.get("oneOf", [])
    if options:
        shown = dict.fromkeys(_value(option, definitions) for option in options)
        return " or ".join(sorted(shown, key=lambda text: text == "none"))
    if "enum" in schema:
        return ", ".join(f"`{_written(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{_written(schema['const'])}`"
    match schema.get("type"):
        case "array":
            inner = schema.get("items") or schema["prefixItems"][0]
            count = f"{len(schema['prefixItems'])} of: " if "prefixItems" in schema else "list of "
            return count + _value(inner, definitions)
        case "object":
            inner = schema.get("additionalProperties")
            return f"name → {_value(inner, definitions)}" if isinstance(inner, dict) else "mapping"
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


def main(arguments: list[str]) -> None:
    if not arguments:
        print(reference())
        return
    file = Path(arguments[0])
    file.write_text(rewrite(file.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
