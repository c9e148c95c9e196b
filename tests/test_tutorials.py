"""The commands of the tutorials `first-run` and `your-loop` do what they say, in order, on a stack of their own."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.request import HTTPCookieProcessor, build_opener

import pytest

from tests.deployments.test_stack import clear_environment
from tests.services import free_ports

pytestmark = [pytest.mark.endurance("two-nodes"), pytest.mark.timeout(3000)]

ROOT = Path(__file__).parents[1]


class Reader:
    """Types the commands of a page into a shell, in a checkout of its own."""

    def __init__(self, checkout: Path) -> None:
        self.checkout = checkout
        self.output = ""  # of the last command

    def follow(self, page: str) -> list[str]:
        """Run each command of the page's blocks; return them as they were run."""
        text = (ROOT / "docs/tutorials" / page).read_text(encoding="utf-8")
        ran = []
        for block in re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            for command in map(self.filled, block.splitlines()):
                ran.append(command)
                if command.startswith("alignment ui"):
                    self.look_at_pages(command)
                else:
                    self.run(command, said="Hello!\n" if command.startswith("alignment chat") else "")
        return ran

    def filled(self, line: str) -> str:
        """The command of a line, with values for what it leaves to the reader."""
        command = " ".join(shlex.split(line, comments=True, posix=False))
        if command == "make demo":
            return "make -o setup demo"  # the tests have the environment that it makes
        if "RUN RUN" in command:
            newest, earlier, *_ = [run["run"] for run in self.json("alignment runs --json")["runs"]]
            command = command.replace("RUN RUN", f"{earlier} {newest}")
        if "rl/KEY" in command:
            artifacts = self.json("alignment artifacts --stage rl --json")["artifacts"]
            command = command.replace("rl/KEY", artifacts[0]["artifact"][:7])
        if command == "alignment ui":
            command += f" --port {free_ports(1)[0]}"
        return command

    def run(self, command: str, said: str = "") -> None:
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.checkout, input=said, capture_output=True, text=True, check=False
        )
        self.output = done.stdout
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"

    def json(self, command: str) -> dict[str, list[dict[str, str]]]:
        self.run(command)
        document: dict[str, list[dict[str, str]]] = json.loads(self.output)
        return document

    def look_at_pages(self, command: str) -> None:
        with subprocess.Popen(shlex.split(command), cwd=self.checkout, stdout=subprocess.PIPE, text=True) as pages:
            try:
                assert pages.stdout is not None
                url = next(line.split()[-1] for line in pages.stdout if line.startswith("open "))
                with build_opener(HTTPCookieProcessor()).open(url) as answer:  # the token becomes a cookie
                    assert b"tiny" in answer.read()
            finally:
                pages.terminate()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """In links to the checkout, whose own `outputs` is left alone, with a stack in a folder of its own."""
    folder = tmp_path_factory.mktemp("tutorials")
    (checkout := folder / "checkout").mkdir()
    for path in ROOT.iterdir():
        if path.name not in ("outputs", ".git", ".local-stack"):
            (checkout / path.name).symlink_to(path)
    with pytest.MonkeyPatch.context() as patch:
        clear_environment(patch, folder / "stack")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("ALIGNMENT_STACK_TIMEOUT", "600")  # the machine may be busy
        patch.setenv("PATH", f"{ROOT / '.venv/bin'}:{os.environ['PATH']}")  # as `activate` does
        try:
            yield Reader(checkout)
        finally:
            Reader(checkout).run("alignment down")


@pytest.mark.slow("runs `tiny` twice")
@pytest.mark.endurance("benchmarks")  # CI runs one part, so that none may be long
def test_a_first_run_is_as_its_page_says(reader: Reader) -> None:
    ran = reader.follow("first-run.md")
    assert [command.split()[1] for command in ran if command.startswith("alignment")] == [
        "ui", "artifacts", "runs", "plan", "run", "diff", "chat", "down",
    ]  # fmt: skip


@pytest.mark.slow("two rounds of a loop")
def test_a_loop_is_as_its_page_says(reader: Reader) -> None:
    ran = reader.follow("your-loop.md")
    assert [command.split()[1] for command in ran] == ["up", "loop", "rounds", "log", "schedule", "schedule"]
    assert [line["number"] for line in reader.json("alignment rounds tiny-loop --json")["rounds"]] == [1, 2]
