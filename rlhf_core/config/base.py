"""Base of all config classes: frozen, strict, unknown keys rejected."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError
from pydantic_core.core_schema import ErrorType

from rlhf_core.config.plugins import Plugin

# How people write "no value" where YAML reads text.
NULL_WORDS = frozenset({"", "~", "none", "None", "NONE", "null", "Null", "NULL"})

Dtype = Literal["float32", "bfloat16"]
DTYPE_BYTES: Mapping[Dtype, int] = {"float32": 4, "bfloat16": 2}  # of a number
# model: full weights that a policy can start from
Role = Literal["dataset", "model", "reward_model", "adapter", "logprobs", "top_logprobs", "evaluation", "calibration"]


@dataclass(frozen=True, slots=True)
class Reads:
    """Marks a setting that names an input, or, if it is a tuple, several inputs.

    A setting of None names the last result of its role made before the stage; with `optional` there may be none.
    """

    role: Role
    or_role: Role | None = None  # a second role that will do
    format: str | None = None  # of a dataset
    held_out: bool = False  # a dataset that nothing may be trained on
    only_read: bool = False  # a dataset that the stage neither trains on nor tests on
    optional: bool = False
    each: str = ""  # the stage is run for each name (none: each result above) with an input that is called so
    evaluates: tuple[str, ...] = ()  # other settings of the stage: its evaluation of each model named there is an input
    of: str = ""  # where the setting is none: the input `model` of the stage that this other input names
    reserved: tuple[str, ...] = ()  # values that name no input: they are part of the stage key themselves

    @property
    def roles(self) -> tuple[Role, ...]:
        return (self.role,) if self.or_role is None else (self.role, self.or_role)


@dataclass(frozen=True, slots=True)
class NamedFolder:
    """A user's folder, by path or URL, and the files in it that count."""

    path: str
    suffixes: tuple[str, ...]  # of these files; none: all
    holds: Literal["a model", "images", "tasks", "task folders"]
    without: frozenset[str] = frozenset()  # names of folders whose files do not count


class Config(BaseModel):
    # defer_build: a job needs the settings of one stage, and need not build the validators of all others.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    def __hash__(self) -> int:
        """Hash all values; some are mappings, which have no hash."""
        return hash(json.dumps(self.model_dump(mode="json"), sort_keys=True))

    def unused_fields(self) -> frozenset[str]:
        """Settings left out of the stage key: those that this config does not use, such as the blocks of algorithms
        that were not chosen, and those of `since_default` at their default.
        """
        late = {name: field for name, field in type(self).model_fields.items() if _is_marked(field, "since_default")}
        return frozenset(name for name, field in late.items() if getattr(self, name) == field.default)

    def named_files(self) -> Iterable[str]:
        """Paths of the user's files named by these settings, whose content is part of the stage key; nested configs
        excluded.
        """
        return ()

    def named_folders(self) -> Iterable[NamedFolder]:
        """The user's folders named by these settings; nested configs excluded."""
        return ()

    def named_variables(self) -> Iterable[str]:
        """Environment variables named by these settings, which a job needs and no key includes."""
        return ()

    def named_plugins(self) -> Iterable[Plugin]:
        """Plugins that a name in these settings comes from; without those of configs below."""
        return ()

    def used_settings(self) -> Iterator[tuple[str, Any]]:
        """Yield name and value of each setting, without the unused ones."""
        unused = self.unused_fields()
        yield from ((name, getattr(self, name)) for name in type(self).model_fields if name not in unused)


def configs_below(value: object, at: str = "") -> Iterator[tuple[str, Config]]:
    """Yield `value`, if it is a config, and every used one below it, each with its path below `value`."""
    if isinstance(value, Config):
        yield at, value
        items: Iterable[tuple[object, object]] = value.used_settings()
    elif isinstance(value, dict):
        items = value.items()
    elif isinstance(value, tuple):
        items = enumerate(value)
    else:
        return
    for key, item in items:
        yield from configs_below(item, f"{at}.{key}".removeprefix("."))


