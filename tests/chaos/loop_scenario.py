"""A loop on a schedule: each round starts from what the last accepted, whatever is killed; a worse model is refused."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient

from rlhf_core.artifacts.aliases import read_alias
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.rounds import RoundEnd, Rounds
from rlhf_core.data.reading import read_rows
from tests.chaos.loop_recipe import PER_ROUND, write_loop_recipe
from tests.chaos.scenario import DRIVER, ENGINE, FLOW, RANK, ROOT, Place, kill, leftovers, processes, until

# What works on a round while the job of a stage runs.
AT_WORK = {
    "generate": (FLOW, DRIVER, ENGINE),
    "pairs": (FLOW, DRIVER),
    "preference": (FLOW, DRIVER, RANK),
    "evaluation": (FLOW, DRIVER, ENGINE),
}
_EVERY = "0.5"  # minutes; each time a process starts, which takes seconds of a core, to skip or to do a round


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "deployments.cli.main", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)


def loop_on_a_schedule(place: Place, client: SyncPrefectClient, folder: Path, rounds: int) -> None:
    """The first round is killed in its DPO; of more rounds, each after it in a stage drawn at random."""
    # As far in many rounds as in few: a model that always says the letter has no pairs, and gets no worse in one round.
    recipe = str(write_loop_recipe(folder / "letters", learning_rate=min(3e-3, 0.01 / rounds)))
    store = open_store(place.environment["ALIGNMENT_STORE"])
    loop = Rounds(store, "letters")
    scheduled = command("schedule", recipe, "--every", _EVERY)
    assert scheduled.returncode == 0, scheduled.stderr
    killed = kill_during_dpo(place, loop, client)
    end = until(lambda: loop.end_of(killed), f"the end of round {killed}")
    assert end.verdict == "accepted" or killed > 1
    assert end.run_id != started_by(loop, killed)  # the next run of the schedule has finished it
    random.seed(0)
    for number in range(killed + 1, rounds + 1):
        kill_once(place, loop, number)
        until(lambda number=number: loop.end_of(number), f"the end of round {number}")
    off = command("schedule", recipe, "--off")
    assert off.returncode == 0, off.stderr
    until(lambda: not unfinished(client), lambda: f"the end of {unfinished(client)}")

    before = read_alias(store, "letters", "accepted")
    assert before is not None
    # As much worse after many rounds, which learn slowly, as after few.
    worse = ("sampled.rewards.own.weight=-1", "dpo.optimizer.learning_rate=3e-3")
    for changes in (("pairs.margin=5",), worse):
        by_hand = command("loop", recipe, *changes, "--rounds", "1")
        assert by_hand.returncode == 0, by_hand.stderr
    *_, without_pairs, last = ends = loop.ends()
    assert (without_pairs.verdict, last.verdict) == ("skipped", "refused"), f"{without_pairs.reason}; {last.reason}"
    assert "no prompt has two different completions whose rewards are more than 5 apart" in without_pairs.reason
    assert read_alias(store, "letters", "accepted") == before
    assert [end.number for end in ends] == list(range(1, len(ends) + 1))
    starts_follow(loop, ends)
    prompts_differ(ArtifactRepository(store), ends, folder)
    until(lambda: not leftovers(place), lambda: f"the end of {leftovers(place)}", 60)


def unfinished(client: SyncPrefectClient) -> list[str]:
    """Runs that are under way."""
    states = {run.name: run.state for run in client.read_flow_runs()}
    return [name for name, state in states.items() if state and not (state.is_final() or state.is_scheduled())]


def started_by(loop: Rounds, number: int) -> str:
    """The run that started the round."""
    start = loop.start_of(number)
    assert start is not None
    return start.run_id


def kill_during_dpo(place: Place, loop: Rounds, client: SyncPrefectClient) -> int:
    """Everything that works on a round, once its DPO has a rank and the schedule has skipped a run because of it: of
    round 1, unless that is over between two looks."""
    ranks = until(lambda: processes(place, RANK), "a round's DPO", every=0.1)
    for rank in ranks:
        rank.suspend()
    until(lambda: "Skipped" in {run.state_name for run in client.read_flow_runs()}, "a run that is skipped")
    kill([*(process for part in (FLOW, DRIVER) for process in processes(place, part)), *ranks])
    number = loop.count()
    assert loop.end_of(number) is None
    return number


def kill_once(place: Place, loop: Rounds, number: int) -> None:
    """One part of the round, unless it ends before that is seen at work."""
    stage = random.choice(list(AT_WORK))
    part = random.choice(AT_WORK[stage])

    def at_work() -> bool:
        return bool(processes(place, f"--stage {stage} ") and processes(place, part))

    until(lambda: loop.count() >= number and (at_work() or loop.end_of(number)), f"round {number}", every=0.1)
    found = processes(place, part)
    print(f"round {number}: {part} is {'killed' if found else 'gone'}, in {stage}", flush=True)
    if found:
        kill(found[:1])


def starts_follow(loop: Rounds, ends: list[RoundEnd]) -> None:
    """Each round starts from what was accepted last."""
    accepted = None
    for end in ends:
        start = loop.start_of(end.number)
        assert start is not None
        assert start.accepted == accepted
        accepted = end.candidate if end.verdict == "accepted" else accepted
    assert all(loop.start_of(b.number).previous_prompts == a.prompts for a, b in pairwise(ends))  # type: ignore[union-attr]


def prompts_differ(repository: ArtifactRepository, ends: list[RoundEnd], folder: Path) -> None:
    used = []
    for end in ends:
        assert end.prompts is not None
        rows = read_rows(repository.fetch(end.prompts, folder / "cache"))
        assert len(rows) == PER_ROUND
        used += [row["prompt"][0]["content"] for row in rows]
    assert len(set(used)) == len(used)
