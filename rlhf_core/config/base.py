"""What every config class shares: frozen, strict, and closed to unknown keys."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def unused_fields(self) -> frozenset[str]:
        """Fields whose settings this config does not use, such as the blocks of algorithms that were not chosen."""
        return frozenset()


def operational(default: Any = ..., **constraints: Any) -> Any:
    """A field that changes how fast or where a stage runs, never what it computes: it stays out of the stage key."""
    if isinstance(default, type):
        return Field(default_factory=default, json_schema_extra={"operational": True}, **constraints)
    return Field(default, json_schema_extra={"operational": True}, **constraints)


def result_settings(config: Config) -> dict[str, Any]:
    """The settings of `config` that can change a result, as JSON values: what a stage key is made of."""
    settings: dict[str, Any] = {}
    dumped = config.model_dump(mode="json")
    for name, field in type(config).model_fields.items():
        extra = field.json_schema_extra
        if (isinstance(extra, dict) and extra.get("operational")) or name in config.unused_fields():
            continue
        settings[name] = _result_value(getattr(config, name), dumped[name])
    return settings


def _result_value(value: Any, dumped: Any) -> Any:
    if isinstance(value, Config):
        return result_settings(value)
    if isinstance(value, list | tuple):
        return [_result_value(item, plain) for item, plain in zip(value, dumped, strict=True)]
    if isinstance(value, dict):
        return {key: _result_value(item, dumped[key]) for key, item in value.items()}
    return dumped
