"""Each stage that keeps rows is stopped and run again, in one process: what it has done is not done again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlhf_core.stages import logprobs, readers
from rlhf_core.stages.cluster import Cluster
from rlhf_core.stages.in_process import InProcessCluster
from rlhf_core.stages.table import STAGES
from rlhf_core.testing.stage import StageContract, StageRun
from tests.rlhf_core.rl.torch_engine import torch_engine
from tests.rlhf_core.stages.supervised_runs import base_model, conversations, dataset, pairs, reward_model

pytestmark = pytest.mark.parts

AT_ONCE: dict[str, Any] = {"checkpoint": {"every_minutes": 1e-6}}  # behind every part
SAMPLED: dict[str, Any] = {
    **AT_ONCE, "dataset": "d", "samples": 2, "sampling": {"max_tokens": 3}, "rollout": {"max_length": 24},
    "prompts_per_call": 2,
}  # fmt: skip
ENGINE: dict[str, Any] = {"dtype": "float32", "zero_stage": 0, "tokens_per_micro_batch": 64}
PROMPTS = [{"prompt": [{"role": "user", "content": f"say {letter}"}], "answer": letter} for letter in "abcdefg"]
FUNCTION = "def judged(completions, prompts, rows):\n    return [len(set(c)) / max(1, len(c)) for c in completions]\n"
SHORT = {"type": "function", "path": "scores.py", "function": "judged"}
WHOLE = {"type": "reward_model", "weight": 0.5}


class KeptRowsContract(StageContract):
    """With an engine that is a function of its weights, and few rows at a time."""

    together: ClassVar[int] = 3

    @pytest.fixture(autouse=True)
    def few_rows_at_a_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(logprobs, "_EXAMPLES", self.together)
        monkeypatch.setattr(readers, "_TOGETHER", self.together)

    def cluster(self) -> Cluster:
        return InProcessCluster(torch_engine)


class TestEvaluation(KeptRowsContract):
    def make(self, folder: Path) -> StageRun:
        (folder / "scores.py").write_text(FUNCTION)
        scorers = {"exact": {"type": "verifier"}, "short": SHORT}
        settings = {**SAMPLED, "scorers": scorers, "pass_at": (1, 2)}
        inputs = {"model": base_model(folder / "base"), "dataset": dataset(folder / "d", PROMPTS)}
        return StageRun(STAGES["evaluation"], STAGES["evaluation"].config.model_validate(settings), inputs, folder)


class TestGenerate(KeptRowsContract):
    """Read by two reward models, and compared with a reference."""

    def make(self, folder: Path) -> StageRun:
        rewards = {"exact": {"type": "verifier"}, "whole": WHOLE}
        settings = {**SAMPLED, "rewards": rewards, "engine": ENGINE, "reference": {"model": "r"}, "keep_tokens": True}
        base = base_model(folder / "base")
        inputs = {
            "model": base, "dataset": dataset(folder / "d", PROMPTS),
            "reference.model": base_model(folder / "r", seed=1),
            "rewards.whole.model": reward_model(folder / "whole", base, seed=1, mean=0.5, std=2.0),
        }  # fmt: skip
        return StageRun(STAGES["generate"], STAGES["generate"].config.model_validate(settings), inputs, folder)


@pytest.mark.endurance("chaos")
class TestGenerateStoppedWhileModelsRead(TestGenerate):
    stop_after = 14  # all completions are sampled


@pytest.mark.endurance("chaos")
class TestGenerateStoppedWhileItIsCompared(TestGenerate):
    stop_after = 30  # and have their rewards


class TestLogprobs(KeptRowsContract):
    def make(self, folder: Path) -> StageRun:
        settings = {**AT_ONCE, "dataset": "d", "max_length": 32, "engine": ENGINE}
        inputs = {"model": base_model(folder / "base"), "dataset": dataset(folder / "d", pairs(10))}
        return StageRun(STAGES["logprobs"], STAGES["logprobs"].config.model_validate(settings), inputs, folder)


class TestTopLogprobs(KeptRowsContract):
    def make(self, folder: Path) -> StageRun:
        settings = {**AT_ONCE, "dataset": "d", "max_length": 48, "engine": ENGINE, "k": 4}
        inputs = {"model": base_model(folder / "base"), "dataset": dataset(folder / "d", conversations(10))}
        stage = STAGES["top_logprobs"]
        return StageRun(stage, stage.config.model_validate(settings), inputs, folder)


class TestScore(KeptRowsContract):
    def make(self, folder: Path) -> StageRun:
        (folder / "scores.py").write_text(FUNCTION)
        base = base_model(folder / "base")
        rows = [{"prompt": row["prompt"], "completions": [{"text": row["answer"]}, {"text": "zz"}]} for row in PROMPTS]
        settings = {
            **AT_ONCE, "dataset": "d", "rewards": {"short": SHORT, "whole": WHOLE}, "max_length": 24, "engine": ENGINE,
            "rows_per_call": 4,
        }  # fmt: skip
        inputs = {
            "dataset": dataset(folder / "d", rows),
            "rewards.whole.model": reward_model(folder / "whole", base, seed=1, mean=0.5, std=2.0),
        }
        return StageRun(STAGES["score"], STAGES["score"].config.model_validate(settings), inputs, folder)


@pytest.mark.endurance("chaos")
class TestScoreStoppedWhileAModelReads(TestScore):
    stop_after = 14
