"""Rows with images through the stages: dataset, SFT, RL with a real engine, evaluation; and where they are refused."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import ended_completion, load_tokenizer
from rlhf_core.chat.image_messages import images_of
from rlhf_core.config.data.dataset import DatasetConfig
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.config.stages.evaluation import EvaluationConfig
from rlhf_core.config.stages.language_models import SFTConfig
from rlhf_core.config.stages.logprobs import LogprobsConfig
from rlhf_core.config.stages.preference import PreferenceConfig
from rlhf_core.config.stages.reward_models import RewardModelConfig
from rlhf_core.config.stages.score import ScoreConfig
from rlhf_core.contract import Input, Output
from rlhf_core.data.reading import dataset_info, iterate_rows, read_rows
from rlhf_core.errors import EpisodeError, StageError
from rlhf_core.models.folders.folder import copy_tokenizer, read_config
from rlhf_core.models.folders.readers import stored_scale
from rlhf_core.models.loading import load_causal_model, load_scalar_model
from rlhf_core.models.packed import PolicyModel, ScalarModel
from rlhf_core.models.vision import RowImages, open_processor
from rlhf_core.rl.experience import pack_trajectories
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.scripted import ScriptedEngine
from rlhf_core.stages import dataset as dataset_stage
from rlhf_core.stages import evaluation, logprobs, preference, reward_model, rl, score, sft
from rlhf_core.stages.in_process import InProcessCluster
from rlhf_core.supervised.sft import conversation_examples, pack_sequences
from rlhf_core.types import Prompt, Trajectory
from tests.rlhf_core.pictures import picture, vision_model
from tests.rlhf_core.stages.context import LocalContext, local_input, wait_for_checkpoint
from tests.rlhf_core.stages.supervised_runs import (
    base_model,
    context_of,
    inline,
    no_cluster,
)
from tests.rlhf_core.stages.vision_runs import (
    ENGINE_SETTINGS,
    OPTIMIZER_SETTINGS,
    RL,
    ROLLOUT,
    made,
    pairs,
    recorded,
    require_log_probs_of_the_engine,
    rows,
    valid,
)
from tests.rlhf_core.vision_folders import vision_folder

pytestmark = pytest.mark.endurance("architectures")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Input:
    return vision_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Input:
    output = made(tmp_path_factory.mktemp("talks") / "d", "conversations", rows(40))
    return local_input(output.folder, Kind.DATASET)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Input:
    output = made(tmp_path_factory.mktemp("prompts") / "d", "prompts", rows(10))
    return local_input(output.folder, Kind.DATASET)


def test_the_dataset_keeps_each_image_of_its_rows_once(tmp_path: Path) -> None:
    given = rows(4)
    given += [{**given[0], "answer": "green"}, {"prompt": "x", "answer": "y"}]
    output = made(tmp_path / "d", "prompts", given, drop_duplicates=False, limit=6, processes=2)
    kept = {path.name for path in (output.folder / "images").iterdir()}
    named = {digest for row in read_rows(output.folder) for digest in row["prompt"][0].get("images", ())}
    assert kept == named
    assert output.metrics["images"] == dataset_info(output.folder)["images"] == len(kept) == 4
    few = made(tmp_path / "few", "prompts", given, limit=1)
    assert len(list((few.folder / "images").iterdir())) <= 1
    text = made(tmp_path / "text", "prompts", given[-1:])
    assert not (text.folder / "images").exists()
    assert "images" not in {**text.metrics, **dataset_info(text.folder)}


def test_files_that_rows_name_are_read_from_their_folder(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    (tmp_path / "pictures" / "a").mkdir(parents=True)
    (tmp_path / "pictures" / "a" / "red.png").write_bytes(picture("red"))
    folder.mkdir()
    (folder / "d.jsonl").write_text(json.dumps({"prompt": "colour?", "images": ["a/red.png"]}))
    (folder / "pictures").symlink_to(tmp_path / "pictures")
    source = {"type": "files", "paths": ["d.jsonl"]}
    settings = valid(DatasetConfig, {"format": "prompts", "source": source, "images": {"folder": "pictures"}})
    output = dataset_stage.run(settings, {}, LocalContext(folder / "work", user_files_root=folder, name="data.d"))
    (kept,) = (output.folder / "images").iterdir()
    assert kept.read_bytes() == picture("red")


def test_a_bad_image_is_an_error_or_dropped_and_counted(tmp_path: Path) -> None:
    given = [*rows(2), {"prompt": "x", "image": "data:image/png;base64,QUJD"}]
    with pytest.raises(StageError, match=r"data.d: d.jsonl line 3: `image` is not an image that can be read"):
        made(tmp_path / "error", "prompts", given)
    output = made(tmp_path / "drop", "prompts", given, on_bad_row="drop")
    assert (output.metrics["rows"], output.metrics["bad_rows"]) == (2, 1)


def config(**settings: Any) -> SFTConfig:
    return valid(SFTConfig, {
        "dataset": "d", "epochs": 6, "batch_size": 8, "max_length": 64, "log_every": 2,
        "optimizer": OPTIMIZER_SETTINGS, "engine": ENGINE_SETTINGS, **settings,
    })  # fmt: skip


def weights(output: Output) -> dict[str, torch.Tensor]:
    return load_file(output.folder / "model.safetensors")


@pytest.fixture(scope="module")
def trained(model: Input, talks: Input, tmp_path_factory: pytest.TempPathFactory) -> Output:
    inputs = {"model": model, "dataset": talks}
    context = context_of(tmp_path_factory.mktemp("sft"), inputs)
    return sft.run(config(checkpoint={"every_steps": 7}), inputs, context, inline)


def answers(folder: Path, dataset: Input) -> float:
    """The mean log-prob of the trained tokens."""
    tokenizer, processor = load_tokenizer(folder), open_processor(folder)
    images = RowImages(processor, dataset.folder / "images")
    policy = PolicyModel(load_causal_model(folder, dtype=torch.float32, attention="sdpa").eval())
    found = [conversation_examples(tokenizer, row, images)[0] for row in read_rows(dataset.folder)]
    batch = pack_sequences(found, processor)
    with torch.no_grad():
        return float((policy(batch)[0] * batch.loss_mask).sum() / batch.loss_mask.sum())


def test_sft_learns_what_is_in_the_pictures(model: Input, talks: Input, trained: Output) -> None:
    assert answers(model.folder, talks) < -2
    assert answers(trained.folder, talks) > -0.1
    changed = [name for name, value in weights(trained).items() if not torch.equal(value, load_file(
        model.folder / "model.safetensors")[name])]  # fmt: skip
    assert any("vision_model" in name for name in changed)
    assert (trained.folder / "processor_config.json").is_file()


@pytest.mark.endurance("architectures")
def test_sft_that_is_killed_ends_with_the_same_weights(
    model: Input, talks: Input, trained: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = {"model": model, "dataset": talks}
    settings = config(checkpoint={"every_steps": 7})
    context = context_of(tmp_path, inputs)

    def fails(step: int, metrics: dict[str, float]) -> None:
        context.logs.append((step, metrics))
        if step >= 16:
            wait_for_checkpoint()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(context, "log", fails)
        with pytest.raises(KeyboardInterrupt):
            sft.run(settings, inputs, context, inline)
    assert context.checkpoints.newest_step() == 14
    resumed = sft.run(settings, inputs, context_of(tmp_path, inputs), inline)
    for name, value in weights(trained).items():
        assert torch.equal(weights(resumed)[name], value), name


DPO = {
    "dataset": "d", "epochs": 12, "batch_size": 8, "max_length": 64, "log_every": 2, "optimizer": OPTIMIZER_SETTINGS,
    "engine": ENGINE_SETTINGS, "losses": {"dpo": {"type": "dpo", "beta": 0.5}},
}  # fmt: skip


@pytest.mark.endurance("architectures")
@pytest.mark.slow("RL of a vision model with vLLM")
def test_dpo_prefers_what_is_in_the_pictures(model: Input, tmp_path: Path) -> None:
    """Of pairs whose prompts differ in their pictures alone."""
    dataset = local_input(made(tmp_path / "pairs", "preferences", pairs(rows(16))).folder, Kind.DATASET)
    inputs = {"model": model, "dataset": dataset, "reference.model": model, "validation.dataset": dataset}
    validation = {"dataset": "d", "every_steps": 12, "metric": "accuracy"}
    settings = valid(PreferenceConfig, {**DPO, "validation": validation})
    output = preference.run(settings, inputs, context_of(tmp_path / "dpo", inputs), inline)
    assert output.metrics["validation_best"] == 1.0


def test_stored_log_probs_of_pairs_with_pictures_are_those_of_the_policy(model: Input, tmp_path: Path) -> None:
    """So that the first step of DPO, from the model that they were read with, finds no difference."""
    dataset = local_input(made(tmp_path / "pairs", "preferences", pairs(rows(16))).folder, Kind.DATASET)
    reading = valid(LogprobsConfig, {"dataset": "d", "max_length": 64, "engine": ENGINE_SETTINGS})
    inputs = {"model": model, "dataset": dataset}
    stored = logprobs.run(reading, inputs, context_of(tmp_path / "logprobs", inputs), inline)
    inputs |= {"reference.logprobs.before": local_input(stored.folder, Kind.LOGPROBS)}
    context = context_of(tmp_path / "dpo", inputs)
    settings = {**DPO, "epochs": 1, "max_steps": 1, "log_every": 1, "reference": {"logprobs": ["before"]}}
    preference.run(valid(PreferenceConfig, settings), inputs, context, inline)
    (_, metrics), *_ = context.logs
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-5)


def test_a_frozen_vision_encoder_stays_as_it_is(model: Input, talks: Input, tmp_path: Path) -> None:
    inputs = {"model": model, "dataset": talks}
    engine = {**ENGINE_SETTINGS, "freeze_vision": True, "zero_stage": 2}
    output = sft.run(config(engine=engine, max_steps=2), inputs, context_of(tmp_path, inputs), inline)
    before = load_file(model.folder / "model.safetensors")
    for name, value in weights(output).items():
        assert torch.equal(value, before[name]) == ("vision_model" in name), name


def scalar_folder(causal: Path, folder: Path) -> Input:
    """A reward model of the causal model in a folder, with a fresh head."""
    model: Any = load_scalar_model(causal, dtype=torch.float32, attention="sdpa")
    model.save_pretrained(folder)
    copy_tokenizer(causal, folder)
    return local_input(folder, Kind.REWARD_MODEL)


def test_models_of_text_refuse_images(model: Input, talks: Input, prompts: Input, tmp_path: Path) -> None:
    text = {"model": base_model(tmp_path / "base", hidden=64), "dataset": talks}
    with pytest.raises(StageError, match="a message has images, but the model reads text alone"):
        sft.run(config(), text, context_of(tmp_path / "sft", text), no_cluster)
    asked = {"model": model, "dataset": prompts}
    other = vision_folder("smolvlm", tmp_path / "other")
    for judge, problem in (
        (text["model"].folder, "the prompts have images, and it reads text alone"),
        (other, "the prompts have images, and it is of another architecture than the policy"),
    ):
        judged = {**RL["grpo"], "rewards": {"taste": {"type": "reward_model", "normalize": False}}}
        reading = {**asked, "grpo.rewards.taste.model": scalar_folder(judge, tmp_path / judge.name / "judge")}
        with pytest.raises(StageError, match=rf"grpo.rewards.taste: {problem}"):
            rl.run(valid(RLConfig, {**RL, "grpo": judged}), reading, context_of(tmp_path / "rl", reading), no_cluster)
    (tmp_path / "plays.py").write_text("class Agent:\n    async def step(self, states, **kwargs): ...")
    agent = {"type": "executor", "form": "openrlhf", "path": "plays.py", "function": "Agent"}
    playing = {"environment": agent, "rollout": {**ROLLOUT, "repeatable": False}}
    played = replace(context_of(tmp_path / "plays", asked), user_files_root=tmp_path)
    with pytest.raises(StageError, match=r"row .* has images, and environment reads text alone"):
        rl.run(valid(RLConfig, {**RL, **playing}), asked, played, no_cluster)


@pytest.mark.endurance("architectures")
@pytest.mark.timeout(300)
@pytest.mark.slow("RL of a vision model with vLLM")
def test_rl_trains_what_the_engine_sampled_of_pictures(
    trained: Output, in_process: InProcessCluster, prompts: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof of each publish compares weights; here log-probs too, of sequences with images and without."""
    policy = local_input(trained.folder, Kind.POLICY)
    inputs = {"model": policy, "dataset": prompts, "validation.dataset": prompts}
    context = context_of(tmp_path, inputs)
    seen = recorded(monkeypatch)
    validation = {"dataset": "d", "every_steps": 1, "scorers": {"exact": {"type": "verifier"}}}
    output = rl.run(valid(RLConfig, {**RL, "validation": validation}), inputs, context, in_process)
    assert len(context.logs) == 2
    assert context.logs[0][1]["validation/pass@1"] > 0.8
    assert {bool(t.prompt.images) for t in seen} == {True, False}
    require_log_probs_of_the_engine(seen, policy.folder)
    before = load_file(policy.folder / "model.safetensors")
    assert any("vision_model" in n and not torch.equal(v, before[n]) for n, v in weights(output).items())
    print({k: v for k, v in context.logs[-1][1].items() if "/" not in k})


