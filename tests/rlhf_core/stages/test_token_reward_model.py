"""Process reward models in token form: trained, read by others, and read by RL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import encode_completion, encode_prompt, load_tokenizer
from rlhf_core.chat.tokenizers import word_level_tokenizer
from rlhf_core.config.rewards.rewards import ProcessRewardModelReward, RewardModelReward
from rlhf_core.config.stages.base_model import BaseModelConfig
from rlhf_core.config.stages.reward_models import ProcessRewardModelConfig
from rlhf_core.contract import Input, Output
from rlhf_core.errors import StageError
from rlhf_core.models.loading import load_scalar_model
from rlhf_core.rewards.model import RewardReader
from rlhf_core.rl.roles import Role
from rlhf_core.rl.scoring import load_model, scores
from rlhf_core.stages import base, process_reward_model
from rlhf_core.types import PackedBatch, Prompt, Trajectory
from tests.rlhf_core.stages.context import LocalContext
from tests.rlhf_core.stages.supervised_runs import (
    ENGINE,
    base_model,
    context_of,
    dataset,
    inline,
    no_cluster,
    stored_config,
)

pytestmark = pytest.mark.parts

FORM = {"form": "token", "step_tag": " #", "labels": ("+", "-"), "separator": "; "}
CONFIG = ProcessRewardModelConfig.model_validate({
    "dataset": "d", "batch_size": 8, "epochs": 4, "max_length": 64, "log_every": 1, "engine": ENGINE, **FORM,
    "optimizer": {"learning_rate": 5e-3, "warmup_share": 0.0, "schedule": "constant"},
    "validation": {"dataset": "v", "every_steps": 4, "metric": "accuracy"},
})  # fmt: skip
STEPS = ("ab", "az", "zb", "ba")
READS = {"type": "process_reward_model", "separator": "; "}
Inputs = dict[str, Input]


def rows(count: int) -> list[dict[str, Any]]:
    """Steps with a `z` are wrong."""
    return [
        {
            "prompt": [{"role": "user", "content": f"say {index}"}],
            "steps": (steps := [*STEPS[index % 4 :], "bz"[index % 2]]),
            "labels": [float("z" not in step) for step in steps],
        }
        for index in range(count)
    ]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("inputs")
    return {
        "model": base_model(folder / "base"), "dataset": dataset(folder / "d", rows(48)),
        "validation.dataset": dataset(folder / "v", rows(16)),
    }  # fmt: skip


@pytest.fixture(scope="module")
def trained(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Output:
    return process_reward_model.run(CONFIG, inputs, context_of(tmp_path_factory.mktemp("run"), inputs), inline)


def probabilities(folder: Path) -> Tensor:
    """Of all steps of the held-out rows, as others read such a model: p(+) of + and - at the tag's last token."""
    tokenizer = load_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    vocabulary = tokenizer.get_vocab()
    read = []
    for row in rows(16):
        ids, _ = encode_completion(tokenizer, row["prompt"], "; ".join(f"{step} #" for step in row["steps"]))
        start = len(encode_prompt(tokenizer, row["prompt"]))
        places = [place for place in range(start, len(ids)) if ids[place] == vocabulary["#"]]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, places]
        read.append(logits[:, [vocabulary["+"], vocabulary["-"]]].softmax(-1)[:, 0])
    return torch.cat(read)


def as_rl_reads(folder: Path, policy: Path, ref: Any, **settings: Any) -> Tensor:
    role = Role("reward:steps", ref, "scalar", ENGINE)
    models = {role.name: load_model(role, folder)}

    def token_scores(batch: PackedBatch) -> Tensor:
        return scores(models, [batch], [role.name], 1.0)[0][role.name]

    tokenizer = load_tokenizer(policy)
    trajectories = []
    for row in rows(16):
        completion = "; ".join(row["steps"])
        ids, mask = map(torch.tensor, encode_completion(tokenizer, row["prompt"], completion))
        prompt = Prompt("p", "", (), {"prompt": row["prompt"]})
        trajectories.append(Trajectory(prompt, ids, mask, torch.zeros(len(ids)), 0, "stop", completion=completion))
    reader = RewardReader.of(ProcessRewardModelReward.model_validate({**READS, **settings}), folder, policy, 64)
    result = reader.reward(token_scores)(trajectories)
    assert result.steps is not None
    assert result.separator == "; "
    return torch.tensor([reward for steps in result.steps for reward in steps], dtype=torch.float64)


