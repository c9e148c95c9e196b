"""pydantic's problems with a recipe as sentences: the key, its value, and valid values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_core.config.base import Config
from rlhf_core.config.texts import is_hub_name
from rlhf_core.errors import did_you_mean, shortened, similar_name
from rlhf_core.recipe.language import Part, configs_of, item_of, keys_of, walk
from rlhf_core.recipe.methods import method_hint, setting_hint

_TRUE_WORDS = {"yes", "on", "y", "t", "True", "TRUE", "1"}
_FALSE_WORDS = {"no", "off", "n", "f", "False", "FALSE", "0"}
_LONGEST_SHOWN = 60


def dotted(parts: Sequence[Part]) -> str:
    """Return the key as a user writes it: pydantic adds the tag of a union (`files`, `scratch`) to the location."""
    keys = [str(part.key) for part in parts if not part.tag]
    return ".".join(keys) if keys else "the recipe"


def sentence(data: Mapping[str, Any], problem: Mapping[str, Any]) -> tuple[list[Any], str]:
    """Return the location of the problem in `data`, and its description."""
    parts = list(walk(data, [part for part in problem["loc"] if part != "[key]"]))  # of a mapping: the key is wrong
    place, context, value = dotted(parts), problem.get("ctx", {}), problem["input"]
    location = [part.key for part in parts if not part.tag]
    match problem["type"]:
        case "extra_forbidden":
            return location, _unknown_key(parts)
        case "missing" if parts and isinstance(parts[-1].key, int):
            return location[:-1], f"`{dotted(parts[:-1])}` has too few entries: entry {parts[-1].key + 1} is missing"
        case "missing" if (misspelt := _misspelt(data, parts)) is not None:
            loc = (*problem["loc"][:-1], misspelt)
            return sentence(data, {**problem, "type": "extra_forbidden", "loc": loc})
        case "missing":
            meaning, example = _meaning(parts), _example(parts)
            add = f"add `{example}`" if example else "add it"
            return location, f"`{place}` is missing: {add}" + (f" ({meaning})" if meaning else "")
        case "union_tag_not_found":
            kinds = _kinds(parts)
            return location, f"`{place}.type` is missing: one of {', '.join(kinds)}"
        case "union_tag_invalid":
            kinds, tag = _kinds(parts), str(context["tag"])
            return location, f"`{place}.type` is {shown(tag)}{did_you_mean(tag, kinds)}; it must be {one_of(kinds)}"
        case "value_error":
            chooses = isinstance(value, str) and location[-1:] in (["algorithm"], ["type"])
            text = method_hint(value) if chooses else ""  # a method of another stage, or of another name here
            if isinstance(value, str) and location[:1] == ["data"] and location[-1] == "source":
                text = _as_source(value, ("files", "hub"))
            return location, f"`{place}`: {text or problem['msg'].removeprefix('Value error, ')}"
        case kind:
            if value is None and kind != "none_required":
                else_ = ", or remove the key" if _may_be_left_out(parts) else ""
                return location, f"`{place}` is empty: {_expected(kind, problem, parts)}{else_}"
            if isinstance(value, str) and parts and (source := _as_source(value, _kinds(parts))):
                return location, f"`{place}` is {shown(value)}: {source}"
            return (
                location,
                f"`{place}` is {shown(value)}: {_expected(kind, problem, parts)}{_hint(kind, value)}",
            )


def shown(value: Any) -> str:
    """Return a value as written in a recipe, shortened."""
    if isinstance(value, str):
        return f"'{_short(value)}'"
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return f"the list {_short(str(list(value)))}" if value else "an empty list"
    return _short(str(value))


def one_of(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"one of {', '.join(values)}"


def _short(text: str) -> str:
    return shortened(" ".join(text.split()) if "\n" in text else text, _LONGEST_SHOWN)


def _unknown_key(parts: list[Part]) -> str:
    *parents, wrong = parts
    keys = _keys_beside(wrong)
    near = did_you_mean(str(wrong.key), keys)
    inside = _inside(wrong)
    if inside:
        return f"unknown key `{dotted(parts)}` (did you mean `{inside}`?)"
    keyed = [part for part in parents if not part.tag]
    longer = any(key.startswith(str(wrong.key)) for key in keys)  # `tensor_parallel` for `tensor_parallel_size`
    if keyed and not longer and (beside := _inside(Part(wrong.key, False, keyed[-1].siblings, ()))):
        return f"unknown key `{dotted(parts)}` (did you mean `{dotted([*keyed[:-1], Part(beside, False, (), ())])}`?)"
    samples = any("rollout" in config.model_fields for part in parts for config in configs_of(part.siblings))
    if samples and (elsewhere := setting_hint(str(wrong.key))):
        return f"unknown key `{dotted(parts)}`: {elsewhere}"
    if str(wrong.key).lower() not in keys and (method := method_hint(str(wrong.key))):
        return f"unknown key `{dotted(parts)}`: {method}"
    if not keyed:
        return f"unknown key `{dotted(parts)}`{near}; a stage with a name of its own says which stage it is by `stage:`"
    listed = "" if near or not keys else f"; `{dotted(parents)}` has {', '.join(key for key in keys if key != 'type')}"
    return f"unknown key `{dotted(parts)}`{near}{listed}"


def _keys_beside(wrong: Part) -> list[str]:
    return sorted({key for config in configs_of(wrong.siblings) for key in keys_of(config)})


def _misspelt(data: Mapping[str, Any], parts: Sequence[Part]) -> str | None:
    """Return the unknown key in the recipe that stands for the missing one at the end of `parts`; None without one."""
    written: Any = data
    for part in parts[:-1]:
        written = written if part.tag else item_of(written, part.key)
    if not parts or not isinstance(written, Mapping):
        return None
    keys = _keys_beside(parts[-1])
    return next((key for key in written if key not in keys and similar_name(key, keys) == parts[-1].key), None)


def _inside(wrong: Part) -> str:
    """Return the key of the same name in a mapping next to it, such as `optimizer.learning_rate`; empty if there is
    none, or several.
    """
    candidates = [
        f"{name}.{wrong.key}"
        for config in configs_of(wrong.siblings)
        for name, field in config.model_fields.items()
        for below in configs_of([field.annotation])
        if wrong.key in below.model_fields
    ]
    return candidates[0] if len(set(candidates)) == 1 else ""


def _meaning(parts: Sequence[Part]) -> str:
    """Return the description of the setting at the end of `parts`."""
    key = str(parts[-1].key) if parts else ""
    for config in configs_of(parts[-1].siblings if parts else []):
        if key in config.model_fields:
            return config.model_fields[key].description or ""
    return ""


def _example(parts: Sequence[Part]) -> str:
    """Return a mapping at the end of `parts` with its required keys, `rollout: {max_length: …}`; empty if it is none,
    or of several classes.
    """
    configs = list(configs_of(parts[-1].below if parts else []))
    required = [name for name, field in configs[0].model_fields.items() if field.is_required()] if configs else []
    if len(configs) != 1 or not required:
        return ""
    return f"{parts[-1].key}: {{{', '.join(f'{name}: …' for name in required)}}}"


def _may_be_left_out(parts: Sequence[Part]) -> bool:
    key = str(parts[-1].key)
    fields = [config.model_fields[key] for config in configs_of(parts[-1].siblings) if key in config.model_fields]
    return bool(fields) and not any(field.is_required() for field in fields)


def _kinds(parts: Sequence[Part]) -> list[str]:
    """Return the valid values of `type` at this place."""
    tags = [kind for config in configs_of(parts[-1].below) for kind in _tags(config)]
    return list(dict.fromkeys(tags))


def _tags(config: type[Config]) -> Iterator[str]:
    field = config.model_fields.get("type")
    yield from (str(tag) for tag in getattr(field.annotation, "__args__", ())) if field is not None else ()


def _expected(kind: str, problem: Mapping[str, Any], parts: Sequence[Part]) -> str:
    context = problem.get("ctx", {})
    match kind:
        case "out_of_range":
            return str(problem["msg"])
        case "int_type" | "int_from_float" | "int_parsing" | "int_parsing_size":
            return "it must be a whole number"
        case "float_type" | "float_parsing":
            return "it must be a number"
        case "finite_number":
            return "it must be a finite number"
        case "bool_type" | "bool_parsing":
            return "it must be true or false"
        case "string_type":
            return "it must be text"
        case "string_too_short":
            return "it must not be empty"
        case "literal_error":
            choices = re.findall(r"'([^']*)'|(\d+|True|False)", str(context.get("expected", "")))
            expected = [text or other.lower() for text, other in choices]
            return f"it must be {one_of(expected)}{did_you_mean(str(problem['input']), expected)}"
        case "tuple_type" | "list_type":
            return "it must be a list, such as [a, b]"
        case "too_short":
            return f"it must have at least {context.get('min_length', 1)}"
        case "too_long":
            return f"it must have {context.get('max_length')} entries"
        case "none_required":
            return "it must be left out here"
        case "model_type" | "dict_type" | "model_attributes_type" | "mapping_type":
            keys = list(dict.fromkeys(key for config in configs_of(parts[-1].below) for key in keys_of(config)))
            named = f" with the keys {', '.join(keys)}" if 0 < len(keys) <= 30 else ", `{key: value}`"
            return f"it must be a mapping{named}"
        case _:
            return f"it cannot be used here ({problem['msg']})"


def _as_source(text: str, kinds: Sequence[str]) -> str:
    """Return how a source is written that is only a text in the recipe; empty for what is no source."""
    name = _short(text)
    forms = [f"{{type: hub, repository: {name}}}"] if "hub" in kinds and is_hub_name(text) else []
    forms += [f"{{type: folder, path: {name}}}"] if "folder" in kinds else []
    forms += [f"{{type: files, paths: [{name}]}}"] if "files" in kinds else []
    return f"write {' or '.join(forms)}" if forms else ""


def _hint(kind: str, value: Any) -> str:
    """Return the probably intended spelling."""
    if kind.startswith(("int_", "float_")):
        if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
            return f": write {value:.0f}"
        if isinstance(value, str) and re.fullmatch(r"[-+]?[\d_.]+(e[-+]?\d+)?", value, re.IGNORECASE):
            return ": write it without quotes"
    if kind.startswith("bool_"):
        word = str(value)
        return ": write true" if word in _TRUE_WORDS else ": write false" if word in _FALSE_WORDS else ""
    if kind == "string_type" and isinstance(value, int | float):
        return f': put it in quotes, "{shown(value)}"'
    if kind in ("tuple_type", "list_type") and isinstance(value, str | int | float):
        return f": write [{shown(value).strip(chr(39))}]"
    return ""
