"""What can go wrong between trainer and engine, done to real engines: each fault ends at its publish, and is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from rlhf_core.config.engines.rollout import VllmEngineConfig
from rlhf_core.errors import WeightSyncError
from rlhf_core.processes.child_process import ChildProcess
from rlhf_core.rollout.engine import EngineSettings, RolloutEngine
from rlhf_core.rollout.proof import Expected, GivenColumns, Proof, verify_weights
from rlhf_core.rollout.publication import Publication, publication_of
from tests.rlhf_core.rollout.engine_process import RemoteEngine
from tests.rlhf_core.rollout.models import disturb, expected_logprobs, make_model, publish, publish_by_broadcast

pytestmark = pytest.mark.parts

CONFIG = VllmEngineConfig(max_length=64, cpu_cache_gib=0.05, max_sequences=16)
PROBE = [[1, 5, 6, 7, 40, 41, 42], [1, 9, 11, 13, 15, 17, 19, 21, 23], [1, 3]]
EXCHANGED = ("model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight")

Served = tuple[LlamaForCausalLM, RemoteEngine]


@pytest.fixture(scope="module")
def served(engine_process: ChildProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A tied model, and an engine that serves it; a publish that is not spoiled mends what a test has done to it."""
    folder = tmp_path_factory.mktemp("faults")
    model = make_model(folder, tied=True)
    engine = RemoteEngine(engine_process, folder, EngineSettings(CONFIG, "float32", seed=0))
    yield model, engine
    engine.shutdown()


def prove(
    model: LlamaForCausalLM,
    engine: RemoteEngine,
    version: int,
    digests: Mapping[str, str],
    before: Expected | None = None,
    tolerance: float = 1e9,
) -> Proof:
    """By default whatever the log-probs say: most faults are smaller than rounding."""
    expected = Expected(version, expected_logprobs(model, PROBE), digests)
    return verify_weights(engine.call(RolloutEngine.probe, PROBE), expected, tolerance, before)


def spoil(worker: Any, module: str, row: int, column: int) -> None:
    """Changes one element of what a layer computes with, by the last of its bits."""
    layer = worker.model_runner.get_model().get_submodule(module)
    linear = layer.cpu_linear
    weight = linear(torch.eye(layer.input_size), None, None).T.contiguous()
    weight[row, column] = torch.nextafter(weight[row, column], torch.tensor(9.0))
    layer.cpu_linear = lambda x, _, bias: torch.nn.functional.linear(x, weight, bias)


def spoil_plain(worker: Any, name: str) -> None:
    worker.model_runner.get_model().get_parameter(name).data[3] += 1e-6


def test_weights_that_do_not_travel_are_proven_too(served: Served) -> None:
    """A publish has the attention alone. Its proof misses other weights that the engine, or the trainer, changed."""
    model, engine = served
    before = Expected(20, [], publish(engine, model.state_dict(), 20))
    unchanged = frozenset(name for name in before.digests if "self_attn" not in name)
    disturb(model, seed=20, only="self_attn")
    digests = publish(engine, model.state_dict(), 21, unchanged=unchanged)
    assert prove(model, engine, 21, digests, tolerance=1e-4).not_read_back == ()
    disturb(model, seed=21, only="0.mlp.down_proj")
    digests = publish(engine, model.state_dict(), 22, unchanged=unchanged)
    with pytest.raises(WeightSyncError, match=r"layers\.0\.mlp\.down_proj\.weight still has the values of version 20;"):
        prove(model, engine, 22, digests, before)
    digests = publish(engine, model.state_dict(), 23)
    engine.in_worker(spoil, "model.layers.1.mlp.down_proj", 5, 33)
    publish(engine, model.state_dict(), 24, unchanged=unchanged)
    with pytest.raises(WeightSyncError, match=r"layers\.1\.mlp\.down_proj\.weight has other values;"):
        prove(model, engine, 24, digests)


@pytest.mark.parametrize(
    ("module", "row", "named"),
    [("self_attn.qkv_proj", 5, "q_proj"), ("self_attn.qkv_proj", 127, "v_proj"), ("mlp.gate_up_proj", 100, "up_proj")],
)
@pytest.mark.slow("starts vLLM")
def test_one_element_of_a_weight(served: Served, module: str, row: int, named: str) -> None:
    """A fused layer is taken apart: the published tensor is named, and no other."""
    model, engine = served
    digests = publish(engine, model.state_dict(), 1)
    assert prove(model, engine, 1, digests, tolerance=1e-4).not_read_back == ()
    engine.in_worker(spoil, f"model.layers.1.{module}", row, 33)
    parent = module.split(".")[0]
    with pytest.raises(
        WeightSyncError, match=rf"version 1 as published: model.layers.1.{parent}.{named}.weight has other values; its"
    ):
        prove(model, engine, 1, digests)
    publish(engine, model.state_dict(), 2)
    assert prove(model, engine, 2, digests, tolerance=1e-4).difference < 1e-4


