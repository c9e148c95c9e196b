"""`alignment browse` on a pseudo-terminal: from a run to a token and back, a run in progress, hostile text."""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from deployments.cli.main import app
from deployments.ui import terminal
from deployments.ui.demo import write_demo
from deployments.ui.reading import StoreReader
from deployments.ui.terminal_pages import completion_page, sparkline
from rlhf_core.artifacts.leases import Lease, lease_path, take_lease
from rlhf_core.artifacts.live import LiveFiles
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.logged_rollouts import (
    LoggedCompletion,
    LoggedGroup,
    LoggedSequence,
    LoggedStep,
    encode_step,
    rollouts_file,
)
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.pipeline.record import RunStart, write_start
from rlhf_core.pipeline.run_view import Run
from rlhf_core.report.node_view import NodeView
from tests.terminals import Screen

pytestmark = pytest.mark.parts

ROOT = Path(__file__).resolve().parents[3]
DOWN, UP, LEFT, ENTER, BACK, ESCAPE = "\x1b[B", "\x1b[A", "\x1b[D", "\r", "\x7f", "\x1b"
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\ttext\r\x00"
ESCAPED = r"\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\ttext\r\x00"
RL = ArtifactRef(stage="rl", key="a" * 64)
SEQUENCE = LoggedSequence(
    texts=("hi", HOSTILE, "no"), token_ids=(1, 2, 3), trained=(False, True, True), engine_logprobs=(-1.0, -2000.0),
    trainer_logprobs=(-1.5, -1.0), advantages=(0.25, None), values=(0.125, 0.5),
)  # fmt: skip
COMPLETION = LoggedCompletion(
    text=HOSTILE, finish_reason=HOSTILE, turns=2, reward=None, rewards={HOSTILE: 0.5, "reward": None},
    environment={"moves": 3}, versions=((1, 7), (1, 8)), sequences=(SEQUENCE, SEQUENCE),
)  # fmt: skip
GROUP = LoggedGroup(
    id="r", prompt=({"role": HOSTILE, "content": [{"text": HOSTILE}]},), answer=HOSTILE, completions=(COMPLETION,)
)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """The demo's first run, and one of a single stage that nothing has computed yet."""
    monkeypatch.setenv("ALIGNMENT_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "cache"))
    store = LocalStore(tmp_path / "store")
    write_demo(ArtifactRepository(store), runs=1, steps=5)
    start = RunStart(
        run_id="live", recipe={"name": HOSTILE}, overrides=("x=1",), started_at=datetime.now(UTC), nodes={"rl": RL}
    )
    write_start(store, start)
    live = LiveFiles(store, RL)
    live.put("metrics.jsonl", b'{"step": 0, "time": 1.0, "reward": 1.0}\n')
    step = LoggedStep(step=1, prompts=1, completions=1, histograms={}, groups=(GROUP,))
    live.put(f"rollouts/{rollouts_file(1)}", encode_step(step))
    return store


@pytest.fixture
def reader(store: LocalStore, tmp_path: Path) -> StoreReader:
    return StoreReader(ArtifactRepository(store), tmp_path / "cache of the test")


@contextmanager
def browsing(run_id: str) -> Iterator[Screen]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "PYTHONUTF8": "1"}
    for name in ("COLUMNS", "LINES"):
        environment.pop(name, None)
    screen = Screen([sys.executable, "-m", "deployments.cli.main", "browse", run_id], environment)
    try:
        yield screen
    finally:
        screen.close()


def demo_run(reader: StoreReader) -> tuple[Run, NodeView]:
    run = next(run for run in reader.runs() if run.name == "sums")
    node = reader.node(run, "rl")
    assert node is not None
    return run, node


