"""Validation while a real trainer trains, with an engine that computes with the weights it was given."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.contract import Input, Output
from rlhf_core.errors import StageError, WeightSyncError
from rlhf_core.rollout.digest import tensor_digest
from rlhf_core.rollout.engine import Request
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.transport.base import Transport, WeightManifest
from rlhf_core.stages import rl
from rlhf_core.stages.in_process import InProcessCluster
from rlhf_core.types import Completion
from tests.rlhf_core.rl.torch_engine import TorchEngine
from tests.rlhf_core.stages.context import LocalContext, wait_for_checkpoint
from tests.rlhf_core.stages.supervised_runs import base_model, context_of, dataset

pytestmark = pytest.mark.parts

CONFIG: dict[str, Any] = {
    "algorithm": "grpo", "dataset": "prompts", "steps": 4, "prompts_per_step": 2, "sampling": {"max_tokens": 3},
    "rollout": {"max_length": 24}, "engine": {"dtype": "float32", "zero_stage": 0},
    "grpo": {
        "rewards": {"various": {"type": "function", "path": "user.py", "function": "various"}}, "group_size": 3,
        "optimizer": {"learning_rate": 1e-2},
    },
}  # fmt: skip
VALIDATION: dict[str, Any] = {
    "dataset": "held_out", "every_steps": 1, "samples": 2, "sampling": {"max_tokens": 2, "temperature": 0.5},
    "scorers": {"table": {"type": "function", "path": "user.py", "function": "table"}},
}  # fmt: skip
# Each validation scores 3 prompts, one greedy completion and two samples each, in one call.
USER = """
import json, pathlib
calls = 0

def various(completions, prompts, rows):
    return [sum(map(ord, c)) % 7 / 7 for c in completions]

def table(completions, prompts, rows, start=0):
    global calls
    scores = json.loads((pathlib.Path(__file__).parent / "scores.json").read_text())
    calls += 1
    return [scores[start + calls - 1]] * len(completions)
"""


class WatchedEngine(TorchEngine):
    """Keeps what it was given and asked: ("load", version, digest of a weight), ("sample", temperature, version)."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, max_length=24)
        self.log: list[tuple[str, Any, Any]] = []

    def load_weights(self, transport: Transport, manifest: WeightManifest) -> None:
        super().load_weights(transport, manifest)
        self.log.append(("load", manifest.version, digest_of(dict(transport.receive(manifest)))))

    def generate(self, requests: Sequence[Request], *, keep_prefixes: bool = False) -> list[Completion]:
        self.log.append(("sample", requests[0].parameters.temperature, self.weight_version))
        return super().generate(requests)


def file_digest(folder: Path) -> str:
    """Of the weights in `folder`."""
    return digest_of(load_file(folder / "model.safetensors"))


def digest_of(state: Mapping[str, Tensor]) -> str:
    """In the order of the names."""
    return hashlib.sha256("".join(tensor_digest(state[name]) for name in sorted(state)).encode()).hexdigest()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Input]:
    folder = tmp_path_factory.mktemp("inputs")
    rows = [{"prompt": [{"role": "user", "content": word}]} for word in ("ab", "cd", "ef")]
    prompts, held_out = dataset(folder / "prompts", rows), dataset(folder / "held_out", rows)
    return {"model": base_model(folder / "base", tied=True), "dataset": prompts, "validation.dataset": held_out}


def run(
    inputs: dict[str, Input],
    folder: Path,
    scores: list[float],
    engine: type[WatchedEngine] = WatchedEngine,
    **settings: Any,
) -> tuple[Output, LocalContext, WatchedEngine]:
    folder.mkdir(exist_ok=True)
    (folder / "user.py").write_text(USER)
    (folder / "scores.json").write_text(json.dumps(scores))
    context = context_of(folder / "work", inputs)
    context.user_files_root = folder
    watched = engine(inputs["model"].folder)
    cluster = InProcessCluster(lambda spec, context: nullcontext(InlineEngines(watched)))
    config = RLConfig.model_validate({**CONFIG, "validation": VALIDATION, **settings})
    return rl.run(config, inputs, context, cluster), context, watched


