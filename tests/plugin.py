"""The example plugin as its users have it: built as a wheel, and installed into a folder."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_core.config import plugins
from rlhf_core.config.data.format_table import FORMATS
from rlhf_core.config.data.sources import SOURCES
from rlhf_core.config.engines.rollout import ENGINES
from rlhf_core.config.environments.environments import ENVIRONMENTS
from rlhf_core.config.environments.tools import TOOLS
from rlhf_core.config.rewards.rewards import REWARDS
from rlhf_core.config.rl.algorithm_table import ALGORITHMS
from rlhf_core.config.stages.preference_losses import PREFERENCE_LOSSES
from rlhf_core.config.tracking import TRACKERS
from rlhf_core.stages.table import STAGES

SOURCE = Path(__file__).parents[1] / "examples" / "plugin"
MODULE = "alignment_example"
NAME, VERSION = "alignment-example", "1.0"
TABLES = (REWARDS, ENVIRONMENTS, TOOLS, ALGORITHMS, PREFERENCE_LOSSES, SOURCES, FORMATS, STAGES, TRACKERS, ENGINES)
_OFFLINE = ("--no-deps", "--no-index", "--disable-pip-version-check", "--quiet")


def install(folder: Path) -> Path:
    """Return the folder that the plugin is installed in, below `folder`."""
    source = shutil.copytree(SOURCE, folder / "source")  # where a build leaves its own files
    pip = [sys.executable, "-m", "pip"]
    subprocess.run(
        [*pip, "wheel", *_OFFLINE, "--no-build-isolation", "--wheel-dir", str(folder), str(source)], check=True
    )
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", *_OFFLINE, "--target", str(folder / "site"), str(wheel)], check=True)
    return folder / "site"


def with_version(site: Path, folder: Path, version: str) -> Path:
    """A copy of `site` in which the plugin is of another version."""
    copy = shutil.copytree(site, folder / "site")
    (metadata,) = copy.glob("*.dist-info/METADATA")
    metadata.write_text(metadata.read_text().replace(f"\nVersion: {VERSION}\n", f"\nVersion: {version}\n"))
    metadata.parent.rename(copy / metadata.parent.name.replace(VERSION, version))
    return copy


@contextmanager
def visible(site: Path) -> Iterator[None]:
    """This process finds what is installed in `site`, as one that is started with it in its path."""
    sys.path.insert(0, str(site))
    _forget()
    try:
        yield
    finally:
        sys.path.remove(str(site))
        for name in [name for name in sys.modules if name.split(".")[0] == MODULE]:
            del sys.modules[name]
        _forget()


def _forget() -> None:
    importlib.invalidate_caches()
    plugins.installed.cache_clear()
    for table in TABLES:
        for read in ("plugins", "_lines"):
            vars(table).pop(read, None)
