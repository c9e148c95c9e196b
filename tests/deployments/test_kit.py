"""The wheels of `make kit`: what is collected, and its parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments import kit
from deployments.kit import KitError, main, write_parts


def wheel(folder: Path, name: str, size: int) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    path.write_bytes(bytes(size))
    return path


def test_parts_are_no_larger_than_allowed_and_replace_those_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kit, "PART_BYTES", 100)
    folder = tmp_path / "kit"
    (folder / "part-9").mkdir(parents=True)
    wheels = [wheel(tmp_path, name, size) for name, size in (("a", 60), ("b", 50), ("c", 40), ("d", 50))]
    parts = write_parts(wheels, folder)
    found = [sorted(path.name[0] for path in part.iterdir()) for part in parts]
    assert found == [["a", "c"], ["b", "d"]]
    assert sorted(path.name for path in folder.iterdir()) == ["part-1", "part-2"]


def test_a_wheel_larger_than_a_part_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "PART_BYTES", 100)
    with pytest.raises(KitError, match=r"^big-1\.0-py3-none-any\.whl has .* name it in WITHOUT$"):
        write_parts([wheel(tmp_path, "big", 101)], tmp_path / "kit")


def test_what_the_machine_has_is_left_out_with_what_it_requires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not what is wanted and missing there: transformers requires numpy, and, by typer, pydantic here."""
    fetched: list[str] = []

    def fetch(requirement: str, python: str, folder: Path) -> Path:
        fetched.append(requirement)
        return folder

    needs = {
        "deepspeed": ["pydantic>=2", "numpy", "hjson"],
        "pydantic": ["annotated-types", 'eval-backport; python_version < "3.10"'],
    }
    monkeypatch.setattr(kit, "_wheel", fetch)
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
