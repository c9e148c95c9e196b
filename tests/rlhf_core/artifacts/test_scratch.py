"""What a killed process leaves, the next removes; what a living one has, nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_core.system import scratch
from rlhf_core.system.scratch import new_folder, remove_all, scratch_folder, sweep

pytestmark = pytest.mark.parts

HOLDS = """
import sys, time
from pathlib import Path
from rlhf_core.system.scratch import new_folder
for name in ("one", "two"):
    folder = new_folder(name, Path(sys.argv[1]))
    (folder / "inside").mkdir()
    (folder / "inside" / "file").write_bytes(b"x")
print("ready", flush=True)
time.sleep(100)
"""


def holder(root: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(root)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_folders_of_the_living_stay_and_those_of_the_dead_go(tmp_path: Path) -> None:
    (tmp_path / "alignment-of-a-user").mkdir()
    living, dead = holder(tmp_path), holder(tmp_path)
    try:
        assert len(list(tmp_path.iterdir())) == 5
        dead.kill()
        dead.wait()
        with scratch_folder("mine", tmp_path) as mine:
            sweep(tmp_path)
            names = [path.name.split("-")[2] for path in tmp_path.glob("alignment-scratch-*")]
            assert sorted(names) == ["mine", "one", "two"]
            assert mine.is_dir()
    finally:
        living.send_signal(signal.SIGKILL)
        living.wait()
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["alignment-of-a-user"]


def test_all_of_a_process_can_be_removed(tmp_path: Path) -> None:
    folders = [new_folder("a", tmp_path), new_folder("b", tmp_path)]
    remove_all()
    assert [folder for folder in folders if folder.exists()] == []


def test_a_folder_too_deep_for_recursion_is_removed(tmp_path: Path) -> None:
    """Left by a process that nested folders until it was killed."""
    (folder := tmp_path / "alignment-scratch-deep").mkdir()
    deep = "import os\nfor _ in range(3000):\n    os.mkdir('a')\n    os.chdir('a')"
    subprocess.run([sys.executable, "-c", deep], cwd=folder, check=True)
    sweep(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "alignment-scratch-link").symlink_to(tmp_path / "kept")
    sweep(tmp_path)
    assert (tmp_path / "kept").is_dir()


def test_a_folder_that_a_sweep_takes_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Path] = []
    locked = scratch._locked

    def late(folder: Path) -> int | None:
        if not taken:
            taken.append(folder)
            os.rmdir(folder)
        return locked(folder)

    monkeypatch.setattr(scratch, "_locked", late)
    with scratch_folder("x", tmp_path) as folder:
        assert folder != taken[0]
        assert folder.is_dir()