def test_a_broadcast_is_proven_whole_and_by_columns(served: Served) -> None:
    model, engine = served
    digests = publish(engine, model.state_dict(), 31)
    for version in (32, 33):  # the first is read back whole
        engine.in_worker(spoil_plain, "model.norm.weight")
        assert publish_by_broadcast(engine, model.state_dict(), version) == digests
        assert prove(model, engine, version, digests, tolerance=1e-4).not_read_back == ()
    publish_by_broadcast(engine, model.state_dict(), 40)
    engine.in_worker(spoil, "model.layers.0.mlp.gate_up_proj", 100, 3)
    with pytest.raises(WeightSyncError, match=r"version 40 as published: model.layers.0.mlp.up_proj.weight has other"):
        prove(model, engine, 40, digests)


def test_a_broadcast_of_other_tensors_is_refused_and_of_old_ones_found(served: Served) -> None:
    model, engine = served
    before = Expected(48, [], publish_by_broadcast(engine, model.state_dict(), 48))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1 + 2**-20)
    engine.in_worker(load_nothing)
    digests = publish_by_broadcast(engine, model.state_dict(), 49)  # vLLM takes none: nobody waits for it
    engine.in_worker(load_again)
    named = "model.layers.1.mlp.up_proj.weight still has the values of version 48; its"
    with pytest.raises(WeightSyncError, match=f"version 49 as published: {named}"):
        prove(model, engine, 49, digests, before)
    with pytest.raises(WeightSyncError, match=r"version 50 does not fit .* in 1 tensors: model\.more"):
        publish_by_broadcast(engine, {**model.state_dict(), "model.more.weight": torch.ones(2)}, 50)
    publish(engine, model.state_dict(), 51)


def read_columns(worker: Any, number: int) -> int:
    """In vLLM's worker: how many columns of a packed weight are read back from now on; how many were before."""
    from rlhf_core.rollout import proof

    before, proof.SAMPLED_COLUMNS = proof.SAMPLED_COLUMNS, number
    return before


@pytest.fixture
def eight_columns(served: Served) -> Iterator[None]:
    """Of 64 or 96 are read back."""
    before = served[1].in_worker(read_columns, 8)
    yield
    served[1].in_worker(read_columns, before)


@pytest.mark.usefixtures("eight_columns")
def test_one_element_is_found_if_its_column_is_read_back_and_in_every_eighth_publish(served: Served) -> None:
    model, engine = served
    weight = model.model.layers[0].mlp.up_proj.weight
    versions = range(9, 25)
    read = {v: GivenColumns.of(weight, seed=v).indices[:8].tolist() for v in versions}
    column = read[9][0]
    missed = []
    for version in versions:
        digests = publish(engine, model.state_dict(), version)
        engine.in_worker(spoil, "model.layers.0.mlp.gate_up_proj", 100, column)
        with suppress(WeightSyncError):
            prove(model, engine, version, digests)
            missed.append(version)
    assert missed == [version for version in versions if version % 8 and column not in read[version]]
    assert len(missed) > 1


def test_columns_are_drawn_anew_for_each_publish() -> None:
    """64 of 576 without repetition: each is drawn in a ninth of the publishes."""
    weight = torch.zeros(1, 576)
    drawn = torch.zeros(576)
    for version in range(1000):
        columns = GivenColumns.of(weight, seed=version).indices
        assert len(set(columns.tolist())) == 64
        drawn[columns] += 1
    assert torch.allclose(drawn, torch.tensor(1000 / 9), atol=60)  # six deviations of a binomial's


def test_one_element_of_a_norm_and_of_the_embedding(served: Served) -> None:
    model, engine = served
    for name in ("model.layers.0.input_layernorm.weight", "model.embed_tokens.weight"):
        digests = publish(engine, model.state_dict(), 3)
        engine.in_worker(spoil_plain, name)
        with pytest.raises(WeightSyncError, match=f"as published: {name} has other values; its"):
            prove(model, engine, 3, digests)


