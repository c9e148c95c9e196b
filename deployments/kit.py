"""Collect wheels for a machine without a network: `make kit FOR=gpu PYTHON=3.12 WITHOUT=torch,nvidia-*`.

For `cpu` and `gpu`: all packages of that lock, from which `make setup KIT=FOLDER` installs `.venv`. For `gpu-checks`:
those of requirements/gpu-checks.txt and their requirements, in the versions of gpu.lock, which `make gpu-checks
KIT=FOLDER` installs into the folder's `site`.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from email.parser import HeaderParser
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deployments import kit_folder
from deployments.kit_folder import KitError
from deployments.setup import LOCKS, SetupError, choose_device

WANTED = LOCKS["gpu"].with_name("gpu-checks.txt")
GPU_CHECKS = "gpu-checks"
PART_MB = 60
RUNNING = "{}.{}".format(*platform.python_version_tuple())
# pip takes a platform by its exact name, and prefers the first: wheels of machines with glibc 2.28 and older ones, and
# newer ones for packages that have no others.
_PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in (*range(28, 4, -1), *range(29, 36))), "manylinux2014_x86_64",
              "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="deployments.kit", description=__doc__)
    parser.add_argument("folder", type=Path, help="of the kit; parts of an earlier one are replaced")
    parser.add_argument("--for", dest="purpose", default="", choices=("", *LOCKS, GPU_CHECKS),
                        help="the default is the build that `make setup` chooses here")  # fmt: skip
    parser.add_argument("--python", default=RUNNING, help=f"version of that machine's Python, by default {RUNNING}")
    parser.add_argument("--without", default="", help="packages that the machine has, separated by commas")
    parser.add_argument("--part-mb", type=int, default=PART_MB, help=f"size of a part, by default {PART_MB}")
    options = parser.parse_args(arguments)
    try:
        if not re.fullmatch(r"3\.\d+", options.python):
            raise KitError(f"--python is {options.python!r}: give the version alone, such as 3.12")
        if options.part_mb < 1:
            raise KitError(f"--part-mb is {options.part_mb}: give at least 1")
        purpose = options.purpose or choose_device(os.environ.get("ALIGNMENT_DEVICE", ""))
        without: list[str] = [canonicalize_name(name) for name in re.split(r"[,\s]+", options.without) if name]
        options.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=options.folder) as scratch:  # the same file system
            if purpose == GPU_CHECKS:
                wheels = collected(without, options.python, Path(scratch))
            else:
                pinned, without = locked(LOCKS[purpose], without, options.python)
                wheels = _wheels(pinned, options.python, Path(scratch))
            description = {"for": purpose, "python": options.python, "without": without}
            for part in kit_folder.write(options.folder, wheels, options.part_mb * 1_000_000, description):
                size = sum(file.stat().st_size for file in part.iterdir())
                print(f"{part}: {size / 1e6:.1f} MB, {len(list(part.iterdir()))} files")
    except (KitError, SetupError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def pins(file: Path) -> dict[str, Requirement]:
    """Return the requirements of a file by canonical name."""
    lines = (line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    parsed = [Requirement(line) for line in lines if line]
    return {canonicalize_name(requirement.name): requirement for requirement in parsed}


def locked(lock: Path, without: Iterable[str], python: str) -> tuple[list[str], list[str]]:
    """Return the pins of a lock for this Python, and the names that `without` leaves out, which may be patterns.

    Raises KitError for one that leaves out nothing.
    """
    all_pins = {name: pin for name, pin in pins(lock).items() if pin.marker is None or _applies(pin, python)}
    left_out: set[str] = set()
    for pattern in without:
        found = {name for name in all_pins if fnmatchcase(name, pattern)}
        if not found:
            raise KitError(f"--without names {pattern}, which {lock.name} does not have: remove it")
        left_out |= found
    pinned = [f"{pin.name}{pin.specifier}" for name, pin in all_pins.items() if name not in left_out]
    return pinned, sorted(left_out)


def collected(present: Iterable[str], python: str, folder: Path) -> list[Path]:
    """Collect wheels in `folder` of what the GPU checks need and its requirements that are not present."""
    lock, wanted = pins(LOCKS["gpu"]), pins(WANTED)
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
            raise KitError(f"{name} has no version in {LOCKS['gpu'].name}: give it one in {WANTED.name}")
        print(f"{name}{requirement.specifier}", flush=True)
        (wheels[name],) = _wheels([f"{name}{requirement.specifier}"], python, folder / name)
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
    for requirement in map(Requirement, requirements):
        if _applies(requirement, python):
            yield canonicalize_name(requirement.name)


def _applies(requirement: Requirement, python: str) -> bool:
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    return requirement.marker is None or requirement.marker.evaluate(environment)


def _wheel_requires(wheel: Path) -> list[str]:
    with ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        return HeaderParser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist", [])


def _wheels(requirements: Sequence[str], python: str, folder: Path) -> list[Path]:
    """Return wheels for the other machine: downloaded, or built here of a project that has only its source.

    Raises KitError if one can be neither downloaded nor built.
    """
    platforms = [argument for name in _PLATFORMS for argument in ("--platform", name)]
    _pip("download", "--python-version", python, "--implementation", "cp", *platforms, *requirements, folder=folder)
    for source in sorted(path for path in folder.iterdir() if path.suffix != ".whl"):
        before = {*folder.glob("*.whl")}
        _pip("wheel", str(source), folder=folder)
        source.unlink()
        (built,) = {*folder.glob("*.whl")} - before
        if python != RUNNING and not built.name.endswith("-none-any.whl"):
            raise KitError(
                f"{source.name} has no wheel for Python {python}, and is not pure Python: collect the kit with "
                "that Python's own .venv, or install it on the machine and name it in WITHOUT"
            )
    return sorted(folder.glob("*.whl"))


def _pip(command: str, *arguments: str, folder: Path) -> None:
    # Without build isolation: DeepSpeed's setup imports torch. Its operators are left out; they need CUDA here.
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", command, "--no-deps", "--no-build-isolation",
         "--wheel-dir" if command == "wheel" else "--dest", str(folder), *arguments],
        env={**os.environ, "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        errors = [line for line in done.stdout.splitlines() if line.startswith("ERROR:")] or done.stdout.splitlines()
        raise KitError(
            f"pip {command} fails, {(errors or ['without a message'])[-1].removeprefix('ERROR:').strip().rstrip('.')}: "
            "check the network and pip's index, or install the package on the machine and name it in WITHOUT"
        )


if __name__ == "__main__":
    sys.exit(main())
