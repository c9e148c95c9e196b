"""Rollout engines keep one contract: scripted, on plain torch, and vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from rlhf_core.config.engines.rollout import VllmEngineConfig
from rlhf_core.processes.child_process import ChildProcess
from rlhf_core.rollout.child_engine import ChildEngine
from rlhf_core.rollout.engine import EngineSettings, RolloutEngine
from rlhf_core.rollout.engines import Engines
from rlhf_core.rollout.scripted import ScriptedEngine
from rlhf_core.testing.engine import RolloutEngineContract
from tests.rlhf_core.rl.torch_engine import TorchEngine
from tests.rlhf_core.rollout.models import disturb, make_model

pytestmark = pytest.mark.parts

Weights = Sequence[Mapping[str, Tensor]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model_weights(folder: Path) -> Weights:
    """Those of a model in `folder`, and others."""
    model = make_model(folder, tied=True)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    disturb(model, seed=1)
    return first, {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


def script(prompt: Sequence[int], seed: int | None) -> list[int]:
    return [prompt[-1], 3 + (seed or 0) % 50, 4, 5, 2]


class TestScriptedEngine(RolloutEngineContract):
    serves_weights = False

    @pytest.fixture
    def engine(self) -> RolloutEngine:
        return ScriptedEngine(script, max_length=64)

    @pytest.fixture
    def weights(self) -> Weights:
        return {"weight": torch.zeros(1)}, {"weight": torch.ones(1)}


class TestTorchEngine(RolloutEngineContract):
    @pytest.fixture
    def engine(self, folder: Path, model_weights: Weights) -> RolloutEngine:
        return TorchEngine(folder, max_length=64)

    @pytest.fixture
    def weights(self, model_weights: Weights) -> Weights:
        return model_weights


class OfGroup:
    """The engine of a group of one, as if it were in this process."""

    def __init__(self, group: Engines) -> None:
        self._group = group

    @property
    def weight_version(self) -> int:
        return self._group.call_on(0, RolloutEngine.probe, []).version

    def __getattr__(self, method: str) -> Any:
        return partial(self._group.call_on, 0, getattr(RolloutEngine, method))


@pytest.fixture(scope="module")
def vllm_engine(engine_process: ChildProcess, folder: Path, model_weights: Weights) -> Iterator[RolloutEngine]:
    config = VllmEngineConfig(max_length=64, cpu_cache_gib=0.05, max_sequences=16)
    engine = ChildEngine(engine_process, folder, EngineSettings(config, "float32", seed=0))
    yield cast(RolloutEngine, OfGroup(engine))
    engine.shutdown()


@pytest.mark.slow("starts vLLM")
class TestVllmEngine(RolloutEngineContract):
    @pytest.fixture
    def engine(self, vllm_engine: RolloutEngine) -> RolloutEngine:
        return vllm_engine

    @pytest.fixture
    def weights(self, model_weights: Weights) -> Weights:
        return model_weights
