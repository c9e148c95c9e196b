"""Weights by broadcast and by handle: what arrives, and that each fault ends at both ends, soon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlhf_core.contract import Started
from rlhf_core.errors import StageError, WeightSyncError
from rlhf_core.rollout.digest import tensor_digest
from rlhf_core.rollout.engine import RolloutEngine
from rlhf_core.rollout.engines import hand_over
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.publication import Publication
from rlhf_core.rollout.scripted import ScriptedEngine
from rlhf_core.rollout.transport.base import Transport, TransportError, WeightManifest, take_all
from rlhf_core.rollout.transport.collective import Collective
from rlhf_core.rollout.transport.ipc import SharedBuffers
from rlhf_core.training.background import Background
from tests.rlhf_core.rollout.broadcasts import FAULTS, SECONDS, state

pytestmark = pytest.mark.system

Ends = dict[str, tuple[Any, float]]  # of each process: its digests or its error, and its seconds


@pytest.fixture(scope="module", params=["collective", "ipc"])
def kind(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def ends(kind: str) -> dict[str, Ends]:
    program = [sys.executable, "-m", "tests.rlhf_core.rollout.broadcasts", kind]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=300)
    found: dict[str, Ends] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.endurance("rl-matrix")
@pytest.mark.slow("three processes for each fault, some of which are waited for")
def test_every_engine_receives_every_tensor_to_the_bit(ends: dict[str, Ends]) -> None:
    expected = {name: tensor_digest(tensor) for name, tensor in state().items()}
    assert {who: digests for who, (digests, _) in ends["none"].items()} == dict.fromkeys(
        ("rank", "engine 0", "engine 1"), expected
    )


_OWN_ERRORS = {
    "rank raises": ("rank", "ValueError: a fault of the rank"),
    "engine raises": ("engine 1", "ValueError: a fault of the engine"),
    "other weights": ("rank", "WeightSyncError: the weights have ('unknown', torch.int64, (30, 40)) where ('t5'"),
}
_SILENT = {
    "rank is killed": "rank", "rank hangs": "rank", "engine is killed": "engine 1", "engine is absent": "engine 1",
}  # fmt: skip


@pytest.mark.endurance("rl-matrix")
@pytest.mark.parametrize("fault", FAULTS[1:])
def test_a_fault_of_one_process_is_an_error_of_all_others_in_time(ends: dict[str, Ends], fault: str) -> None:
    if fault in _OWN_ERRORS:
        failed, message = _OWN_ERRORS[fault]
        assert ends[fault][failed][0].startswith(message)
    else:
        failed = _SILENT[fault]
    for who in {"rank", "engine 0", "engine 1"} - {failed}:
        error, seconds = ends[fault][who]
        assert error.startswith("TransportError: version 1 did not travel: ")
        assert seconds < (2 * SECONDS + 5 if fault in _SILENT else SECONDS)  # where it can be seen nobody waits


def test_an_engine_that_expects_another_version_is_refused() -> None:
    transport = SharedBuffers("other version", "cpu", engines=1, workers=1, timeout_seconds=SECONDS)
    with transport.listening():
        sending = Background(lambda: transport.send(state().items(), WeightManifest.of(2, state())), name="send")
        with pytest.raises(TransportError, match=r"^version 1 did not travel: the other end has {'version': 1, "):
            take_all(transport.receive(WeightManifest.of(1, state())))
        with pytest.raises(TransportError, match=r"^version 2 did not travel: the other end has {'version': 1, "):
            sending.result()


def test_an_engine_on_another_machine_fails_at_once() -> None:
    transport = SharedBuffers("elsewhere", "cpu", engines=2, workers=1, senders=2, engine=1)
    with pytest.raises(TransportError, match="rank 1 does not offer it on the machine of engine 1"):
        take_all(transport.receive(WeightManifest.of(1, state())))


def test_a_publish_by_handle_leaves_no_file_and_no_descriptor() -> None:
    transport = SharedBuffers("descriptors", "cpu", engines=1, workers=1, timeout_seconds=SECONDS)
    before = set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    with transport.listening():
        sending = Background(lambda: transport.send(state().items(), WeightManifest.of(1, state())), name="send")
        received = dict(transport.receive(WeightManifest.of(1, state())))
        sending.result()
    del sending
    assert received.keys() == state().keys()
    assert (set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))) == before


class Unreached(ScriptedEngine):
    """Fails as it is given weights."""

    def __init__(self, error: Exception) -> None:
        super().__init__(lambda *_: [1])
        self._error = error

    def load_weights(self, transport: Transport, manifest: WeightManifest) -> None:
        raise self._error


def sending(error: Exception | None) -> Callable[[], Started[dict[str, str]]]:
    def sent() -> list[dict[str, str]]:
        if error is not None:
            raise error
        return [{"a": "1"}]

    return lambda: Started(sent)


@pytest.mark.parametrize(
    ("of_engine", "of_rank", "raised", "message"),
    [
        (TransportError("closed"), StageError("rank 0 died"), StageError, "^rank 0 died$"),
        (TransportError("closed"), TransportError("timed out"), TransportError, "^closed; timed out$"),
        (TransportError("closed"), None, TransportError, "^closed$"),
        (WeightSyncError("does not fit"), StageError("not waited for"), WeightSyncError, "^does not fit$"),
    ],
)
def test_the_error_is_the_cause_and_not_what_it_broke(
    of_engine: Exception, of_rank: Exception | None, raised: type[Exception], message: str
) -> None:
    transport = Collective("127.0.0.1:1", "gloo", 1, 1)
    weights = Publication(transport, WeightManifest(1, {}, {}), dict, sending(of_rank))
    with pytest.raises(raised, match=message):
        hand_over(InlineEngines(Unreached(of_engine)), weights)


def test_a_manifest_has_its_digests_when_all_is_sent() -> None:
    manifest = WeightManifest.of(3, {"a": torch.ones(2, 3), "b": torch.ones(4).bfloat16()})
    assert manifest == WeightManifest(3, {"a": (2, 3), "b": (4,)}, {"a": torch.float32, "b": torch.bfloat16})
    assert manifest.num_bytes == 32

    class Nothing(Collective):
        def receive(self, manifest: WeightManifest, worker: int = 0) -> Any:
            return iter(())

    engines = InlineEngines(ScriptedEngine(lambda *_: [1]))
    done = hand_over(engines, Publication(Nothing("", "gloo", 1, 1), manifest, dict, sending(None)))
    assert done.digests == {"a": "1"}
    assert engines.call(RolloutEngine.probe, [])[0].version == 3