def loads(engine: WatchedEngine) -> dict[int, str]:
    return {version: digest for what, version, digest in engine.log if what == "load"}


def test_the_weights_that_were_validated_best_are_the_result(inputs: dict[str, Input], tmp_path: Path) -> None:
    """Scores: the second step is best, the third as good, the last worse."""
    output, context, engine = run(inputs, tmp_path, [0.25, 0.75, 0.75, 0.5])
    assert file_digest(output.folder) == loads(engine)[2]
    assert len(set(loads(engine).values())) == 4
    validated = [
        {n.removeprefix("validation/"): v for n, v in line.items() if "validation/" in n} for _, line in context.logs
    ]
    assert [line["mean_score"] for line in validated] == [0.25, 0.75, 0.75, 0.5]
    assert [(line["best"], line["best_step"]) for line in validated] == [(0.25, 1), (0.75, 2), (0.75, 2), (0.75, 2)]
    assert {"pass@1", "pass@2", "sampled_mean_score", "sampled_pass@1", "completion_length"} <= validated[0].keys()
    assert all("seconds/validation" in line for _, line in context.logs)
    assert (output.metrics["validation_best"], output.metrics["validation_best_step"]) == (0.75, 2)


@pytest.mark.endurance("rl-matrix")
def test_another_set_has_its_own_sampling_and_may_choose_the_weights(inputs: dict[str, Input], tmp_path: Path) -> None:
    """Scores: of the two steps by the main set, and by the other."""
    table = {**VALIDATION["scorers"]["table"], "options": {"start": 2}}
    far = {"dataset": "far", "samples": 1, "sampling": {"max_tokens": 4, "temperature": 0.25}, "scorers": {"t": table}}
    validation = {**VALIDATION, "metric": "far/mean_score", "also": {"far": far}}
    long = [{"prompt": [{"role": "user", "content": word}]} for word in ("gh", "x" * 30)]
    other = {**inputs, "validation.also.far.dataset": dataset(tmp_path / "far", long, "drop")}
    output, context, engine = run(other, tmp_path / "run", [0.5, 1.0, 0.75, 0.25], steps=2, validation=validation)
    assert file_digest(output.folder) == loads(engine)[1]
    found = [
        {name: line[f"validation/{name}"] for name in ("mean_score", "far/mean_score", "far/sampled_pass@1", "best")}
        for _, line in context.logs
    ]
    assert found == [
        {"mean_score": 0.5, "far/mean_score": 0.75, "far/sampled_pass@1": 0.0, "best": 0.75},
        {"mean_score": 1.0, "far/mean_score": 0.25, "far/sampled_pass@1": 0.0, "best": 0.75},
    ]
    assert (output.metrics["validation_best"], output.metrics["validation_best_step"]) == (0.75, 1)
    assert output.metrics["validation_far_rows_dropped_too_long"] == 1
    step = [1.0, 0.0, 0.5, 0.0, 0.25]  # temperatures: of the rollouts, then greedy and sampled of each set
    assert [value for what, value, _ in engine.log if what == "sample"] == step * 2
    other["validation.also.far.dataset"] = dataset(tmp_path / "empty", [])
    with pytest.raises(StageError, match=r"validation\.also\.far\.dataset` has no prompts to validate with"):
        run(other, tmp_path / "empty_run", [], validation=validation)


@pytest.mark.parametrize("hybrid", [False, True])
def test_each_validation_is_by_the_version_that_was_just_proven(
    inputs: dict[str, Input], tmp_path: Path, hybrid: bool
) -> None:
    _, _, engine = run(inputs, tmp_path, [0.0, 1.0], hybrid=hybrid, validation={**VALIDATION, "every_steps": 2})
    step = [("sample", 1.0), ("load", None)]
    validation = [("sample", 0.0), ("sample", 0.5)]
    assert [(what, None if what == "load" else value) for what, value, _ in engine.log] == [
        *step, *step, *validation, *step, *step, *validation
    ]  # fmt: skip
    assert [version for what, _, version in engine.log if what == "sample"] == [0, 1, 2, 2, 2, 3, 4, 4]


