"""Two ranks, over which ZeRO 3 has partitioned the policy, send it to two vLLM engines, which prove it.

By broadcast, by handle from the first rank, or from each to the engine on its device.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import ray
from ray.cloudpickle import register_pickle_by_value
from safetensors.torch import load_file

from rlhf_core.algorithms import build_algorithm
from rlhf_core.errors import StageError
from rlhf_core.rl.hybrid import turns_of
from rlhf_core.rl.publisher import Publisher
from rlhf_core.rl.ranks import PolicyTrainer
from rlhf_core.rollout.digest import tensor_digest
from rlhf_core.rollout.engine import RolloutEngine
from rlhf_core.rollout.engines import hand_over
from rlhf_core.stages.ray_cluster import RayCluster
from rlhf_core.stages.rl import ranks_and_engines
from rlhf_core.types import Prompt
from tests.rlhf_core.stages import context as stage_context
from tests.rlhf_core.stages.context import LocalContext
from tests.rlhf_core.stages.rl_jobs import job_inputs, two_by_two

pytestmark = [pytest.mark.endurance("rl-matrix"), pytest.mark.usefixtures("ray_cluster")]
register_pickle_by_value(stage_context)  # the actors cannot import a test module

PROBE = [Prompt("0", "", (5, 6, 7, 4), row={}), Prompt("1", "", (4, 5), row={})]


@pytest.mark.slow("starts two ranks and two engines as Ray actors")
@pytest.mark.parametrize(
    ("transport", "hybrid", "lora", "killed"),
    [
        ("collective", False, False, "engine 1"),
        ("collective", False, False, "rank 0"),
        ("ipc", False, False, "engine 1"),
        ("ipc", False, False, "rank 1"),
        ("ipc", True, False, ""),
        ("ipc", True, True, ""),
    ],
)
def test_every_engine_serves_what_the_ranks_have(
    tmp_path: Path, transport: str, hybrid: bool, lora: bool, killed: str
) -> None:
    """lora: merged by each rank that sends; what is published first has the values of the base. killed: at last."""
    config = two_by_two(3, transport=transport, hybrid=hybrid, lora=lora)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"serve_adapter": "merged"})})
    inputs = job_inputs(tmp_path)
    context = LocalContext(tmp_path / "work", artifacts={item.manifest.ref.path: item for item in inputs.values()})
    expected = {n: tensor_digest(t) for n, t in load_file(inputs["model"].folder / "model.safetensors").items()}
    with ranks_and_engines(config, inputs, context, RayCluster()) as (workers, engines, _):
        trainer = PolicyTrainer(config, build_algorithm(config), workers, seed=0)
        publisher = Publisher(config, trainer, engines, PROBE, turns_of(config, workers, engines))
        publisher.start(0)
        for version in (1, 2):
            assert publisher.publish()["weight_difference"] < 1e-4
            for answer in engines.call(RolloutEngine.probe, []):
                assert answer.version == version
                assert {tensor.published: tensor.digest for tensor in answer.served} == expected
        if not killed:
            return
        actors = {**workers._named(), **engines._actors}  # type: ignore[attr-defined]

        def publish() -> None:
            with trainer.publication(3, engines=2) as weights:
                ray.kill(actors[killed])
                hand_over(engines, weights)

        began = time.monotonic()
        with pytest.raises(StageError, match=f"{killed} died in"):
            publish()
        assert time.monotonic() - began < 60  # though the others wait for it
