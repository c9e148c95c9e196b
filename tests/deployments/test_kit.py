"""Kits: what `make kit` collects, its parts, and an installation from one without an index."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path
from zipfile import ZipFile

import pytest

from deployments import kit, kit_folder, setup
from deployments.kit import main
from deployments.kit_folder import KitError
from deployments.setup import SetupError

CHECKS = {"for": "gpu-checks", "python": "3.11", "without": ["torch"]}


def wheel(folder: Path, name: str, size: int) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    path.write_bytes(random.Random(name).randbytes(size))
    return path


def test_parts_are_no_larger_than_allowed_and_replace_those_of_before(tmp_path: Path) -> None:
    folder = tmp_path / "kit"
    (folder / "part-9").mkdir(parents=True)
    wheels = [wheel(tmp_path, name, size) for name, size in (("a", 60), ("b", 50), ("c", 40), ("d", 50))]
    parts = kit_folder.write(folder, wheels, 100, CHECKS)
    found = [sorted(path.name[0] for path in part.iterdir()) for part in parts]
    assert found == [["a", "c"], ["b", "d"]]
    assert sorted(path.name for path in folder.iterdir()) == ["kit.json", "part-1", "part-2"]
    assert kit_folder.read(folder) == {**CHECKS, "parts": 2}


def test_a_wheel_larger_than_a_part_is_cut_and_put_together(tmp_path: Path) -> None:
    big, small = wheel(tmp_path, "big", 250), wheel(tmp_path, "small", 30)
    content = big.read_bytes()
    parts = kit_folder.write(tmp_path / "kit", [big, small], 100, CHECKS)
    assert [sorted(path.name for path in part.iterdir()) for part in parts] == [
        [f"{big.name}.1of3"], [f"{big.name}.2of3"], [f"{big.name}.3of3", small.name]
    ]  # fmt: skip
    whole = kit_folder.joined(tmp_path / "kit", tmp_path / "joined")
    assert whole == [parts[2] / small.name, tmp_path / "joined" / big.name]
    assert whole[1].read_bytes() == content
    (parts[1] / f"{big.name}.2of3").unlink()
    with pytest.raises(KitError, match=rf"lacks {big.name}\.2of3: copy all parts\.$"):
        kit_folder.joined(tmp_path / "kit", tmp_path / "joined")
    parts[1].rmdir()
    with pytest.raises(KitError, match=r"lacks its folder part-2: copy all parts\.$"):
        kit_folder.read(tmp_path / "kit")
    with pytest.raises(KitError, match=r"is not a kit, it has no kit\.json: collect one with `make kit`\.$"):
        kit_folder.read(tmp_path)


def test_a_lock_is_collected_without_what_a_pattern_names(tmp_path: Path) -> None:
    lock = tmp_path / "gpu.lock"
    lock.write_text('torch==2.13.0\nnvidia_cublas==13.1\nnvidia-nccl==2.28\ntomli==2.0; python_version < "3.11"\n')
    assert kit.locked(lock, ["nvidia-*"], "3.11") == (["torch==2.13.0"], ["nvidia-cublas", "nvidia-nccl"])
    assert kit.locked(lock, ["torch", "nvidia-nccl"], "3.10")[0] == ["nvidia_cublas==13.1", "tomli==2.0"]
    with pytest.raises(KitError, match=r"^--without names troch, which gpu\.lock does not have: remove it$"):
        kit.locked(lock, ["troch"], "3.11")


def test_what_the_machine_has_is_left_out_with_what_it_requires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not what is wanted and missing there: transformers requires numpy, and, by typer, pydantic here."""
    fetched: list[str] = []

    def fetch(requirements: list[str], python: str, folder: Path) -> list[Path]:
        fetched.extend(requirements)
        return [folder]

    needs = {
        "deepspeed": ["pydantic>=2", "numpy", "hjson"],
        "pydantic": ["annotated-types", 'eval-backport; python_version < "3.10"'],
    }
    monkeypatch.setattr(kit, "_wheels", fetch)
    monkeypatch.setattr(kit, "_wheel_requires", lambda path: needs.get(path.name, []))
    monkeypatch.setattr(kit, "pins", lambda file: _pins(file))
    wheels = kit.collected({"transformers", "torch"}, "3.12", tmp_path)
    assert sorted(path.name for path in wheels) == ["annotated-types", "deepspeed", "hjson", "pydantic"]
    assert "deepspeed==0.19.8" in fetched


def _pins(file: Path) -> dict[str, kit.Requirement]:
    lines = ["torch", "deepspeed", "pydantic"] if file == kit.WANTED else [
        "torch==2.0", "deepspeed==0.19.8", "pydantic==2.14", "annotated-types==0.8", "hjson==3.1"
    ]  # fmt: skip
    return {requirement.name: requirement for requirement in map(kit.Requirement, lines)}


def test_a_path_in_place_of_a_version_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--python", "python3", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "error: --python is 'python3': give the version alone, such as 3.12\n"


def test_setup_refuses_a_kit_for_another_device_or_python(tmp_path: Path) -> None:
    kit_folder.write(tmp_path / "kit", [], 100, {"for": "gpu", "python": "3.12", "without": ["torch"]})
    with pytest.raises(SetupError, match=r"is for gpu, and this is a set-up for cpu: collect it with `make kit FOR="):
        setup.check_kit(tmp_path / "kit", "cpu", (3, 12))
    with pytest.raises(SetupError, match=r"is for Python 3\.12, and this is Python 3\.11: name the other one"):
        setup.check_kit(tmp_path / "kit", "gpu", (3, 11))
    assert setup.check_kit(tmp_path / "kit", "gpu", (3, 12)) == ["torch"]


def test_what_a_kit_left_out_is_wanted_in_any_version() -> None:
    lock = 'torch==2.13.0+cpu\nNumPy==2.3.5\ntz_data==1; python_version >= "3.13"'
    assert setup.unpinned(lock, ["torch", "tz-data"]) == 'torch\nNumPy==2.3.5\ntz_data; python_version >= "3.13"'


@pytest.mark.endurance("two-nodes")
@pytest.mark.parts
@pytest.mark.slow("makes an environment with pip")
def test_an_environment_is_installed_from_a_kit_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wheel is in pieces. A package that the kit was collected without is asked for by its name alone."""
    wheels = [package(tmp_path, "kit_one", "word = 1"), package(tmp_path, "kit_two", f"word = {'y' * 3000!r}")]
    kit_folder.write(tmp_path / "kit", wheels, 1000, {"for": "cpu", "python": "3.11", "without": []})
    lock = tmp_path / "cpu.lock"
    lock.write_text("kit-one==1.0\nkit-two==1.0\n")
    monkeypatch.setattr(setup, "VENV", tmp_path / ".venv")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nothing listens there
    setup.create_environment(with_those_of_python=True)
    assert "include-system-site-packages = true" in (tmp_path / ".venv" / "pyvenv.cfg").read_text()
    setup.install_kit(tmp_path / "kit", lock, [])
    code = "import kit_one, kit_two; print(kit_one.word, len(kit_two.word))"
    done = subprocess.run(
        [tmp_path / ".venv" / "bin" / "python", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1 3000\n"
    lock.write_text("kit-one==1.0\nkit-three==1.0\nkit-four==1.0\n")
    with pytest.raises(SetupError, match=r"^the kit lacks a package, No matching distribution found for kit-three: "):
        setup.install_kit(tmp_path / "kit", lock, ["kit-three"])


def package(folder: Path, name: str, code: str) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", code)
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return path
