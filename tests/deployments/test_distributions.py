"""The wheel and the source distribution: their files, and a wheel that works outside of the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from importlib.metadata import PathDistribution
from pathlib import Path
from zipfile import Path as ZipPath
from zipfile import ZipFile

import pytest

from deployments.setup import UNWANTED_ON_CPU
from rlhf_core import __version__

pytestmark = pytest.mark.parts

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("rlhf_core", "flows", "tasks", "deployments")
OF_A_CHECKOUT = ("deployments/images/", "deployments/pages/")
BESIDE = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"}
LOCKS = {"requirements/cpu.lock", "requirements/gpu.lock"}
FEW_STEPS = ("pretrain.max_steps=20", "sft.max_steps=20", "rl.steps=2")
# As a front end such as `python -m build` does, in the environment of the tests.
BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


@dataclass(frozen=True)
class Distributions:
    source: Path
    wheel: Path


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """Built from a copy: setuptools leaves folders where it builds."""
    folder = tmp_path_factory.mktemp("distributions")
    copy, out = folder / "checkout", folder / "out"
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    run([sys.executable, "-c", BUILD, str(out)], folder=copy)
    (source,) = out.iterdir()
    run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(out), str(source)])
    (wheel,) = out.glob("*.whl")
    return Distributions(source, wheel)


def tracked() -> set[str]:
    listing = run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], folder=ROOT)
    return {name for name in listing.splitlines() if (ROOT / name).is_file()}


def files_of_packages() -> set[str]:
    return {name for name in tracked() if name.startswith(tuple(f"{package}/" for package in PACKAGES))}


def run(command: list[str], folder: Path | None = None, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_wheel_has_the_packages_with_their_data_and_nothing_else(distributions: Distributions) -> None:
    with ZipFile(distributions.wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {name for name in files_of_packages() if not name.startswith(OF_A_CHECKOUT)}
    recipes = {f"deployments/recipes/{path.name}" for path in (ROOT / "deployments/recipes").glob("*.yaml")}
    assert recipes <= names
    assert {f"{package}/py.typed" for package in PACKAGES} <= names


def test_the_wheel_describes_itself(distributions: Distributions) -> None:
    described = PathDistribution(ZipPath(distributions.wheel, f"alignment-{__version__}.dist-info/"))  # type: ignore[arg-type]
    assert described.version == __version__
    assert described.metadata["License-Expression"] == "Apache-2.0"
    extras = set(described.metadata.get_all("Provides-Extra") or ())
    assert extras == {"bench", "benchmarks", "cpu", "dev", "docs", "gpu"}
    assert [point.name for point in described.entry_points] == ["alignment"]
    assert "Apache License" in (described.read_text("licenses/LICENSE") or "")


def test_the_source_distribution_has_what_the_wheel_is_made_of(distributions: Distributions) -> None:
    with tarfile.open(distributions.source) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    made = {name for name in names if name.startswith("alignment.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    ours = {name for name in files_of_packages() if not name.startswith(OF_A_CHECKOUT)}
    assert names - made == ours | BESIDE | LOCKS


def test_the_changelog_has_this_version_and_its_changes_by_kind() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > 200] == []
    versions = [line for line in lines if line.startswith("## ") and line != "## [Unreleased]"]
    assert all(re.fullmatch(r"## \[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}", line) for line in versions)
    assert versions[0].startswith(f"## [{__version__}] ")
    kinds = ("### Added", "### Changed", "### Removed", "### Fixed")
    assert {line for line in lines if line.startswith("### ")} <= set(kinds)


@pytest.mark.endurance("mutations")
@pytest.mark.timeout(3000)
@pytest.mark.slow("installs all packages, and runs `tiny`")
def test_an_installed_wheel_runs_tiny_from_an_empty_folder(distributions: Distributions, tmp_path: Path) -> None:
    """With a home of its own, and no variable that leads to the checkout or to a stack."""
    environment = tmp_path / "environment"
    run([sys.executable, "-m", "venv", str(environment)])
    python, alignment = str(environment / "bin/python"), str(environment / "bin/alignment")
    # Bytecode of the few modules that are imported is written then.
    run([python, "-m", "pip", "install", "-q", "--no-compile", f"{distributions.wheel}[cpu]"])
    run([python, "-m", "pip", "uninstall", "-q", "-y", *UNWANTED_ON_CPU])
    (folder := tmp_path / "empty").mkdir()
    (home := tmp_path / "home").mkdir()
    theirs = ("ALIGNMENT_", "AWS_", "PREFECT_", "PYTHON", "RAY_", "VIRTUAL_ENV", "XDG_")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
    variables |= {"HOME": str(home), "HF_HUB_OFFLINE": "1"}

    def said(*arguments: str) -> str:
        return run([alignment, *arguments], folder, variables)

    assert said("--version") == f"alignment {__version__}\n"
    assert "\ntiny\t" in said("recipes")
    assert "to compute" in said("plan", "tiny")
    try:
        assert "worker works" in said("up")
        said("run", "tiny", *FEW_STEPS)
        assert "0 to compute" in said("plan", "tiny", *FEW_STEPS)
    finally:
        said("down")
    assert (home / ".local/share/alignment/stack/s3").is_dir()
    said("init", "sft", "mine", "--model", "Qwen/Qwen2.5-0.5B-Instruct")
    assert sorted(path.name for path in folder.iterdir()) == ["mine", "outputs"]  # what `run` copies, its report
