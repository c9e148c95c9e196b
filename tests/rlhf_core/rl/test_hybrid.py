"""Whose turn it is: legal transitions, refused calls, and what ranks and engines are told at each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.rl.hybrid import HybridEngine, Turn
from rlhf_core.rollout.engine import Request, RolloutEngine, SamplingParameters
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.publication import Publication
from rlhf_core.rollout.scripted import ScriptedEngine
from rlhf_core.rollout.transport.base import WeightManifest
from rlhf_core.rollout.transport.folder import SharedFolder
from rlhf_core.training.group import InlineGroup, host_memory_only

pytestmark = pytest.mark.parts

GREEDY = Request([5], SamplingParameters(temperature=0.0, top_p=1.0, max_tokens=1, stop_token_ids=()), seed=None)
WEIGHTS = Publication(SharedFolder(Path("weights")), WeightManifest(1, {}, {}), dict)


class Told:
    """A rank and an engine that write down what they are told."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def offload(self) -> None:
        self.log.append("offload")

    def reload(self) -> None:
        self.log.append("reload")

    def update_policy(self) -> None:
        self.log.append("update")

    def send_weights(self) -> None:
        self.log.append("send")

    @host_memory_only
    def read_weights(self) -> None:
        self.log.append("read")


def hybrid(*, adapters: bool = False, on_device: bool = False) -> tuple[HybridEngine[Told], list[str]]:
    told = Told()

    class Engine(ScriptedEngine):
        def sleep(self, *, keep_weights: bool) -> None:
            told.log.append(f"sleep, keep_weights={keep_weights}")

        def wake(self, *, cache: bool = True) -> None:
            told.log.append("wake" if cache else "wake without cache")

    engines = InlineEngines(Engine(lambda *_: [1]))
    made = HybridEngine(InlineGroup(lambda: told), engines, adapters=adapters, on_device=on_device)
    assert told.log == ["offload"]
    told.log.clear()
    return made, told.log


def at(turn: Turn) -> HybridEngine[Told]:
    made, _ = hybrid()
    if turn is not Turn.SAMPLING:
        made.train()
    if turn is Turn.PUBLISHING:
        made.publish()
    assert made.turn is turn
    return made


def test_the_turns_of_a_step() -> None:
    ours, log = hybrid()
    ours.engines.share(RolloutEngine.generate, [GREEDY])
    ours.train()
    ours.workers.call(Told.update_policy)
    ours.train()  # it is already
    ours.publish()
    ours.workers.call(Told.read_weights)
    ours.engines.publish(WEIGHTS)
    ours.serve()
    ours.engines.call(RolloutEngine.probe, [[5]])
    ours.sample()
    ours.sample()
    ours.engines.share(RolloutEngine.generate, [GREEDY])
    assert log == ["sleep, keep_weights=False", "reload", "update", "offload", "wake", "read"]


def test_weights_on_the_device_are_sent_before_the_ranks_leave_it() -> None:
    ours, log = hybrid(on_device=True)
    ours.train()
    ours.publish()
    with pytest.raises(RuntimeError, match="cannot update_policy in the state publishing"):
        ours.workers.call(Told.update_policy)
    ours.workers.begin(Told.send_weights).results()
    ours.engines.publish(WEIGHTS)
    with pytest.raises(RuntimeError, match="cannot probe while the ranks are on the devices; serve first"):
        ours.engines.call(RolloutEngine.probe, [[5]])
    with pytest.raises(RuntimeError, match="cannot sample in the state publishing"):
        ours.sample()
    ours.serve()
    with pytest.raises(RuntimeError, match="cannot send_weights in the state publishing; this needs training"):
        ours.workers.call(Told.send_weights)
    ours.engines.call(RolloutEngine.probe, [[5]])
    ours.sample()
    assert log == ["sleep, keep_weights=False", "reload", "wake without cache", "send", "offload", "wake"]


def test_weights_are_kept_where_no_publish_brings_them_again() -> None:
    ours, log = hybrid()
    ours.train(keep_weights=True)
    ours.sample()
    assert log == ["sleep, keep_weights=True", "reload", "offload", "wake"]
    adapters, log = hybrid(adapters=True)
    adapters.train()
    assert log[0] == "sleep, keep_weights=True"


GENERATE: Callable[[HybridEngine[Told]], Any] = lambda h: h.engines.share(RolloutEngine.generate, [GREEDY])  # noqa: E731
ADVANCE: Callable[[HybridEngine[Told]], Any] = lambda h: h.engines.call_on(0, RolloutEngine.advance, {})  # noqa: E731
ASIDE: Callable[[HybridEngine[Told]], Any] = lambda h: h.workers.aside(Told.update_policy)  # noqa: E731
UPDATE: Callable[[HybridEngine[Told]], Any] = lambda h: h.workers.call(Told.update_policy)  # noqa: E731
LOAD: Callable[[HybridEngine[Told]], Any] = lambda h: h.engines.publish(WEIGHTS)  # noqa: E731
PROBE: Callable[[HybridEngine[Told]], Any] = lambda h: h.engines.call(RolloutEngine.probe, [[5]])  # noqa: E731


@pytest.mark.parametrize(
    ("turn", "call", "says"),
    [
        (Turn.TRAINING, GENERATE, "cannot generate in the state training; this needs sampling"),
        (Turn.PUBLISHING, GENERATE, "cannot generate in the state publishing; this needs sampling"),
        (Turn.TRAINING, ADVANCE, "cannot generate in the state training; this needs sampling"),
        (Turn.SAMPLING, ASIDE, "cannot update_policy in the state sampling; this needs training"),
        (Turn.SAMPLING, UPDATE, "cannot update_policy in the state sampling; this needs training"),
        (Turn.PUBLISHING, UPDATE, "cannot update_policy in the state publishing; this needs training"),
        (Turn.SAMPLING, LOAD, "cannot load weights in the state sampling; this needs publishing"),
        (Turn.TRAINING, LOAD, "cannot load weights in the state training; this needs publishing"),
        (Turn.TRAINING, PROBE, "cannot probe in the state training; this needs publishing or sampling"),
        (Turn.SAMPLING, HybridEngine.publish, "cannot publish in the state sampling; this needs training"),
        (Turn.PUBLISHING, HybridEngine.publish, "cannot publish in the state publishing; this needs training"),
        (Turn.PUBLISHING, HybridEngine.train, "cannot train in the state publishing; this needs sampling"),
        (Turn.TRAINING, HybridEngine.sample, "cannot sample in the state training: the engines have no weights"),
        (Turn.PUBLISHING, HybridEngine.sample, "cannot sample in the state publishing: the engines have no weights"),
    ],
)
def test_a_call_in_anothers_turn_is_refused(turn: Turn, call: Callable[[HybridEngine[Told]], Any], says: str) -> None:
    ours = at(turn)
    with pytest.raises(RuntimeError, match=says):
        call(ours)
    assert ours.turn is turn