class KeyedConfig(Config):
    """Fields and, beside them, blocks: further keys, whose class is chosen by `block_class`.

    This is how one line in a table adds a stage to recipes or an algorithm to `rl`, without another field here.
    """

    model_config = ConfigDict(extra="allow")

    @classmethod
    def block_class(cls, key: str, raw: Any) -> type[Config] | None:
        """Return the class of the block `key`, whose content as JSON values is `raw`; None if there is no such key.

        May raise ValueError, which is reported as a problem of that key.
        """
        raise NotImplementedError

    @classmethod
    def block_names(cls) -> list[str]:
        """Keys of the blocks that are always present."""
        raise NotImplementedError

    @property
    def blocks(self) -> Mapping[str, Any]:
        """The blocks by key, in the order in which they were written."""
        return self.__pydantic_extra__ or {}

    def used_settings(self) -> Iterator[tuple[str, Any]]:
        yield from super().used_settings()
        unused = self.unused_fields()
        yield from ((key, block) for key, block in self.blocks.items() if key not in unused)

    @model_validator(mode="after")
    def _validate_blocks(self) -> Self:
        blocks = self.__pydantic_extra__ or {}
        for key in [key for key, raw in blocks.items() if raw is None and key in self.block_names()]:
            del blocks[key]  # an override such as `rl.ppo=null` takes a block away
        problems: list[InitErrorDetails] = []
        for key, raw in blocks.items():
            try:
                blocks[key] = self.validated_block(key, raw)
            except ValidationError as error:
                problems += located(error)
        if problems:
            raise ValidationError.from_exception_data(type(self).__name__, problems)
        return self

    @classmethod
    def validated_block(cls, key: str, raw: Any) -> Config:
        """Return the block `key`, validated from the JSON values `raw`.

        Raises ValidationError, located from this config.
        """
        if isinstance(raw, Config):
            return raw
        try:
            block_class = cls.block_class(key, raw)
            if block_class is not None:
                return block_class.model_validate_json(json.dumps(raw))
            problems = [InitErrorDetails(type="extra_forbidden", loc=(key,), input=raw)]
        except ValidationError as error:
            problems = list(located(error, key))
        except ValueError as error:  # not a valid block, for the reason in its text
            problems = [InitErrorDetails(type=raised(str(error)), loc=(key,), input=raw)]
        raise ValidationError.from_exception_data(cls.__name__, problems)


_OF_PYDANTIC = frozenset(get_args(ErrorType))


def located(error: ValidationError, *place: str) -> Iterator[InitErrorDetails]:
    """Yield the problems of `error` with `place` prepended to their locations."""
    for problem in error.errors():
        # An error raised by one of our validators: only its text can be raised again.
        kind: Any = problem["type"]
        if kind not in _OF_PYDANTIC or kind == "value_error":
            kind = PydanticCustomError(kind, "{text}", {"text": problem["msg"]})
        where = (*place, *problem["loc"])
        yield InitErrorDetails(type=kind, loc=where, input=problem["input"], ctx=problem.get("ctx", {}))


def raised(text: str) -> PydanticCustomError:
    """Return an error type whose whole message is `text`."""
    return PydanticCustomError("value_error", "{text}", {"text": text})


def operational(default: Any = ..., **constraints: Any) -> Any:
    """Return a field that changes how fast or where a stage runs, never its result: it is left out of the stage key."""
    if isinstance(default, type):
        return Field(default_factory=default, json_schema_extra={"operational": True}, **constraints)
    return Field(default, json_schema_extra={"operational": True}, **constraints)


def formerly_keyed(default: Any, **constraints: Any) -> Any:
    """Return an operational field that keys once included: all of them now have its default there, so that earlier
    results at the default are found.
    """
    return Field(default, json_schema_extra={"operational": True, "formerly_keyed": True}, **constraints)


def since_default(default: Any, **constraints: Any) -> Any:
    """Return a field added after its stage's first release: at `default`, the earlier behaviour, it is left out of the
    stage key.
    """
    return Field(default, json_schema_extra={"since_default": True}, **constraints)


def _is_marked(field: FieldInfo | None, mark: str) -> bool:
    extra = field.json_schema_extra if field is not None else None
    return isinstance(extra, dict) and bool(extra.get(mark))


def reads_of(config: type[Config], name: str) -> Reads | None:
    field = config.model_fields.get(name)
    marks = [mark for mark in field.metadata if isinstance(mark, Reads)] if field is not None else []
    return marks[0] if marks else None


def is_operational(config: type[Config], name: str) -> bool:
    """Return whether the setting `name` is left out of the stage key; blocks, which are no fields, are part of it."""
    return _is_marked(config.model_fields.get(name), "operational") or reads_of(config, name) is not None


def result_settings(config: Config) -> dict[str, Any]:
    """Return the settings of `config` that can change a result, as JSON values: the content of a stage key."""
    dumped, settings = config.model_dump(mode="json"), {}
    for name, value in config.used_settings():
        field = type(config).model_fields.get(name)
        if field is not None and _is_marked(field, "formerly_keyed"):
            settings[name] = field.default
        elif not is_operational(type(config), name) or _is_reserved(type(config), name, value):
            settings[name] = _result_value(value, dumped[name])
    return settings


def _is_reserved(config: type[Config], name: str, value: Any) -> bool:
    """Return whether `value`, of a setting that names an input, is a keyword instead of a name."""
    reads = reads_of(config, name)
    return reads is not None and isinstance(value, str) and value in reads.reserved


def _result_value(value: Any, dumped: Any) -> Any:
    if isinstance(value, Config):
        return result_settings(value)
    if isinstance(value, list | tuple):
        return [_result_value(item, plain) for item, plain in zip(value, dumped, strict=True)]
    if isinstance(value, dict):
        return {key: _result_value(item, dumped[key]) for key, item in value.items()}
    return dumped
