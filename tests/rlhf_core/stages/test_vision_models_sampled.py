"""Every architecture that reads images through RL and evaluation with a real engine, where torchvision is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.errors import StageError
from rlhf_core.models.folders.vision_models import VISION_MODELS
from rlhf_core.rollout.vllm.checks import require_image_libraries
from rlhf_core.stages import rl
from rlhf_core.stages.in_process import InProcessCluster
from tests.rlhf_core.stages.context import local_input
from tests.rlhf_core.stages.supervised_runs import context_of
from tests.rlhf_core.stages.vision_runs import RL, ROLLOUT, made, recorded, require_log_probs_of_the_engine, rows, valid
from tests.rlhf_core.vision_folders import BUILDERS, vision_folder

pytestmark = pytest.mark.endurance("architectures")


def require_libraries(kind: str) -> None:
    """Skip without torchvision: no package index has a build for the tested CPU build of torch (decision 82)."""
    try:
        require_image_libraries({"model_type": kind})
    except StageError as error:
        pytest.skip(str(error))


# vLLM on CPU does not serve the others, and says so.
@pytest.mark.parametrize("kind", [kind for kind in BUILDERS if not VISION_MODELS[kind].sees_whole_images])
@pytest.mark.timeout(300)
@pytest.mark.slow("RL of a vision model with vLLM")
def test_rl_trains_what_the_engine_sampled_of_pictures(
    kind: str, in_process: InProcessCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_libraries(kind)
    policy = local_input(vision_folder(kind, tmp_path / "model"), Kind.POLICY)
    dataset = local_input(made(tmp_path / "data", "prompts", rows(10)).folder, Kind.DATASET)
    inputs = {"model": policy, "dataset": dataset, "validation.dataset": dataset}
    context, seen = context_of(tmp_path / "rl", inputs), recorded(monkeypatch)
    validation = {"dataset": "d", "every_steps": 1, "scorers": {"exact": {"type": "verifier"}}}
    settings = {**RL, "rollout": {**ROLLOUT, "max_length": 128}, "validation": validation}
    rl.run(valid(RLConfig, settings), inputs, context, in_process)
    assert len(context.logs) == 2
    assert "validation/pass@1" in context.logs[0][1]
    assert {bool(t.prompt.images) for t in seen} == {True, False}
    require_log_probs_of_the_engine(seen, policy.folder)
