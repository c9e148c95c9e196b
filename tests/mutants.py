"""Plants the faults of mutants.toml one at a time, in a copy of the checkout, and says which test finds each.

python -m tests.mutants [NAME …]
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", ".local-stack", "outputs", "__pycache__", ".*_cache")
SECONDS = 900
_TESTS_FAILED = 1  # pytest's exit status; others mean that nothing could be tested


@dataclass(frozen=True, slots=True)
class Mutant:
    promise: str  # of the product, which the fault breaks
    file: str
    before: str  # once in the file
    after: str
    tests: Sequence[str]  # files, classes or functions, of which one must fail

    def planted(self, text: str) -> str:
        """`text`, the content of the file, with the fault."""
        if text.count(self.before) != 1:
            raise ValueError(f"{self.file} has {text.count(self.before)} times what is replaced:\n{self.before}")
        return text.replace(self.before, self.after)


@dataclass(frozen=True, slots=True)
class Verdict:
    found_by: str  # the first test that fails; empty: none does
    seconds: float


def read_mutants() -> dict[str, Mutant]:
    with (ROOT / "tests" / "mutants.toml").open("rb") as file:
        return {name: Mutant(**fields) for name, fields in tomllib.load(file).items()}


def tier_of(test: str) -> str:
    """The tier of a test's file, where the checkout has tiers."""
    file = test.partition("::")[0]
    if not file or not (ROOT / "tests" / "tiers.py").is_file():
        return ""
    from tests.tiers import tier_of_file

    return str(tier_of_file(ROOT / file))


def judge(mutant: Mutant, checkout: Path) -> Verdict:
    """Run the tests with the fault in `checkout`, which is as before afterwards. Raises RuntimeError if none ran."""
    file = checkout / mutant.file
    text = file.read_text(encoding="utf-8")
    began = time.monotonic()
    file.write_text(mutant.planted(text), encoding="utf-8")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", *mutant.tests],
            cwd=checkout, env={**os.environ, "PYTHONPATH": str(checkout)}, timeout=SECONDS, check=False, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    finally:
        file.write_text(text, encoding="utf-8")
    if done.returncode not in (0, _TESTS_FAILED):
        raise RuntimeError(f"pytest ended with status {done.returncode}:\n{done.stdout}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+\.py.*?)(?: - |$)", done.stdout, re.MULTILINE)
    return Verdict(failed[1] if failed else "", time.monotonic() - began)


def require_passing(mutants: Mapping[str, Mutant], checkout: Path) -> None:
    """Raises RuntimeError if a test fails without any fault: it would find every mutant."""
    tests = sorted({test for mutant in mutants.values() for test in mutant.tests})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "-p", "no:cacheprovider", *tests],
        cwd=checkout, env={**os.environ, "PYTHONPATH": str(checkout)}, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError("the tests do not pass without a fault")


def main(names: Sequence[str]) -> int:
    """The number of mutants that no test finds."""
    known = read_mutants()
    if unknown := set(names) - known.keys():
        raise SystemExit(f"there is no mutant {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    chosen = {name: known[name] for name in names or known}
    missed = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        checkout = Path(folder) / "checkout"
        shutil.copytree(ROOT, checkout, ignore=NOT_COPIED, symlinks=True)
        require_passing(chosen, checkout)
        width = 2 + max(map(len, chosen))
        print(f"{'mutant':{width}}{'found':11}{'tier':11}{'seconds':>8}  by", flush=True)
        for name, mutant in chosen.items():
            verdict = judge(mutant, checkout)
            missed += not verdict.found_by
            found = "found" if verdict.found_by else "NOT FOUND"
            print(
                f"{name:{width}}{found:11}{tier_of(verdict.found_by):11}{verdict.seconds:8.1f}  {verdict.found_by}",
                flush=True,
            )
    print(f"{len(chosen) - missed} of {len(chosen)} found")
    return missed


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
