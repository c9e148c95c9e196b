"""Tables that installed distributions extend: when lines are imported, and what is refused, by name and version."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlhf_core.config import plugins
from rlhf_core.config.plugins import Plugin, Table, require, required, requiring
from rlhf_core.errors import PluginError


@dataclass(frozen=True)
class Line:
    value: int


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    plugins.installed.cache_clear()
    yield tmp_path
    plugins.installed.cache_clear()
    for name in [name for name in sys.modules if name.startswith("of_a_plugin")]:
        del sys.modules[name]


def distribution(site: Path, name: str, version: str, points: str, **modules: str) -> None:
    """A distribution with these entry points in the group `alignment.toys`, as an installer leaves it."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "entry_points.txt").write_text(f"[alignment.toys]\n{points}\n[console_scripts]\nother = a:b\n")
    for module, text in modules.items():
        (site / f"{module}.py").write_text(text)


def table() -> Table[Line]:
    return Table("toys", Line, {"ours": Line(0)})


def test_without_plugins_a_table_has_our_lines(site: Path) -> None:
    assert dict(table()) == {"ours": Line(0)}
    assert table().plugins == {}


def test_a_line_of_a_plugin_is_imported_when_the_table_is_first_read(site: Path) -> None:
    distribution(site, "a-plugin", "1.2", "mine = of_a_plugin:line", of_a_plugin="line = 0\n")
    read = Table("toys", int, {"ours": 1})
    assert read.plugins == {"mine": Plugin("a-plugin", "1.2")}
    assert "of_a_plugin" not in sys.modules
    assert list(read) == ["ours", "mine"]
    assert (len(read), read["mine"], "theirs" in read) == (2, 0, False)
    (site / "of_a_plugin.py").write_text("line = 5\n")
    assert read["mine"] == 0, "it is imported once"


@pytest.mark.parametrize(
    ("points", "text", "message"),
    [
        (
            "ours = of_a_plugin:line",
            "line = 0",
            r"a-plugin 1\.2: `ours` of alignment\.toys is there already, from the p",
        ),
        (
            "mine = of_a_plugin:line",
            "import missing_module",
            r"a-plugin 1\.2: the entry point `mine` of alignment\.toys, of_a_plugin:line, cannot be imported: "
            r"ModuleNotFoundError: No module named 'missing_module'",
        ),
        ("mine = of_a_plugin:other", "line = 0", r"a-plugin 1\.2: .* cannot be imported: AttributeError: .*'other'"),
        ("mine = of_a_plugin:line", "line = 'x'", r"a-plugin 1\.2: .*of_a_plugin:line, is a str: it must be a Line"),
    ],
)
def test_a_line_that_cannot_be_used_fails_by_name_and_version(site: Path, points: str, text: str, message: str) -> None:
    distribution(site, "a-plugin", "1.2", points, of_a_plugin=text)
    with pytest.raises(PluginError, match=message):
        table()["ours"]


def test_two_plugins_with_one_name_are_both_named(site: Path) -> None:
    distribution(site, "a-plugin", "1.2", "mine = of_a_plugin:line", of_a_plugin="line = 0")
    distribution(site, "b-plugin", "3.0", "mine = of_a_plugin:line")
    with pytest.raises(PluginError, match=r"^[ab]-plugin [\d.]+: `mine` of .*, from [ab]-plugin [\d.]+: "):
        list(table())


def test_a_line_that_has_a_name_is_called_by_it(site: Path) -> None:
    text = "from dataclasses import dataclass\n@dataclass\nclass Named:\n    name: str\nline = Named('other')\n"
    distribution(site, "a-plugin", "1.2", "mine = of_a_plugin:line", of_a_plugin=text)
    with pytest.raises(PluginError, match=r"is called `other`: the entry point must have that name"):
        list(Table("toys", object, {}))


def test_a_node_needs_the_plugins_of_a_run_in_their_versions(site: Path) -> None:
    distribution(site, "a-plugin", "1.2", "mine = of_a_plugin:line", of_a_plugin="line = 0")
    require({"a-plugin": "1.2"})
    with pytest.raises(PluginError, match=r"^this node has a-plugin 1\.2, .* started with a-plugin 1\.3: "):
        require({"a-plugin": "1.3"})
    with pytest.raises(PluginError, match=r"^this node lacks the plugin b-plugin, .* started with b-plugin 2: "):
        require({"a-plugin": "1.2", "b-plugin": "2"})
    require({})


def test_actors_of_a_job_need_its_plugins_and_those_of_the_next_do_not() -> None:
    with requiring({"a-plugin": "1.2"}):
        assert required() == {"a-plugin": "1.2"}
    assert required() == {}