@pytest.mark.endurance("rl-matrix")
@pytest.mark.parametrize("hybrid", [False, True])
def test_the_average_is_validated_and_kept_and_never_trained_on(
    inputs: dict[str, Input], tmp_path: Path, hybrid: bool
) -> None:
    validation = {**VALIDATION, "every_steps": 2}
    output, _, engine = run(inputs, tmp_path, [1.0, 0.5], ema_decay=0.5, hybrid=hybrid, validation=validation)
    # Steps 1 and 2 publish versions 1 and 2, the validation the average as 3, and the weights again as 4.
    digests = loads(engine)
    assert list(digests) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert digests[2] == digests[4] != digests[3]
    assert [version for what, value, version in engine.log if (what, value) == ("sample", 1.0)] == [0, 1, 4, 5]
    assert [version for what, value, version in engine.log if (what, value) == ("sample", 0.0)] == [3, 7]
    assert file_digest(output.folder) == digests[3]


@pytest.mark.endurance("rl-matrix")
def test_the_last_average_is_the_result_where_the_best_is_not_asked_for(
    inputs: dict[str, Input], tmp_path: Path
) -> None:
    validation = {**VALIDATION, "every_steps": 2, "keep": "last"}
    output, _, engine = run(inputs, tmp_path, [1.0, 0.5], ema_decay=0.5, validation=validation)
    assert file_digest(output.folder) == loads(engine)[7]
    output, _, engine = run(inputs, tmp_path / "live", [1.0, 0.5], validation=validation)
    assert file_digest(output.folder) == loads(engine)[4]


class ForgetfulEngine(WatchedEngine):
    """Answers greedy requests with another version than it has proven."""

    def generate(self, requests: Sequence[Request], *, keep_prefixes: bool = False) -> list[Completion]:
        version = self.weight_version
        if requests[0].parameters.temperature == 0:
            self.weight_version = 0
        completions = super().generate(requests)
        self.weight_version = version
        return completions


def test_completions_of_other_weights_are_refused(inputs: dict[str, Input], tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match=r"completions were sampled with weights \[0\], published is 1"):
        run(inputs, tmp_path, [1.0] * 4, engine=ForgetfulEngine)


class DyingEngine(WatchedEngine):
    """Dies in the rollout of the third step, when the second is kept."""

    def generate(self, requests: Sequence[Request], *, keep_prefixes: bool = False) -> list[Completion]:
        wait_for_checkpoint()
        if self.weight_version == 2 and requests[0].parameters.temperature == 1.0:
            raise ConnectionError("died")
        return super().generate(requests)


@pytest.mark.endurance("rl-matrix")
def test_a_run_that_goes_on_knows_the_best_and_has_its_weights(inputs: dict[str, Input], tmp_path: Path) -> None:
    kept = {"checkpoint": {"every_steps": 1}}
    whole, _, engine = run(inputs, tmp_path / "whole", [0.25, 0.75, 0.5, 0.5], **kept)
    with pytest.raises(ConnectionError):
        run(inputs, tmp_path / "killed", [0.25, 0.75], engine=DyingEngine, **kept)
    resumed, context, _ = run(inputs, tmp_path / "killed", [0.5, 0.5], **kept)
    assert [(line["validation/best"], line["validation/best_step"]) for _, line in context.logs[-2:]] == [(0.75, 2)] * 2
    assert file_digest(resumed.folder) == file_digest(whole.folder) == loads(engine)[2]


@pytest.mark.endurance("rl-matrix")
def test_an_average_goes_on_too(inputs: dict[str, Input], tmp_path: Path) -> None:
    settings = {"checkpoint": {"every_steps": 1}, "ema_decay": 0.5, "validation": None}
    whole, _, _ = run(inputs, tmp_path / "whole", [], **settings)
    with pytest.raises(ConnectionError):
        run(inputs, tmp_path / "killed", [], engine=DyingEngine, **settings)
    resumed, _, _ = run(inputs, tmp_path / "killed", [], **settings)
    assert file_digest(resumed.folder) == file_digest(whole.folder)
