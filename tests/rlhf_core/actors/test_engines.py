"""Two vLLM engines in Ray actors: order, seeds, publishing with proof, and death."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from ray.cloudpickle import register_pickle_by_value

from rlhf_core.actors.engines import EngineGroup, engine_bundles
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.engines.rollout import VllmEngineConfig
from rlhf_core.errors import ActorDiedError, StageError, WeightSyncError
from rlhf_core.rollout.engine import EngineSettings, RolloutEngine, SamplingParameters
from rlhf_core.rollout.proof import Expected, verify_weights
from rlhf_core.rollout.publication import publication_of
from rlhf_core.rollout.transport.folder import SharedFolder
from rlhf_core.system.scratch import PREFIX, sweep
from tests.rlhf_core.rollout.models import EOS, disturb, expected_logprobs, make_model, publish, requests
from tests.rlhf_core.stages import context as stage_context
from tests.rlhf_core.stages.context import LocalContext, local_input

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("ray_cluster")]
register_pickle_by_value(stage_context)  # the actors cannot import a test module

CONFIG = VllmEngineConfig(max_length=64, cpu_cache_gib=0.05, max_sequences=16, engines=2, cpus_per_engine=0.5)
PROMPTS = [[1, 5, 6, 7], [1, 9], [1, 20, 21, 22, 23, 24, 25], [1, 5, 6, 7], [1, 30]]
PROBE = [[1, 5, 6, 7, 40, 41, 42], [1, 9, 11, 13, 15, 17, 19, 21, 23]]
PARAMETERS = SamplingParameters(temperature=1.0, top_p=1.0, max_tokens=8, stop_token_ids=(EOS,))
SAMPLED = requests(PROMPTS, PARAMETERS)


@pytest.mark.endurance("rl-matrix")
@pytest.mark.slow("starts engines as Ray actors")
def test_bundles() -> None:
    assert engine_bundles(CONFIG) == [{"CPU": 0.5}, {"CPU": 0.5}]
    gpu = CONFIG.model_copy(update={"engines": 1, "gpus_per_engine": 2.0, "tensor_parallel_size": 2})
    assert engine_bundles(gpu) == [{"CPU": 0.5, "GPU": 2.0}]


@pytest.mark.endurance("rl-matrix")
@pytest.mark.slow("starts two engines as Ray actors")
def test_a_group_of_engines(tmp_path: Path) -> None:
    """One test, since starting the engines is what takes the time."""
    model = make_model(tmp_path / "model", tied=True)
    artifact = local_input(tmp_path / "model", Kind.POLICY)
    ref = artifact.manifest.ref
    context = LocalContext(tmp_path / "work", artifacts={ref.path: artifact})
    with EngineGroup(ref, context, EngineSettings(CONFIG, "float32", seed=0)) as engines:
        engines.wait_ready()

        completions = engines.share(RolloutEngine.generate, SAMPLED)
        for prompt, completion in zip(PROMPTS, completions, strict=True):
            expected = expected_logprobs(model, [[*prompt, *completion.token_ids]])[0][len(prompt) :]
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)
        # The fourth is the second engine's, and here the first's.
        assert engines.share(RolloutEngine.generate, [SAMPLED[3]])[0].token_ids == completions[3].token_ids
        with pytest.raises(StageError, match="engine 0 failed in generate: ValueError: prompt 0 has 64 tokens"):
            engines.share(RolloutEngine.generate, requests([[1] * 64], PARAMETERS))

        alone = engines.call_on(1, RolloutEngine.advance, {7: SAMPLED[3]})
        while not alone:
            alone = engines.call_on(1, RolloutEngine.advance, {})
        assert {number: completion.token_ids for number, completion in alone.items()} == {7: completions[3].token_ids}
        with pytest.raises(StageError, match="engine 1 failed in generate: ValueError: prompt 8 has 64 tokens"):
            engines.call_on(1, RolloutEngine.advance, {8: requests([[1] * 64], PARAMETERS)[0]})

        disturb(model, seed=1)
        digests = publish(engines, model.state_dict(), 1)
        expected = Expected(1, expected_logprobs(model, PROBE), digests)
        assert verify_weights(engines.call(RolloutEngine.probe, PROBE), expected, 1e-4).difference < 1e-4
        assert engines.share(RolloutEngine.logprobs, PROBE)[1] == pytest.approx(expected.logprobs[1], abs=1e-4)
        assert [c.weight_version for c in engines.share(RolloutEngine.generate, SAMPLED)] == [1] * 5

        disturb(model, seed=2)
        with publication_of(model.state_dict(), 2) as weights:  # as engines on another node see it
            engines.publish(replace(weights, transport=SharedFolder(tmp_path / "elsewhere")))
            expected = Expected(2, expected_logprobs(model, PROBE), weights.manifest.digests)
        assert verify_weights(engines.call(RolloutEngine.probe, PROBE), expected, 1e-4).difference < 1e-4

        disturb(model, seed=3)  # and nothing published
        with pytest.raises(WeightSyncError, match="engine 0 does not serve version 2 as published: it serves each"):
            verify_weights(engines.call(RolloutEngine.probe, PROBE), Expected(2, expected_logprobs(model, PROBE)), 1e-4)

        engines.call(RolloutEngine.sleep, keep_weights=True)
        with pytest.raises(StageError, match="the engine is asleep; this needs it awake"):
            engines.share(RolloutEngine.generate, SAMPLED)
        engines.call(RolloutEngine.wake)

        processes = _engine_processes()
        temporary = [_temporary_folder(process) for process in processes]
        assert [len([*folder.iterdir()]) for folder in temporary] == [1, 1]  # what vLLM leaves
        disturb(model, seed=4)
        digests = publish(engines, model.state_dict(), 3)
        before = engines.share(RolloutEngine.generate, SAMPLED)
        assert engines.replace_dead() == []
        processes[0].kill()
        with pytest.raises(ActorDiedError, match=r"engine [01] died in generate"):
            engines.share(RolloutEngine.generate, SAMPLED)
        (name,) = engines.replace_dead()
        assert name in ("engine 0", "engine 1")
        probed = engines.call(RolloutEngine.probe, PROBE)
        assert sorted(answer.version for answer in probed) == [0, 3]
        digests = publish(engines, model.state_dict(), 3)
        expected = Expected(3, expected_logprobs(model, PROBE), digests)
        assert verify_weights(engines.call(RolloutEngine.probe, PROBE), expected, 1e-4).difference < 1e-4
        assert engines.share(RolloutEngine.generate, SAMPLED) == before
        engines.call_on(0, RolloutEngine.advance, {7: SAMPLED[0]})  # begun, and not whole
        assert engines.replace_dead() == []
        assert engines.share(RolloutEngine.generate, SAMPLED) == before
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert len(processes) == 2
    assert not alive
    assert not temporary[1].exists()
    sweep(temporary[0].parent)
    assert not temporary[0].exists()


def _engine_processes() -> list[psutil.Process]:
    """This session's."""
    return [p for p in psutil.Process().children(recursive=True) if "EngineActor" in "".join(p.cmdline())]


def _temporary_folder(process: psutil.Process) -> Path:
    """By the lock that the process holds on it."""
    opened = {file.readlink() for file in Path(f"/proc/{process.pid}/fd").iterdir()}
    (folder,) = [path for path in opened if path.name.startswith(f"{PREFIX}engine-")]
    return folder
