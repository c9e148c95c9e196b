"""Settings that name a stage's inputs: datasets and models, by their names in the recipe.

Such a setting is annotated with `Reads`. A recipe's graph is built from these annotations alone: the path of the
setting in its stage's section (`dataset`, `ppo.rewards.helpful.model`) is the name of the stage's input. The name
chosen in the recipe is left out of the stage key, which includes the key of the artifact itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from rlhf_core.config.base import Config, KeyedConfig, Reads, Role, reads_of
from rlhf_core.config.typed import config_classes


@dataclass(frozen=True, slots=True)
class InputSetting:
    """A setting that names an input: its path below the stage's section, and its names."""

    path: str
    reads: Reads
    names: tuple[str, ...]  # empty: the setting is none, or a reserved value
    many: bool  # the setting is a tuple: each name is an input of its own

    def input_name(self, name: str = "") -> str:
        """Return the stage's name of the input called `name` in the setting."""
        return self.reads.each or (f"{self.path}.{name}" if self.many else self.path)

    def evaluation_of(self, setting: str) -> str:
        """Return the stage's name of the evaluation of the model that `setting` names."""
        return f"{self.path}.{setting}"

    @property
    def input_names(self) -> list[str]:
        if self.reads.evaluates:
            return [self.evaluation_of(setting) for setting in self.reads.evaluates]
        return (
            [self.input_name(name) for name in self.names] if self.many and not self.reads.each else [self.input_name()]
        )


def input_settings(config: Config, at: str = "") -> Iterator[InputSetting]:
    """Yield every used setting of `config`, at any depth, that names inputs."""
    for name, value in config.used_settings():
        path = f"{at}.{name}" if at else name
        reads = reads_of(type(config), name)
        if reads is not None:
            many = isinstance(value, tuple)
            named = value if many else () if value is None or value in reads.reserved else (value,)
            yield InputSetting(path, reads, named, many)
        else:
            yield from _settings_below(value, path)


def roles_of_inputs(config: Config) -> dict[str, tuple[Role, ...]]:
    """Return the accepted roles of each input named by the settings."""
    return {name: setting.reads.roles for setting in input_settings(config) for name in setting.input_names}


def _settings_below(value: Any, path: str) -> Iterator[InputSetting]:
    if isinstance(value, Config):
        yield from input_settings(value, path)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _settings_below(item, f"{path}.{key}")
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _settings_below(item, f"{path}.{index}")


def readable_roles(config: type[Config]) -> frozenset[Role]:
    """Return the roles of all inputs that a config of this class could name, whatever its settings."""
    seen: set[type[Config]] = set()
    roles: set[Role] = set()
    pending: list[Any] = [config]
    while pending:
        annotation = pending.pop()
        if not (isinstance(annotation, type) and issubclass(annotation, Config)):
            pending += get_args(annotation)
            continue
        for config_class in set(config_classes(annotation)) - seen:
            seen.add(config_class)
            for name, field in config_class.model_fields.items():
                reads = reads_of(config_class, name)
                roles.update(reads.roles if reads is not None else ())
                pending.append(field.annotation)
            if issubclass(config_class, KeyedConfig):
                pending += [config_class.block_class(name, None) for name in config_class.block_names()]
    return frozenset(roles)
