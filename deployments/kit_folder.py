"""The folder of a kit: `kit.json`, and wheels in `part-1`, `part-2`, …, each part of a bounded size.

A wheel larger than a part is cut into pieces, `NAME.whl.1of3`, `NAME.whl.2of3`, …. Like setup.py, this uses only the
standard library, and syntax that an old Python can parse.
"""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

DESCRIPTION = "kit.json"
_PIECE = re.compile(r"(.+\.whl)\.(\d+)of(\d+)")
_MIB = 1024**2


class KitError(Exception):
    """Error with its remedy, in one sentence."""


def write(folder: Path, wheels: "list[Path]", part_bytes: int, description: "dict[str, Any]") -> "list[Path]":
    """Write a kit in place of an earlier one, and return its parts. The wheels are moved.

    The largest file goes first into the first part with room. `description` is what `read` returns, without `parts`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("part-*"):
        shutil.rmtree(str(old))
    files = [piece for wheel in wheels for piece in _cut(wheel, part_bytes)]
    free = []  # type: list[int]
    parts = []  # type: list[Path]
    for file in sorted(files, key=lambda file: (-file.stat().st_size, file.name)):
        size = file.stat().st_size
        place = next((i for i, room in enumerate(free) if size <= room), len(parts))
        if place == len(parts):
            parts.append(folder / ("part-%d" % (place + 1)))
            parts[place].mkdir()
            free.append(part_bytes)
        free[place] -= size
        shutil.move(str(file), str(parts[place] / file.name))
    (folder / DESCRIPTION).write_text(json.dumps(dict(description, parts=len(parts)), indent=2) + "\n")
    return parts


def _cut(wheel: Path, part_bytes: int) -> "list[Path]":
    count = -(-wheel.stat().st_size // part_bytes)
    if count <= 1:
        return [wheel]
    pieces = [wheel.with_name("%s.%dof%d" % (wheel.name, number, count)) for number in range(1, count + 1)]
    with wheel.open("rb") as source:
        for piece in pieces:
            with piece.open("wb") as target:
                remaining = part_bytes
                while remaining:
                    block = source.read(min(remaining, _MIB))
                    if not block:
                        break
                    target.write(block)
                    remaining -= len(block)
    wheel.unlink()
    return pieces


def read(folder: Path) -> "dict[str, Any]":
    """Return a kit's description: `for` (cpu, gpu or gpu-checks), `python`, `without`, `parts`.

    Raises KitError if it is no kit, or if a part is missing.
    """
    try:
        description = json.loads((folder / DESCRIPTION).read_text())
    except FileNotFoundError:
        raise KitError("%s is not a kit, it has no %s: collect one with `make kit`." % (folder, DESCRIPTION)) from None
    missing = [number for number in range(1, description["parts"] + 1) if not (folder / ("part-%d" % number)).is_dir()]
    if missing:
        raise KitError("the kit %s lacks its folder part-%d: copy all parts." % (folder, missing[0]))
    return dict(description)


def joined(folder: Path, scratch: Path) -> "list[Path]":
    """Return the paths of a kit's wheels; those that were cut are put together in `scratch`.

    Raises KitError if a piece is missing.
    """
    wheels = sorted(folder.glob("part-*/*.whl"))
    pieces = {}  # type: dict[str, dict[int, Path]]
    counts = {}  # type: dict[str, int]
    for path in folder.glob("part-*/*.whl.*"):
        match = _PIECE.fullmatch(path.name)
        if match:
            name, number, count = match.groups()
            pieces.setdefault(name, {})[int(number)] = path
            counts[name] = int(count)
    scratch.mkdir(parents=True, exist_ok=True)
    for name in sorted(pieces):
        with (scratch / name).open("wb") as target:
            for number in range(1, counts[name] + 1):
                if number not in pieces[name]:
                    raise KitError("the kit %s lacks %s.%dof%d: copy all parts." % (folder, name, number, counts[name]))
                with pieces[name][number].open("rb") as source:
                    shutil.copyfileobj(source, target)
        wheels.append(scratch / name)
    return wheels


def main() -> int:
    """Print the wheels of the kit that the first argument names; pieces are put together in the second."""
    folder, scratch = map(Path, sys.argv[1:])
    try:
        read(folder)
        print("\n".join(map(str, joined(folder, scratch))))
    except KitError as error:
        print("error: %s" % error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