class ExchangingEngine:
    """Loads what was published, with two tensors in each other's place."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine

    def publish(self, weights: Publication) -> None:
        state = dict(weights.transport.receive(weights.manifest))
        state[EXCHANGED[0]], state[EXCHANGED[1]] = state[EXCHANGED[1]], state[EXCHANGED[0]]
        with publication_of(state, weights.manifest.version) as wrong:
            self._engine.publish(wrong)


@pytest.mark.usefixtures("eight_columns")
def test_two_tensors_of_the_same_shape_exchanged(served: Served) -> None:
    model, engine = served
    digests = publish(ExchangingEngine(engine), model.state_dict(), 4)
    named = f"{EXCHANGED[0]} has the values of {EXCHANGED[1]}, {EXCHANGED[1]} has the values of {EXCHANGED[0]}; its"
    with pytest.raises(WeightSyncError, match=f"version 4 as published: {named}"):
        prove(model, engine, 4, digests)


def test_a_stale_version(served: Served) -> None:
    model, engine = served
    digests = publish(engine, model.state_dict(), 5)
    with pytest.raises(WeightSyncError, match="serves version 5, but version 6 was published"):
        prove(model, engine, 6, digests)


def load_nothing(worker: Any) -> None:
    worker.worker.reload_weights = lambda weights_iterator: None


def load_again(worker: Any) -> None:
    del worker.worker.reload_weights


@pytest.mark.usefixtures("eight_columns")
def test_old_weights_under_a_new_version(served: Served) -> None:
    """A step so small that log-probs hide it, as every step is in bfloat16."""
    model, engine = served
    before = Expected(6, [], publish(engine, model.state_dict(), 6))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1 + 2**-20)
    engine.in_worker(load_nothing)
    digests = publish(engine, model.state_dict(), 7)
    engine.in_worker(load_again)
    named = "model.layers.1.mlp.up_proj.weight still has the values of version 6; its"
    with pytest.raises(WeightSyncError, match=f"version 7 as published: {named}"):
        prove(model, engine, 7, digests, before)


@pytest.mark.parametrize("spoiled", ["lacking", "unknown", "shape"])
def test_a_publish_with_other_tensors_is_refused(served: Served, spoiled: str) -> None:
    model, engine = served
    state: dict[str, Tensor] = dict(model.state_dict())
    if spoiled == "lacking":
        del state["model.norm.weight"]
    elif spoiled == "unknown":
        state["model.more.weight"] = torch.ones(2)
    else:
        state["model.norm.weight"] = torch.ones(63)
    named = "model.more.weight" if spoiled == "unknown" else "model.norm.weight"
    with pytest.raises(WeightSyncError, match=f"version 8 does not fit the engine's model in 1 tensors: {named}"):
        publish(engine, state, 8)
    assert engine.call_on(0, RolloutEngine.probe, []).version != 8


def leave_heads(worker: Any) -> None:
    """In vLLM's worker: a publish no longer packs the output head again."""
    from rlhf_core.rollout.vllm import worker as vllm_worker

    worker.packed_before = vllm_worker.repack_heads
    vllm_worker.repack_heads = lambda model: None


def pack_heads(worker: Any) -> None:
    from rlhf_core.rollout.vllm import worker as vllm_worker

    vllm_worker.repack_heads = worker.packed_before


def test_without_its_cure_the_tied_head_is_stale(engine_process: ChildProcess, tmp_path: Path) -> None:
    """The trap of vLLM on CPU: the engine goes on with the old packed head, and no error tells."""
    model = make_model(tmp_path, tied=True)
    engine = RemoteEngine(engine_process, tmp_path, EngineSettings(CONFIG, "float32", seed=0))
    engine.in_worker(leave_heads)
    with publication_of(model.state_dict(), 0) as weights:
        before = Expected(0, expected_logprobs(model, PROBE), weights.manifest.digests)
    assert verify_weights(engine.call(RolloutEngine.probe, PROBE), before, 1e-4).difference < 1e-4
    named = r"lm_head.weight \(tied to model.embed_tokens.weight\) still has the values of version 0; its log-probs"
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1 + 2**-20)  # too small a step for log-probs to show it
    digests = publish(engine, model.state_dict(), 1)
    with pytest.raises(WeightSyncError, match=rf"version 1 as published: {named}"):
        prove(model, engine, 1, digests, before)
    disturb(model, seed=3)
    digests = publish(engine, model.state_dict(), 2)
    with pytest.raises(
        WeightSyncError, match=rf"version 2 as published: {named} of the probe are off by [0-9.]+ on average [(]"
    ):
        prove(model, engine, 2, digests, before, tolerance=1e-4)
    engine.in_worker(pack_heads)
    digests = publish(engine, model.state_dict(), 3)
    assert prove(model, engine, 3, digests, tolerance=1e-4).difference < 1e-4
    engine.shutdown()
