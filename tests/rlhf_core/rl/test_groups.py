"""Models apart from the policy, in groups that share workers: where each is changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.contract import Input
from rlhf_core.errors import StageError
from rlhf_core.rl.critic import CriticWorker
from rlhf_core.testing.stage import without_times
from rlhf_core.training.metrics import StepMetrics
from tests.rlhf_core.rl.test_roles import KL, config, run
from tests.rlhf_core.stages.supervised_runs import base_model, dataset, reward_model

pytestmark = pytest.mark.parts

Settings = Mapping[str, Any]
NONE: Settings = {}
KEPT = ("model.safetensors", "critic/model.safetensors")
VALUES = {"placement": {"group": "values", "cpus_per_worker": 0.5}}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Input]:
    folder = tmp_path_factory.mktemp("inputs")
    prompts = [{"prompt": [{"role": "user", "content": f"say {letter}"}]} for letter in "abcd"]
    model = base_model(folder / "base")
    judge = reward_model(folder / "judge", model, seed=1, mean=0.5, std=2.0)
    data = dataset(folder / "data", prompts)
    return {"model": model, "dataset": data, "ppo.rewards.taste.model": judge, "ppo.critic.start": judge}


def ppo(critic: Settings, taste: Settings = NONE, kl: Settings = NONE, **rl: Any) -> RLConfig:
    return config(
        "ppo",
        rl,
        rewards={"taste": {"type": "reward_model", **taste}},
        kl={**KL, **kl},
        critic={"start": "judge", **critic},
    )


@pytest.mark.endurance("rl-matrix")
@pytest.mark.slow("RL twice")
def test_critic_and_reward_model_in_a_group_train_what_they_train_beside_the_policy(
    inputs: dict[str, Input], tmp_path: Path
) -> None:
    lines, files, held = [], [], []
    grouped = ppo({"save": True, **VALUES}, {**VALUES, "offload": True}, {"offload": True})
    for number, settings in enumerate([ppo({"save": True}), grouped]):
        output, context, worker = run(tmp_path / str(number), settings, inputs)
        lines.append([without_times(line) for _, line in context.logs])
        files.append([(output.folder / path).read_bytes() for path in KEPT])
        held.append(sorted(worker._models()))
    assert held == [["critic", "policy", "reference", "reward:taste"], ["policy", "reference"]]
    assert len(lines[0]) == 3
    assert lines[1] == lines[0]
    assert files[1] == files[0]


@pytest.mark.endurance("rl-matrix")
@pytest.mark.slow("RL four times")
def test_a_killed_run_resumes_with_the_critic_on_workers_of_its_own(
    inputs: dict[str, Input], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ppo({"save": True, **VALUES}, VALUES, checkpoint={"every_steps": 1})
    whole, context, _ = run(tmp_path / "whole", settings, inputs)
    update, updates = CriticWorker.update_critic, []

    def fails_once(self: CriticWorker, batches: Any) -> StepMetrics:
        updates.append(batches)
        if len(updates) == 3:
            raise StageError("killed")
        return update(self, batches)

    monkeypatch.setattr(CriticWorker, "update_critic", fails_once)
    with pytest.raises(StageError, match="killed"):
        run(tmp_path / "killed", settings, inputs)
    again, resumed, _ = run(tmp_path / "killed", settings, inputs)
    assert without_times(resumed.logs[-1][1]) == without_times(context.logs[-1][1])
    assert len(updates) == 4, "only the third step is repeated"
    for path in KEPT:
        assert (again.folder / path).read_bytes() == (whole.folder / path).read_bytes()
    elsewhere = ppo({"save": True}, VALUES, checkpoint={"every_steps": 1})
    with pytest.raises(StageError, match=r"of step 2, has the critic on its own workers: set its placement as it was"):
        run(tmp_path / "killed", elsewhere, inputs)