@pytest.mark.endurance("architectures")
@pytest.mark.timeout(300)
@pytest.mark.slow("RL of a vision model with vLLM")
def test_critic_and_reward_model_of_ppo_see_the_pictures(
    model: Input, trained: Output, in_process: InProcessCluster, prompts: Input, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    policy = local_input(trained.folder, Kind.POLICY)
    dataset = local_input(made(tmp_path / "pairs", "preferences", pairs(rows(16))).folder, Kind.DATASET)
    judging = {"model": policy, "dataset": dataset}
    settings = {"dataset": "d", "epochs": 6, "batch_size": 8, "max_length": 64, "optimizer": OPTIMIZER_SETTINGS}
    learned = reward_model.run(
        valid(RewardModelConfig, {**settings, "engine": ENGINE_SETTINGS}), judging,
        context_of(tmp_path / "rm", judging), inline,
    )  # fmt: skip
    judge = local_input(learned.folder, Kind.REWARD_MODEL)
    inputs = {"model": policy, "dataset": prompts, "ppo.rewards.taste.model": judge}
    context, seen = context_of(tmp_path / "rl", inputs), recorded(monkeypatch)
    taste = {"rewards": {"taste": {"type": "reward_model"}}, "group_size": 1}
    ppo = {**RL["grpo"], **taste, "critic": {"optimizer": OPTIMIZER_SETTINGS}}
    rl.run(valid(RLConfig, {**RL, "steps": 1, "algorithm": "ppo", "ppo": ppo}), inputs, context, in_process)
    assert any(t.prompt.images for t in seen)
    scale = stored_scale(read_config(judge.folder))
    assert scale is not None
    alone = ScalarModel(load_scalar_model(judge.folder, dtype=torch.float32, attention="sdpa").eval())
    processor = open_processor(policy.folder)
    for trajectory in seen:
        with torch.no_grad():
            score = float(alone(pack_trajectories([trajectory], processor))[-1])
        assert trajectory.reward == pytest.approx((score - scale.mean) / scale.std, abs=1e-3)
    assert math.isfinite(context.logs[0][1]["value_loss"])


@pytest.mark.endurance("architectures")
@pytest.mark.slow("trains a reward model")
def test_a_reward_model_scores_completions_about_pictures(model: Input, talks: Input, tmp_path: Path) -> None:
    policy = local_input(model.folder, Kind.POLICY)
    dataset = local_input(made(tmp_path / "pairs", "preferences", pairs(rows(8))).folder, Kind.DATASET)
    judging = {"model": policy, "dataset": dataset}
    settings = {"dataset": "d", "epochs": 1, "batch_size": 8, "max_length": 64, "optimizer": OPTIMIZER_SETTINGS}
    learned = reward_model.run(
        valid(RewardModelConfig, {**settings, "engine": ENGINE_SETTINGS}), judging,
        context_of(tmp_path / "rm", judging), inline,
    )  # fmt: skip
    judge = local_input(learned.folder, Kind.REWARD_MODEL)
    inputs = {"conversations": talks, "rewards.taste.model": judge}
    config = {
        "conversations": "d", "rewards": {"taste": {"type": "reward_model", "normalize": False}}, "max_length": 64,
        "engine": ENGINE_SETTINGS,
    }  # fmt: skip
    output = score.run(valid(ScoreConfig, config), inputs, context_of(tmp_path / "score", inputs), inline)
    scored = list(iterate_rows(output.folder))
    assert output.metrics["images"] == len(list((output.folder / "images").iterdir())) > 1
    alone = ScalarModel(load_scalar_model(judge.folder, dtype=torch.float32, attention="sdpa").eval())
    processor, tokenizer = open_processor(judge.folder), load_tokenizer(judge.folder)
    images = RowImages(processor, output.folder / "images")
    for row in scored[:6]:
        (completion,) = row["completions"]
        ids, mask = ended_completion(tokenizer, row["prompt"], completion["text"])
        ids, mask, found = images.expanded(ids, mask, images_of(row["prompt"]))
        prompt = Prompt(row["id"], "", (), {}, images=found)
        trajectory = Trajectory(prompt, torch.tensor(ids), torch.tensor(mask), torch.zeros(len(ids)), 0, "stop")
        with torch.no_grad():
            expected = float(alone(pack_trajectories([trajectory], processor))[-1])
        assert completion["reward"] == pytest.approx(expected, abs=1e-4)
    assert len({round(row["completions"][0]["reward"], 5) for row in scored}) > 2


SHOWS = """
from PIL import Image


class Shows:
    def __init__(self, name="image", images=None):
        self.name = name
        self.images = images

    def reset(self, row):
        self.colour = row["answer"]
        return row["prompt"] if "images" in row["prompt"][0] else [{"role": "user", "content": f"say {self.colour} 1"}]

    def step(self, reply):
        if self.images is not None:
            return {"messages": [{"role": "user", "content": "\ufffc", "images": self.images}]}
        shown = Image.new("RGB", (40, 30), self.colour)
        question = [{"type": "image", self.name: shown}, {"type": "text", "text": "colour?"}]
        return {"messages": [{"role": "user", "content": question}], "reward": float(reply == self.colour)}
"""


@pytest.mark.endurance("architectures")
@pytest.mark.timeout(300)
@pytest.mark.slow("RL of a vision model with vLLM")
def test_what_an_environment_shows_is_sampled_from_and_trained(
    trained: Output, in_process: InProcessCluster, prompts: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its second turn, behind a prompt with an image or without: the engine's log-probs are the trainer's."""
    policy = local_input(trained.folder, Kind.POLICY)
    inputs = {"model": policy, "dataset": prompts}
    (tmp_path / "shows.py").write_text(SHOWS)
    context = replace(context_of(tmp_path / "work", inputs), user_files_root=tmp_path)
    seen = recorded(monkeypatch)
    shows = {"type": "function", "path": "shows.py", "function": "Shows", "max_turns": 2}
    grpo = {**RL["grpo"], "rewards": {"seen": {"type": "environment"}}}
    settings = {**RL, "steps": 1, "environment": shows, "grpo": grpo, "rollout": {**ROLLOUT, "max_images": 2}}
    rl.run(valid(RLConfig, settings), inputs, context, in_process)
    assert {(len(t.prompt.images), len(t.feedback_images)) for t in seen} == {(0, 1), (1, 1)}
    assert sum(t.environment_reward for t in seen) > 1.6 * len(seen)  # of 2: SFT has learned to look
    require_log_probs_of_the_engine(seen, policy.folder)


def played(
    program: str,
    environment: dict[str, Any],
    trained: Output,
    cluster: InProcessCluster,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> list[Trajectory]:
    """The trajectories of a step in which a program, in the file that `environment` names, shows up to two images."""
    dataset = local_input(made(folder / "few", "prompts", rows(5)[1:]).folder, Kind.DATASET)
    inputs = {"model": local_input(trained.folder, Kind.POLICY), "dataset": dataset}
    (folder / environment["path"]).write_text(program)
    context = replace(context_of(folder / "work", inputs), user_files_root=folder)
    seen = recorded(monkeypatch)
    settings = {
        **RL, "steps": 1, "prompts_per_step": 4, "environment": environment,
        "grpo": {**RL["grpo"], "rewards": {"seen": {"type": "environment"}}},
        "rollout": {**ROLLOUT, "max_images": 2, "repeatable": False},
        "sampling": {**RL["sampling"], "temperature": 0.3},  # so that few draws differ between runs
    }  # fmt: skip
    rl.run(valid(RLConfig, settings), inputs, context, cluster)
    return seen


AGENT = """
import asyncio, base64, io
from openai import AsyncOpenAI
from PIL import Image, ImageDraw


def question(colour):
    shown = Image.new("RGB", (40, 30), "white")
    ImageDraw.Draw(shown).rectangle((5, 5, 32, 22), fill=colour)
    file = io.BytesIO()
    shown.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    image = {"type": "image_url", "image_url": {"url": url}}
    return {"role": "user", "content": [image, {"type": "text", "text": "colour?"}]}


async def run(row, base_url, api_key):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        async def ask(*messages):
            made = await client.chat.completions.create(model="policy", messages=messages)
            return made.choices[0].message.content
        colours = ("red", "blue") if row["answer"] == "red" else ("blue", "red")
        of_row = isinstance(row["prompt"][0]["content"], list)
        asked, another = row["prompt"] if of_row else [question(colours[0])], question(colours[1])
        first, other = await asyncio.gather(ask(*asked), ask(another))
        said = {"role": "assistant", "content": first}
        await ask(*asked, said, another)
    return {"reward": float((first, other) == colours)}
"""


@pytest.mark.endurance("architectures")
@pytest.mark.timeout(300)
@pytest.mark.slow("RL of a vision model with vLLM")
def test_what_an_agent_shows_is_sampled_from_and_trained(
    trained: Output, in_process: InProcessCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the client of OpenAI: in one conversation two images, and in another one of them.

    The first is the row's, where it has one.
    """
    environment = {"type": "agent", "path": "agent.py", "max_turns": 3}
    seen = played(AGENT, environment, trained, in_process, tmp_path, monkeypatch)
    assert {(len(t.prompt.images), len(t.feedback_images)) for t in seen} == {(1, 1)}
    assert {tuple(len(branch.images) for branch in t.branches) for t in seen} == {(1,)}
    assert sum(t.environment_reward for t in seen) > 0.8 * len(seen)  # SFT has learned to look, in one turn
    require_log_probs_of_the_engine(seen, trained.folder, temperature=0.3)


EXECUTOR = """
from PIL import Image, ImageDraw


def picture(colour):
    shown = Image.new("RGB", (40, 30), "white")
    ImageDraw.Draw(shown).rectangle((5, 5, 32, 22), fill=colour)
    return {"type": "image", "image": shown}


async def run(engine, row):
    other = "blue" if row["answer"] == "red" else "red"
    asked = row["prompt"]
    if not isinstance(asked[0]["content"], list):
        asked = [{"role": "user", "content": [picture(row["answer"]), {"type": "text", "text": "colour?"}]}]
    prompt = await engine.encode(asked)
    first = await engine.generate(prompt)
    again = await engine.encode([{"role": "user", "content": [picture(other), {"type": "text", "text": "colour?"}]}])
    second = await engine.generate(prompt + first.token_ids + again)
    return {"reward": float(first.text == row["answer"]), "sequences": [[prompt, first, again, second]]}
"""


@pytest.mark.endurance("architectures")
@pytest.mark.timeout(300)
@pytest.mark.slow("RL of a vision model with vLLM")
def test_what_an_executor_shows_is_sampled_from_and_trained(
    trained: Output, in_process: InProcessCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two images in a sequence of tokens; the first is the row's, where it has one."""
    environment = {"type": "executor", "path": "plays.py"}
    seen = played(EXECUTOR, environment, trained, in_process, tmp_path, monkeypatch)
    assert {(len(t.prompt.images), len(t.feedback_images), len(t.branches)) for t in seen} == {(1, 1, 0)}
    assert sum(t.environment_reward for t in seen) > 0.8 * len(seen)  # SFT has learned to look
    require_log_probs_of_the_engine(seen, trained.folder, temperature=0.3)


@pytest.mark.parametrize(
    ("options", "rollout", "problem"),
    [
        (
            {},
            {"max_images": 1},
            r"turn 1: step\(\) returned images that cannot be shown: it has 2 images, more than",
        ),
        ({"name": "url"}, {"max_images": 4}, None),
        (
            {"images": ["0" * 64]},
            {},
            r"turn 1: step\(\) returned a message that cannot be used: `images` has 0{64}, which is",
        ),
        ({"images": ["../x"]}, {}, r"cannot be used: `images` has '../x', which is not a SHA-256"),
        ({"images": 5}, {}, r"cannot be used: `images` is 5, and no list"),
        (
            {"name": "picture"},
            {},
            r"turn 1: step\(\) returned a message that cannot be used: .* an image without",
        ),
    ],
)
def test_what_cannot_be_shown_ends_the_episode(
    model: Input, tmp_path: Path, options: dict[str, Any], rollout: dict[str, Any], problem: str | None
) -> None:
    tokenizer = load_tokenizer(model.folder)
    reply = [*tokenizer("red", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    engine = ScriptedEngine(lambda *_: reply, max_length=64)
    (tmp_path / "shows.py").write_text(SHOWS)
    shows = {"type": "function", "path": "shows.py", "function": "Shows", "max_turns": 2, "options": options}
    settings = valid(EvaluationConfig, {
        "dataset": "d", "scorers": {"exact": {"type": "verifier"}}, "samples": 0, "pass_at": [1],
        "rollout": {**ROLLOUT, **rollout}, "sampling": {"max_tokens": 4}, "environment": shows,
    })  # fmt: skip
    inputs = {"model": model, "dataset": local_input(made(tmp_path / "d", "prompts", rows(1)).folder, Kind.DATASET)}
    context = replace(context_of(tmp_path / "work", inputs), user_files_root=tmp_path)
    cluster = InProcessCluster(lambda *_: nullcontext(InlineEngines(engine)))
    if problem is None:
        assert evaluation.run(settings, inputs, context, cluster).metrics["pass@1"] == 1.0
        return
    with pytest.raises(EpisodeError, match=problem):
        evaluation.run(settings, inputs, context, cluster)


@pytest.mark.endurance("architectures")
@pytest.mark.timeout(300)
@pytest.mark.slow("RL of a vision model with vLLM")
def test_evaluation_answers_what_is_in_the_pictures(
    trained: Output, in_process: InProcessCluster, prompts: Input, tmp_path: Path
) -> None:
    inputs = {"model": local_input(trained.folder, Kind.POLICY), "dataset": prompts}
    settings = valid(EvaluationConfig, {
        "dataset": "d", "scorers": {"exact": {"type": "verifier"}}, "samples": 2, "pass_at": [1], "rollout": ROLLOUT,
        "sampling": {"max_tokens": 4},
    })  # fmt: skip
    output = evaluation.run(settings, inputs, context_of(tmp_path, inputs), in_process)
    assert output.metrics["pass@1"] > 0.8