def test_from_a_run_to_a_token_and_back(reader: StoreReader) -> None:
    run, node = demo_run(reader)
    logged = reader.logged_step(node, 5)
    assert logged is not None
    rewards = [[each.reward or 0.0 for each in group.completions] for group in logged.groups]
    lowest = min(range(len(rewards)), key=lambda index: (min(rewards[index]), sum(rewards[index])))
    best = rewards[lowest].index(max(rewards[lowest]))
    group, completion = logged.groups[lowest], logged.groups[lowest].completions[best]
    (sequence,) = completion.sequences
    advantages = [each.sequences[0].advantages[0] for each in group.completions]

    with browsing(run.run_id) as screen:
        stages = screen.press("", "rl computed 1:00 reward ")
        assert stages.splitlines()[0] == "sums"
        assert f"run {run.run_id}, succeeded, started 2026-11-01 09:00 UTC, 1:00" in stages
        assert "evaluation.rl computed 1:00 exact " in stages
        metrics = screen.press(f"{DOWN}{ENTER}", "rollouts logged steps: 5 1 5")
        points = [value for _, value in reader.curves(node)["reward"]]
        assert f"reward {sparkline(points, 32)} {points[0]:.3f} {points[-1]:.3f}" in metrics
        assert "learning_rate 0.001 0.001" in metrics
        values = screen.press(f"{DOWN}{ENTER}", "sums › rl › reward\n")
        assert f"\n5 {points[-1]:.3f}\n" in values
        screen.press(BACK, "sums › rl\n")
        steps = screen.press(f"{UP}{ENTER}", "sums › rl › rollouts\n")
        assert f"\n1 {points[0]:.3f} 0 12 2\n" in steps
        assert "\n4 " in screen.press(f"G{ENTER}", "sums › rl › rollouts › step 5\n")
        shown = " ".join(f"{reward:.0f}" for reward in rewards[lowest])
        prompt = screen.press(ENTER, f"sums › rl › rollouts › step 5 › prompt {lowest + 1}\n")
        assert f"{group.prompt[0]['content']}\nanswer: {group.answer}\n" in prompt
        assert f"{best + 1} {rewards[lowest][best]:.0f} {rewards[lowest][best]:.0f} {advantages[best]:.3f} " in prompt
        assert f" stop 1 {completion.text}" in prompt
        tokens = screen.press(ENTER, f" › completion {best + 1}\n")
        row = (sequence.engine_logprobs[0], sequence.trainer_logprobs[0])  # type: ignore[index]
        assert (
            f"\n2 {completion.text[0]} {sequence.token_ids[1]} {advantages[best]:.3f} {row[0]:.3f} {row[1]:.3f} "
            f"{math.exp(row[1] - row[0]):.3f} {sequence.entropies[0]:.3f} "  # type: ignore[index]
            f"{sequence.reference_logprobs[0]:.3f}\n"  # type: ignore[index]
        ) in tokens
        assert f"assistant:\n{completion.text}\nanswer: {group.answer}" in tokens
        screen.press("p", "there is none: this is the first")
        screen.press("n", f" › prompt {lowest + 1} › completion ")
        screen.press(LEFT, f" › prompt {lowest + 1}\n")
        again = screen.press(ESCAPE, "sums › rl › rollouts › step 5\n")
        assert f" {shown} {group.answer} {group.prompt[0]['content']}" in again
        screen.press("p", "sums › rl › rollouts › step 4\n")
        screen.press("hhh", "rl computed 1:00 reward ")
        assert not screen.is_canonical()
        assert screen.end("q") == 0
        assert screen.received.rstrip().endswith("\x1b[?1049l\x1b[?25h")


def test_a_run_in_progress_is_read_again_and_hostile_text_is_escaped(store: LocalStore) -> None:
    lease = take_lease(store, lease_path(RL))
    assert isinstance(lease, Lease)
    with browsing("live") as screen, lease:
        stages = screen.press("", "rl running")
        assert stages.splitlines()[0] == ESCAPED
        assert "run live, unfinished, started " in stages
        screen.press(ENTER, "rollouts logged steps: 1 1 1\nreward 1 1 1 1\n")
        more = b'{"step": 1, "time": 2.0, "reward": 0.25}\n'
        LiveFiles(store, RL).put("metrics.jsonl", b'{"step": 0, "time": 1.0, "reward": 1.0}\n' + more)
        screen.press("r", "reward █▁ 1 0.250 0.250 1")
        screen.press(ENTER, "rollouts\nstep reward\n1 1\n")
        assert f" – – {ESCAPED} r" in screen.press(ENTER, "step 1\n")
        prompt = screen.press(ENTER, "prompt 1\n")
        assert f"completion reward {ESCAPED} reward advantage tokens turns ended by weights text" in prompt
        assert f"\n1 – 0.500 – 0.250 4 2 {ESCAPED} 7, 8 {ESCAPED}" in prompt
        tokens = screen.press(ENTER, "completion 1\n")
        assert f"\n1 2 {ESCAPED} 2 0.250 -1 -1.500 0.607 0.125" in tokens
        assert "\n2 1 hi 1\n" in tokens
        broken = COMPLETION.model_copy(update={"sequences": (SEQUENCE.model_copy(update={"texts": ()}),)})
        step = LoggedStep(
            step=1,
            prompts=1,
            completions=1,
            histograms={},
            groups=(GROUP.model_copy(update={"completions": (broken,)}),),
        )
        LiveFiles(store, RL).put(f"rollouts/{rollouts_file(1)}", encode_step(step))
        screen.press("hh", "step 1\n")
        screen.press("r", "the rollouts of step 1 is not a step of logged rollouts: some tokens of it have no values")
        LiveFiles(store, RL).clear()
        screen.press("r", "rl has no logged rollouts: `log_rollouts` is none, or no step has ended yet")
        screen.resize(12, 60)
        screen.press("", "… › rollouts › step 1\n")
        assert screen.end("\x03") == 130
    received = screen.received
    assert not {c for c in received if unicodedata.category(c) in ("Cc", "Cf")} - {"\x1b", "\r", "\n"}
    assert "\x1b]" not in received
    assert "\x1b[2J" not in received
    assert "interrupted before it was done" in received


