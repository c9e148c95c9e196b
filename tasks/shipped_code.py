"""The code that a job runs, sent with it, so that nodes need only what it depends on: `ALIGNMENT_SHIP_CODE=1`.

Ray uploads the folder under the hash of its content, once, and unpacks it on each node as the working directory of the
job and its actors. There it comes first in `sys.path`, before an installed copy and Ray's paths of the driver.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import Distribution
from importlib.util import find_spec
from pathlib import Path

import rlhf_core
from rlhf_core.config.plugins import installed
from rlhf_core.errors import PluginError
from rlhf_core.system.variables import value_of

LIBRARY = Path(rlhf_core.__file__).parent


@contextmanager
def shipped_code() -> Iterator[Path | None]:
    """Yield a folder with `rlhf_core` and the plugins that are installed in place; None if none is sent.

    Raises VariableError, and PluginError for a plugin that cannot be found.
    """
    if value_of("ALIGNMENT_SHIP_CODE") != "1":
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="alignment-code-") as name:
        folder = Path(name)
        _copy(LIBRARY, folder)
        for distribution, modules in _plugins_in_place().values():
            for module in sorted(modules):
                _copy(_place(module, distribution), folder)
            # Python finds the entry points of what has such a folder beside it.
            described = folder / f"{distribution.name.replace('-', '_')}-{distribution.version}.dist-info"
            described.mkdir()
            for file in ("METADATA", "entry_points.txt"):
                (described / file).write_text(distribution.read_text(file) or "", encoding="utf-8")
        yield folder


def _plugins_in_place() -> dict[str, tuple[Distribution, set[str]]]:
    """Return each plugin that was installed with `pip install -e`, and its modules and packages."""
    plugins: dict[str, tuple[Distribution, set[str]]] = {}
    for plugin, point in (pair for pairs in installed().values() for pair in pairs):
        assert point.dist is not None  # see `installed`
        origin = json.loads(point.dist.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            names = (point.dist.read_text("top_level.txt") or "").split()
            plugins.setdefault(plugin.name, (point.dist, set(names)))[1].add(point.module.partition(".")[0])
    return plugins


def _place(module: str, distribution: Distribution) -> Path:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise PluginError(
            f"{distribution.name} {distribution.version}: its `{module}` cannot be sent to a node: it must be a "
            "module, or a package with an __init__.py"
        )
    origin = Path(spec.origin)
    return origin.parent if spec.submodule_search_locations else origin


def _copy(source: Path, folder: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    else:
        shutil.copy(source, folder)
