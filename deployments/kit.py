"""Collect wheels for a GPU machine without a network: `make kit PYTHON=3.12 WITHOUT=torch,transformers`.

The packages of requirements/gpu-checks.txt and their requirements, in the versions of gpu.lock, without those
installed on the machine (`--without`) and their requirements. There, `KIT=FOLDER make gpu-checks` installs them into
the folder's `site`, and nothing else.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from email.parser import HeaderParser
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
WANTED = ROOT / "requirements" / "gpu-checks.txt"
LOCK = ROOT / "requirements" / "gpu.lock"
PART_BYTES = 60_000_000
_PART = "part-"
# pip takes a platform by its exact name: wheels of machines with glibc 2.28 and older ones.
_PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(28, 4, -1)), "manylinux2014_x86_64",
              "manylinux2010_x86_64", "manylinux1_x86_64")  # fmt: skip


class KitError(Exception):
    """Error with its remedy, in one sentence."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="deployments.kit", description=__doc__)
    parser.add_argument("folder", type=Path, help="of the kit; parts of an earlier one are replaced")
    parser.add_argument("--python", required=True, help="version of the machine's Python, such as 3.12")
    parser.add_argument("--without", default="", help="packages that the machine has, separated by commas")
    options = parser.parse_args(arguments)
    try:
        if not re.fullmatch(r"3\.\d+", options.python):
            raise KitError(f"--python is {options.python!r}: give the version alone, such as 3.12")
        present = {canonicalize_name(name) for name in re.split(r"[,\s]+", options.without) if name}
        with tempfile.TemporaryDirectory() as scratch:
            wheels = collected(present, options.python, Path(scratch))
            for part in write_parts(wheels, options.folder):
                size = sum(wheel.stat().st_size for wheel in part.iterdir())
                print(f"{part}: {size / 1e6:.1f} MB: {', '.join(sorted(w.name for w in part.iterdir()))}")
    except KitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def pins(file: Path) -> dict[str, Requirement]:
    """Return the requirements of a file by canonical name."""
    lines = (line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    parsed = [Requirement(line) for line in lines if line]
    return {canonicalize_name(requirement.name): requirement for requirement in parsed}


def collected(present: Iterable[str], python: str, folder: Path) -> list[Path]:
    """Collect wheels in `folder` of all wanted packages and their requirements that are not present."""
    lock, wanted = pins(LOCK), pins(WANTED)
    there = _closure_of_installed(present, python, {*wanted} - {*present})
    wheels: dict[str, Path] = {}
    pending = [name for name in wanted if name not in there]
    while pending:
        name = pending.pop()
        if name in wheels or name in there:
            continue
        pinned = wanted.get(name, Requirement(name))
        requirement = pinned if pinned.specifier else lock.get(name)
        if requirement is None:
            raise KitError(f"{name} has no version in {LOCK.name}: give it one in {WANTED.name}")
        print(f"{name}{requirement.specifier}", flush=True)
        wheels[name] = _wheel(f"{name}{requirement.specifier}", python, folder / name)
        pending += _names(_wheel_requires(wheels[name]), python)
    return list(wheels.values())


def _closure_of_installed(names: Iterable[str], python: str, missing: set[str]) -> set[str]:
    """Return `names` and their requirements, as far as they are installed here, without the branches of `missing`."""
    closure: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name in closure or name in missing:
            continue
        closure.add(name)
        try:
            pending += _names(requires(name) or [], python)
        except PackageNotFoundError:
            continue
    return closure


def _names(requirements: Iterable[str], python: str) -> Iterator[str]:
    """Yield canonical names of the requirements that apply on Linux with this Python, without extras."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            yield canonicalize_name(requirement.name)


def _wheel_requires(wheel: Path) -> list[str]:
    with ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        return HeaderParser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist", [])


def _wheel(requirement: str, python: str, folder: Path) -> Path:
    """Return the wheel for the other machine, downloaded, or built here if its project has none and it is pure Python.

    Raises KitError if there is neither.
    """
    platforms = [argument for name in _PLATFORMS for argument in ("--platform", name)]
    fetched = _pip(
        "download", "--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms,
        requirement, folder=folder,
    )  # fmt: skip
    if fetched.returncode:
        # Without build isolation: DeepSpeed's setup imports torch. Its operators are left out; they need CUDA here.
        built = _pip("wheel", "--no-build-isolation", requirement, folder=folder)
        if built.returncode or not list(folder.glob("*-none-any.whl")):
            raise KitError(
                f"{requirement} has no wheel for Python {python} on Linux, and is not pure Python: install it on the "
                f"machine and name it in WITHOUT. pip's last line: {(fetched.stdout.splitlines() or ['none'])[-1]}"
            )
    (wheel,) = folder.glob("*.whl")
    return wheel


def _pip(command: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", command, "--no-deps",
         "--wheel-dir" if command == "wheel" else "--dest", str(folder), *arguments],
        env={**os.environ, "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip


def write_parts(wheels: Iterable[Path], folder: Path) -> list[Path]:
    """Move the wheels to `folder`/part-1, part-2, …, each of PART_BYTES at most.

    The largest wheel goes first into the first part with room. Raises KitError for a wheel that is larger than a part.
    """
    parts: list[list[Path]] = []
    sizes: list[int] = []
    for wheel in sorted(wheels, key=lambda wheel: (-wheel.stat().st_size, wheel.name)):
        size = wheel.stat().st_size
        if size > PART_BYTES:
            raise KitError(
                f"{wheel.name} has {size / 1e6:.0f} MB, more than a part of {PART_BYTES / 1e6:.0f}: install it on the "
                "machine and name it in WITHOUT"
            )
        place = next((i for i, used in enumerate(sizes) if used + size <= PART_BYTES), len(parts))
        if place == len(parts):
            parts.append([])
            sizes.append(0)
        parts[place].append(wheel)
        sizes[place] += size
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{_PART}*"):
        shutil.rmtree(old)
    for number, part in enumerate(parts, start=1):
        (folder / f"{_PART}{number}").mkdir()
        for wheel in part:
            shutil.move(wheel, folder / f"{_PART}{number}" / wheel.name)
    return [folder / f"{_PART}{number}" for number in range(1, len(parts) + 1)]


if __name__ == "__main__":
    sys.exit(main())