def test_elsewhere_the_stages_are_printed(reader: StoreReader) -> None:
    run, node = demo_run(reader)
    printed = CliRunner().invoke(app, ["browse", run.run_id])
    assert printed.exit_code == 0, printed.output
    header, _, rl, *_ = printed.stdout.splitlines()
    assert header == "stage\tstate\ttime\tmetrics"
    assert rl.startswith("rl\tcomputed\t1:00\treward 0.")
    document = json.loads(CliRunner().invoke(app, ["browse", run.run_id, "--json"]).stdout)
    assert (document["run"], document["recipe"], document["outcome"]) == (run.run_id, "sums", "succeeded")
    stage = document["stages"][1]
    assert (stage["name"], stage["artifact"], stage["state"]) == ("rl", node.ref.full, "computed")
    assert (stage["seconds"], stage["metrics"]["kl"]) == (60.0, 0.1)
    (waiting,) = json.loads(CliRunner().invoke(app, ["browse", "live", "--json"]).stdout)["stages"]
    assert (waiting["state"], waiting["seconds"], waiting["metrics"]) == ("waiting", None, {})


@pytest.mark.parametrize("run_id", ["none", "../runs", "a/b", "\x1b[31m"])
def test_a_run_that_is_not_there_is_one_sentence(store: LocalStore, run_id: str) -> None:
    done = CliRunner().invoke(app, ["browse", run_id])
    shown = run_id.replace("\x1b", r"\x1b")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == f"error: {store.url} has no run {shown}: `alignment runs` lists those that there are\n"


def test_a_long_page_is_cut_to_the_terminal_and_its_header_stays(reader: StoreReader) -> None:
    many = 300
    sequence = LoggedSequence(
        texts=("日本" * 100,) * many, token_ids=tuple(range(many)), trained=(True,) * many,
        engine_logprobs=(-1.0,) * many, advantages=(0.5,) * many,
    )  # fmt: skip
    completion = COMPLETION.model_copy(update={"text": "a word " * 100, "sequences": (sequence,)})
    for columns, rows in ((60, 10), (20, 4), (5, 2), (1, 1)):
        output = io.StringIO()
        console = Console(file=output, force_terminal=True, width=columns, height=rows, markup=False)
        screen = terminal.Screen(console, partial(completion_page, 0, GROUP, completion))
        with console.screen():
            for key in ("down", "rows", "page down", "page down", "up", "end", "page up", "top", "up", "end"):
                screen.press(key)
                output.truncate(output.seek(0))
                screen.draw()
                assert output.getvalue().count("\x1b[7m") > 0 or rows < 3, f"{key}: the cursor is out of sight"
            if columns == 60:
                header, *tokens = re.split(r"\x1b\[\d+;1H", output.getvalue())[2:-1]
                assert "token" in header
                assert ["300" in line for line in tokens] == [False] * 6 + [True]


def test_a_sparkline_has_the_mean_of_each_part() -> None:
    assert sparkline([0.0, 7.0], 8) == "▁█"
    assert sparkline([0, 0, 1, 1, 2, 2, 7, 7], 4) == "▁▂▃█"
    assert sparkline([3.0], 8) == sparkline([3.0, 3.0], 1) == "▁"
