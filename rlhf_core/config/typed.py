"""Configs whose class is chosen by their key `type`, in a table open to extensions."""

from __future__ import annotations

import builtins  # the field `type` hides the class of that name
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self, get_args, get_origin

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, core_schema

from rlhf_core.config.base import Config, located, raised
from rlhf_core.config.plugins import Plugin, Table
from rlhf_core.errors import did_you_mean


class TypedConfig(Config):
    """A class with `family` represents all classes of the table that inherit from it; only they have instances.

    The table is read when a recipe is, so that a line added from outside takes effect at once.
    """

    family: ClassVar[str]  # their name in messages, such as `reward`
    default_type: ClassVar[str | None] = None  # the type if `type` is missing; none: it is required

    type: str

    @classmethod
    def table(cls) -> Table[Any]:
        """The table of all classes of all families that share one; each line has a `config`."""
        raise NotImplementedError

    @classmethod
    def classes(cls) -> Mapping[str, builtins.type[Self]]:
        """The classes accepted in place of this one, by their `type`."""
        return {kind: line.config for kind, line in cls.table().items() if issubclass(line.config, cls)}

    def named_plugins(self) -> Iterable[Plugin]:
        plugin = self.table().plugins.get(self.type)
        return () if plugin is None else (plugin,)

    @classmethod
    def chosen(cls, raw: Any) -> TypedConfig:
        """Return the config of `raw`, which is JSON values or a config. Raises ValidationError."""
        classes = cls.classes()
        if isinstance(raw, cls):
            return raw
        written = raw.get("type") if isinstance(raw, Mapping) else None
        kind = cls.default_type if written is None else written
        if isinstance(kind, str) and kind in classes:
            try:
                return classes[kind].model_validate_json(json.dumps(raw))
            except ValidationError as error:
                problems = list(located(error, *([] if written is None else [kind])))
        elif not isinstance(raw, Mapping):
            text = f"write a mapping with a key `type`, which chooses the {cls.family}: one of {', '.join(classes)}"
            problems = [InitErrorDetails(type=raised(text), input=raw)]
        elif kind is None:
            problems = [InitErrorDetails(type="missing", loc=("type",), input=raw)]
        else:
            near, names = did_you_mean(str(kind), classes), ", ".join(classes) or "none"
            text = f"there is no {cls.family} `{kind}`{near}; there are {names}"
            problems = [InitErrorDetails(type=raised(text), loc=("type",), input=kind)]
        raise ValidationError.from_exception_data(cls.__name__, problems)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if "family" in vars(cls):
            return core_schema.no_info_plain_validator_function(cls.chosen)
        return handler(source)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        if "family" in vars(cls):
            return {"oneOf": [handler(each.__pydantic_core_schema__) for each in cls.classes().values()]}
        return handler(schema)


def config_classes(annotation: Any) -> Iterator[type[Config]]:
    """Yield the config classes of values of this type, without those inside a list, a mapping or a config."""
    if isinstance(annotation, type) and issubclass(annotation, TypedConfig) and "family" in vars(annotation):
        yield from annotation.classes().values()
    elif isinstance(annotation, type) and issubclass(annotation, Config):
        yield annotation
    elif get_origin(annotation) not in (dict, tuple, list):
        for option in get_args(annotation):
            yield from config_classes(option)
