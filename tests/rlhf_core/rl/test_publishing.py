"""A rank publishes its policy to an engine, over each transport: the same tensors, and the same proof."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.contract import Input
from rlhf_core.errors import StageError, WeightSyncError
from rlhf_core.models.quantisation import write_rounded
from rlhf_core.rl.hybrid import OwnDevices
from rlhf_core.rl.publisher import Publisher
from rlhf_core.rl.ranks import PolicyTrainer
from rlhf_core.rl.weights import never_changed
from rlhf_core.rl.worker import RLWorker
from rlhf_core.rollout.digest import tensor_digest
from rlhf_core.rollout.engines import hand_over
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.transport.collective import Collective
from rlhf_core.rollout.transport.ipc import SharedBuffers
from rlhf_core.types import Prompt
from tests.rlhf_core.rl.one_rank import rl_config, tiny_llama, trainer, trajectories, with_advantages
from tests.rlhf_core.rl.torch_engine import TorchEngine
from tests.rlhf_core.stages.context import local_input

pytestmark = pytest.mark.parts

PROBE = [Prompt("0", "", (2, 3, 4, 5, 6), row={}), Prompt("1", "", (7, 8, 9), row={})]


def over(transport: str, config: RLConfig) -> RLConfig:
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"transport": transport})})


def updated(config: RLConfig, ours: PolicyTrainer) -> None:
    ours.update(with_advantages(config, ours, ours.score(trajectories())), 0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"engine": {"dtype": "float32", "zero_stage": 3}},
        {"lora": {"rank": 2}},
        {"lora": {"rank": 2, "rank_stabilised": True, "dora": True, "modules_to_save": ("embed_tokens", "norm")}},
    ],
    ids=str,
)
def test_each_transport_brings_the_same_tensors(model: Input, tmp_path: Path, settings: dict[str, Any]) -> None:
    found = {}
    for transport in ("folder", "collective", "ipc"):
        config = over(transport, rl_config("grpo", **settings))
        ours, _ = trainer(config, model, tmp_path / transport)
        engine = TorchEngine(model.folder, max_length=8)
        publisher = Publisher(config, ours, InlineEngines(engine), PROBE, OwnDevices())
        publisher.start(0)
        before = ours.digests()
        updated(config, ours)
        assert publisher.publish()["weight_difference"] < 1e-5
        assert engine.weight_version == 1
        found[transport] = {tensor.name: tensor.digest for tensor in engine.served()}
        assert found[transport] == ours.digests()
        assert found[transport] != before == {n: tensor_digest(t) for n, t in weights_of(model).items()}
    assert found["ipc"] == found["collective"] == found["folder"]


def test_engines_serve_the_values_that_a_quantised_base_is_multiplied_with(model: Input, tmp_path: Path) -> None:
    write_rounded(model.folder, tmp_path / "base", "float32")
    base = local_input(tmp_path / "base", Kind.POLICY)
    config = rl_config("grpo", lora={"rank": 2, "quantised": "nf4"})
    ours, _ = trainer(config, base, tmp_path / "run")
    engine = TorchEngine(base.folder, max_length=8)
    publisher = Publisher(config, ours, InlineEngines(engine), PROBE, OwnDevices())
    publisher.start(0)
    assert ours.digests() == {name: tensor_digest(tensor) for name, tensor in weights_of(base).items()}
    updated(config, ours)
    assert publisher.publish()["weight_difference"] < 1e-5
    assert {tensor.name: tensor.digest for tensor in engine.served()} == ours.digests()


def weights_of(model: Input) -> dict[str, Any]:
    return load_file(model.folder / "model.safetensors")


ATTENTION = {f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "qkvo"}


@pytest.mark.parametrize("transport", ["folder", "collective", "ipc"])
def test_what_an_adapter_leaves_as_it_was_does_not_travel(model: Input, tmp_path: Path, transport: str) -> None:
    """All of a block is sent: engines fuse queries, keys and values. The digests are those of all tensors."""
    config = over(transport, rl_config("grpo", lora={"rank": 2, "target_modules": ("q_proj",)}))
    ours, _ = trainer(config, model, tmp_path)
    updated(config, ours)
    engine = TorchEngine(model.folder, max_length=8)
    with ours.publication(1) as weights:
        manifest = hand_over(InlineEngines(engine), weights)
    assert manifest.shapes.keys() == ATTENTION
    assert manifest.unchanged == weights_of(model).keys() - ATTENTION
    assert manifest.digests == ours.digests() == {tensor.name: tensor.digest for tensor in engine.served()}


def test_an_engine_that_forgets_its_weights_gets_all_of_them(model: Input, tmp_path: Path) -> None:
    config = rl_config("grpo", lora={"rank": 2}).model_copy(update={"hybrid": True})
    ours, _ = trainer(config, model, tmp_path)
    with ours.publication(1) as weights:
        assert weights.manifest.shapes.keys() == weights_of(model).keys()


class Spoiled(TorchEngine):
    """Changes one bit of what arrives."""

    def load_weights(self, transport: Any, manifest: Any) -> None:
        super().load_weights(transport, manifest)
        self._model.model.norm.weight.data[3] += 2**-20


@pytest.mark.parametrize("transport", ["collective", "ipc"])
def test_what_changes_on_the_way_is_found(model: Input, tmp_path: Path, transport: str) -> None:
    config = over(transport, rl_config("grpo"))
    ours, _ = trainer(config, model, tmp_path)
    publisher = Publisher(config, ours, InlineEngines(Spoiled(model.folder, max_length=8)), PROBE, OwnDevices())
    publisher.start(0)
    with pytest.raises(WeightSyncError, match=r"version 1 as published: model.norm.weight has other values; its log-"):
        publisher.publish()


@pytest.mark.parametrize("transport", ["collective", "ipc"])
def test_a_resumed_run_gives_its_weights_to_new_engines(model: Input, tmp_path: Path, transport: str) -> None:
    config = over(transport, rl_config("grpo"))
    ours, _ = trainer(config, model, tmp_path)
    updated(config, ours)
    engine = TorchEngine(model.folder, max_length=8)
    Publisher(config, ours, InlineEngines(engine), PROBE, OwnDevices()).start(7)
    assert engine.weight_version == 7
    assert {tensor.name: tensor.digest for tensor in engine.served()} == ours.digests()


@pytest.mark.parametrize(("transport", "kind"), [("collective", Collective), ("ipc", SharedBuffers)])
def test_an_error_of_the_rank_is_the_error_of_the_publish(
    model: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, kind: type
) -> None:
    """The engine, which waits for weights, fails with it and not after the timeout."""
    config = over(transport, rl_config("grpo"))
    ours, _ = trainer(config, model, tmp_path)

    def broken(worker: RLWorker) -> Any:
        yield "model.embed_tokens.weight", worker._policy.module.model.model.embed_tokens.weight
        raise StageError("no more weights")

    monkeypatch.setattr(RLWorker, "_served_weights", broken)
    engines = InlineEngines(TorchEngine(model.folder, max_length=8))
    with ours.publication(1) as weights, pytest.raises(StageError, match=r"^no more weights$"):
        hand_over(engines, weights)
    with ours.publication(2) as weights:  # and nothing is left of it
        assert isinstance(weights.transport, kind)


def test_nccl_without_a_gpu_is_refused(model: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = over("collective", rl_config("grpo"))
    monkeypatch.setattr(RLConfig, "publishes_on_gpus", True)
    ours, _ = trainer(config, model, tmp_path)
    with pytest.raises(StageError, match="over NCCL, and this process has no GPU; set folder"), ours.publication(1):
        pass


def test_a_tied_head_is_not_sent(tmp_path: Path) -> None:
    tied = tiny_llama(tmp_path / "tied", tie_word_embeddings=True)
    ours, _ = trainer(over("collective", rl_config("grpo")), tied, tmp_path)
    assert ours.digests().keys() == weights_of(tied).keys()
    assert "lm_head.weight" not in ours.digests()


def test_the_experts_of_a_layer_change_together() -> None:
    """An engine stacks them in one tensor, with which it computes."""
    names = [f"layers.{layer}.mlp.experts.{expert}.up_proj.weight" for layer in range(2) for expert in range(2)]
    layout = {name: torch.zeros(1, requires_grad=name == names[1]) for name in names}
    assert never_changed(layout) == {*names[2:]}
