"""A loop on a schedule: each round starts from what the last accepted, whatever is killed; a worse model is refused."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient

from rlhf_core.artifacts.aliases import read_alias
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.rounds import RoundEnd, Rounds
from rlhf_core.data.reading import read_rows
from tests.chaos.loop_recipe import PER_ROUND, write_loop_recipe
from tests.chaos.scenario import ROOT, Place, kill, leftovers, processes, until

PARTS = ("flows.process", "rlhf_core.stages --store", "ray::_Rank")
_EVERY = "0.5"  # minutes; each time a process starts, which takes seconds of a core, to skip or to do a round


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "deployments.cli.main", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)


def loop_on_a_schedule(place: Place, client: SyncPrefectClient, folder: Path, rounds: int) -> None:
    """The first round is killed in its DPO; of more rounds, those after it at random moments."""
    # Slowly in many rounds: a model that always says the letter has no pairs.
    recipe = str(write_loop_recipe(folder / "letters", learning_rate=3e-3 if rounds < 5 else 5e-4))
    store = open_store(place.environment["ALIGNMENT_STORE"])
    loop = Rounds(store, "letters")
    scheduled = command("schedule", recipe, "--every", _EVERY)
    assert scheduled.returncode == 0, scheduled.stderr
    killed = kill_during_dpo(place, loop, client)
    end = until(lambda: loop.end_of(killed), f"the end of round {killed}")
    assert end.verdict == "accepted" or killed > 1
    assert end.run_id != started_by(loop, killed)  # the next run of the schedule has finished it
    random.seed(0)
    while loop.count() < rounds:
        time.sleep(random.uniform(5, 40))  # so that most rounds are killed, and each ends
        if found := [each for part in PARTS if (each := processes(place, part))]:
            kill(random.choice(found)[:1])
    until(lambda: loop.end_of(max(rounds, killed)), f"the end of round {rounds}", 1500)
    off = command("schedule", recipe, "--off")
    assert off.returncode == 0, off.stderr
    until(lambda: not unfinished(client), lambda: f"the end of {unfinished(client)}")

    before = read_alias(store, "letters", "accepted")
    assert before is not None
    for change in ("pairs.margin=5", "sampled.rewards.own.weight=-1"):
        by_hand = command("loop", recipe, change, "--rounds", "1")
        assert by_hand.returncode == 0, by_hand.stderr
    *_, without_pairs, worse = ends = loop.ends()
    assert (without_pairs.verdict, worse.verdict) == ("skipped", "refused")
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
    ranks = until(lambda: processes(place, "ray::_Rank"), "a round's DPO", every=0.1)
    for rank in ranks:
        rank.suspend()
    until(lambda: "Skipped" in {run.state_name for run in client.read_flow_runs()}, "a run that is skipped")
    kill([*(process for part in PARTS[:2] for process in processes(place, part)), *ranks])
    number = loop.count()
    assert loop.end_of(number) is None
    return number


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
