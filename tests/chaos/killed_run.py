"""A run of which parts are killed while SFT is held, and its engine while RL is, beside one that nothing disturbs."""

from __future__ import annotations

from collections.abc import Mapping

from prefect.client.orchestration import SyncPrefectClient

from tests.chaos.kills import Kill
from tests.chaos.recipe import CHECKPOINT_STEPS
from tests.chaos.scenario import Place, Run, leftovers, manifests, undisturbed, until, weights


def require_undisturbed_end(
    place: Place, client: SyncPrefectClient, kills: Mapping[str, Kill], kill_engine: Kill
) -> None:
    """Raises AssertionError if the weights differ, if anything is computed twice, or if something is left."""
    run = Run(place, client)
    run.hold("sft", 1)
    before = {name: manifest.finished_at for name, manifest in manifests(run.store, place).items()}
    assert before.keys() >= {"base", *run.inputs("sft")}
    for number, (name, kill_it) in enumerate(kills.items()):
        print(f"killing: {name}", flush=True)
        step = run.hold("sft", CHECKPOINT_STEPS)
        if number == 0:
            with undisturbed(place) as store:  # the cores are idle while the run counts as running
                kill_it(run, "sft", step)
        else:
            kill_it(run, "sft", step)
    run.let_go()
    print("killing: engine", flush=True)
    kill_engine(run, "rl", run.hold("rl", 1))
    state = run.wait_for_its_end()
    assert state.name == "Completed", state
    found = manifests(run.store, place)
    assert weights(found) == weights(manifests(store, place))
    assert {name.partition("/")[0] for name in weights(found)} >= {"base", "pretrain", "sft"}
    assert {name: found[name].finished_at for name in before} == before  # nothing is computed twice
    until(lambda: not leftovers(place), lambda: f"the end of {leftovers(place)}", 60)
