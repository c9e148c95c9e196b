"""Tables of parts by the names that recipes use, which installed packages extend by entry points.

An entry point `NAME = "package.module:OBJECT"` of the group `alignment.KIND` is one more line of the table KIND.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from rlhf_core.errors import PluginError, reason_of

PREFIX = "alignment."  # of the groups

E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Plugin:
    """An installed distribution with lines of tables."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@cache
def installed() -> Mapping[str, list[tuple[Plugin, EntryPoint]]]:
    """The entry points of all plugins, by group, as they are when first asked for."""
    points = entry_points()
    return {
        group: [
            (Plugin(point.dist.name, point.dist.version), point)
            for point in points.select(group=group)
            if point.dist is not None
        ]
        for group in points.groups
        if group.startswith(PREFIX)
    }


class Table(MutableMapping[str, E]):
    """Our lines, and those of plugins, which are imported when the table is first read.

    Raises PluginError there if a plugin's line cannot be imported, is no `line`, or has a name that is taken.
    """

    def __init__(self, kind: str, line: type[E], ours: Mapping[str, E]) -> None:
        self.group = PREFIX + kind
        self._line = line
        self._ours = dict(ours)

    @cached_property
    def plugins(self) -> dict[str, Plugin]:
        """The plugin that each line comes from, by the line's name."""
        plugins: dict[str, Plugin] = {}
        for plugin, point in installed().get(self.group, ()):
            if point.name in self._ours or point.name in plugins:
                other = plugins.get(point.name, "the package itself")
                raise PluginError(
                    f"{plugin}: `{point.name}` of {self.group} is there already, from {other}: give it another name, "
                    "or uninstall one of the two"
                )
            plugins[point.name] = plugin
        return plugins

    @cached_property
    def _lines(self) -> dict[str, E]:
        points = {point.name: point for _, point in installed().get(self.group, ())}
        return self._ours | {name: self._loaded(plugin, points[name]) for name, plugin in self.plugins.items()}

    def _loaded(self, plugin: Plugin, point: EntryPoint) -> E:
        where = f"{plugin}: the entry point `{point.name}` of {self.group}, {point.value},"
        try:
            line = point.load()
        except Exception as error:  # whatever the plugin's module raises
            raise PluginError(f"{where} cannot be imported: {type(error).__name__}: {reason_of(error)}") from error
        if not isinstance(line, self._line):
            raise PluginError(f"{where} is a {type(line).__name__}: it must be a {self._line.__name__}")
        name = getattr(line, "name", point.name)
        if name != point.name:
            raise PluginError(f"{where} is called `{name}`: the entry point must have that name")
        return line

    def __getitem__(self, name: str) -> E:
        return self._lines[name]

    def __setitem__(self, name: str, line: E) -> None:
        self._lines[name] = line

    def __delitem__(self, name: str) -> None:
        del self._lines[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)


_required: dict[str, str] = {}


def require(versions: Mapping[str, str]) -> None:
    """Raise PluginError unless these plugins are installed, by name and version."""
    here = {plugin.name: plugin.version for points in installed().values() for plugin, _ in points}
    for name, version in versions.items():
        if here.get(name) != version:
            there = f"has {name} {here[name]}" if name in here else f"lacks the plugin {name}"
            raise PluginError(
                f"this node {there}, and the run was started with {name} {version}: install that version on every node"
            )


@contextmanager
def requiring(versions: Mapping[str, str]) -> Iterator[None]:
    """Inside, `required` returns these plugins, which the actors of this process's job need too."""
    before = dict(_required)
    _required.update(versions)
    try:
        yield
    finally:
        _required.clear()
        _required.update(before)


def required() -> dict[str, str]:
    return dict(_required)