def test_it_learns_which_steps_are_right_and_others_read_it(trained: Output) -> None:
    labels = torch.tensor([label for row in rows(16) for label in row["labels"]])
    assert trained.kind == Kind.REWARD_MODEL
    assert trained.metrics["held_out_accuracy"] == trained.metrics["validation_best"] == 1.0
    read = probabilities(trained.folder)
    assert ((read > 0.5) == (labels > 0.5)).all()
    stored = stored_config(trained.folder)
    vocabulary = load_tokenizer(trained.folder).get_vocab()
    assert stored["architectures"] == ["LlamaForCausalLM"]
    assert (stored["step_tag"], stored["step_separator"]) == (" #", "; ")
    assert stored["step_label_ids"] == [vocabulary["+"], vocabulary["-"]]
    assert stored["reward_mean"] == pytest.approx(read.mean().item(), abs=1e-5)
    assert stored["reward_std"] == pytest.approx(read.std(correction=0).item(), rel=1e-4)


def test_rl_reads_probabilities_of_the_policys_steps_as_text(trained: Output, inputs: Inputs, tmp_path: Path) -> None:
    ref, expected = inputs["model"].manifest.ref, probabilities(trained.folder)
    raw = as_rl_reads(trained.folder, inputs["model"].folder, ref, normalize=False)
    torch.testing.assert_close(raw, expected, rtol=0, atol=1e-5)
    other = word_level_tokenizer(("say ", "z; "), 64, images=False)
    other.save_pretrained(tmp_path)
    assert len(other) > len(load_tokenizer(trained.folder))
    torch.testing.assert_close(as_rl_reads(trained.folder, tmp_path, ref, normalize=False), raw, rtol=0, atol=1e-6)
    scaled = as_rl_reads(trained.folder, inputs["model"].folder, ref)
    torch.testing.assert_close(scaled, (raw - raw.mean()) / raw.std(correction=0), rtol=0, atol=1e-3)


def test_a_model_of_others_gets_its_form_from_the_base_stage(inputs: Inputs, tmp_path: Path) -> None:
    settings = {
        "source": {"type": "folder", "path": str(inputs["model"].folder)}, "dtype": "float32",
        "kind": "token_reward_model", "step_tag": " #", "separator": "; ",
    }  # fmt: skip
    made = base.run(BaseModelConfig.model_validate(settings), {}, LocalContext(tmp_path, user_files_root=tmp_path))
    assert made.kind == Kind.REWARD_MODEL
    raw = as_rl_reads(made.folder, inputs["model"].folder, inputs["model"].manifest.ref, normalize=False)
    torch.testing.assert_close(raw, probabilities(made.folder), rtol=0, atol=1e-5)
    with pytest.raises(StageError, match="reward_mean=None and reward_std=None, by which its rewards cannot be"):
        as_rl_reads(made.folder, inputs["model"].folder, inputs["model"].manifest.ref)


def test_it_is_read_as_what_it_is_alone(trained: Output) -> None:
    folder = trained.folder
    with pytest.raises(StageError, match="is a process reward model in token form: set type: process_reward_model"):
        RewardReader.of(RewardModelReward(type="reward_model"), folder, folder, 32)
    with pytest.raises(StageError, match="this is a process reward model in token form, which has no score head"):
        load_scalar_model(folder, dtype=torch.float32, attention="eager")
    with pytest.raises(StageError, match=r"trained on steps that end with '; ', and is to be read where '\\n' ends"):
        RewardReader.of(ProcessRewardModelReward(type="process_reward_model"), folder, folder, 32)


def test_a_step_that_holds_the_tag_is_a_bad_row(inputs: Inputs, tmp_path: Path) -> None:
    asked = [{"prompt": [{"role": "user", "content": "q"}], "steps": ["a #b", "c"], "labels": [1.0, 0.0]}]
    given = {**inputs, "dataset": dataset(tmp_path / "d", asked)}
    with pytest.raises(StageError, match=r"row row0: steps\[0\] holds the tag ' #': take it out, or set another"):
        process_reward_model.run(CONFIG, given, context_of(tmp_path / "run", given), no_cluster)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [({"step_tag": "#"}, "step_tag: it applies only to a"), ({"labels": ("a", "b")}, "labels: it applies only to")],
)
def test_settings_of_the_token_form_need_it(settings: dict[str, Any], problem: str) -> None:
    plain = {**CONFIG.model_dump(), "form": "score", "step_tag": " ки"}
    with pytest.raises(ValueError, match=problem):
        ProcessRewardModelConfig.model_validate({**plain, **settings})
    with pytest.raises(ValueError, match=problem):
        BaseModelConfig.model_validate({"source": {"type": "folder", "path": "m"}, **settings})
