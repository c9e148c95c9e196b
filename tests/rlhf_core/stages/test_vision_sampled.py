"""Completions of prompts with images as a dataset, the datasets made of them, and the stages that train on these."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import encode_prompt, load_tokenizer
from rlhf_core.chat.image_messages import images_of
from rlhf_core.config.stages.language_models import SFTConfig
from rlhf_core.config.stages.loop import RoundPromptsConfig
from rlhf_core.config.stages.preference import PreferenceConfig
from rlhf_core.config.stages.sampled import (
    BestOfNConfig,
    ConditionalConfig,
    ConditionalPromptsConfig,
    GenerateConfig,
    PairsConfig,
    UnpairedConfig,
)
from rlhf_core.contract import Input, Output
from rlhf_core.data.reading import dataset_info, iterate_rows, read_rows, write_dataset
from rlhf_core.errors import StageError
from rlhf_core.models.loading import load_causal_model
from rlhf_core.models.packed import PolicyModel
from rlhf_core.models.vision import RowImages, open_processor, with_images
from rlhf_core.packing import pack
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.scripted import ScriptedEngine
from rlhf_core.stages import generate, preference, round_prompts, sampled, sft
from rlhf_core.stages.in_process import InProcessCluster
from tests.rlhf_core.pictures import vision_model
from tests.rlhf_core.stages.context import LocalContext, local_input
from tests.rlhf_core.stages.supervised_runs import base_model, context_of, inline, no_cluster, reward_model
from tests.rlhf_core.stages.vision_runs import ENGINE_SETTINGS, OPTIMIZER_SETTINGS, made, rows, valid

pytestmark = pytest.mark.parts

LENGTHS = "def lengths(completions, prompts, rows):\n    return [float(len(each)) for each in completions]\n"
GENERATE: dict[str, Any] = {
    "dataset": "d", "samples": 4, "sampling": {"max_tokens": 6}, "keep_tokens": True,
    "rewards": {"length": {"type": "function", "path": "lengths.py", "function": "lengths"}},
    "rollout": {"max_length": 64, "cpu_cache_gib": 0.1},
}  # fmt: skip
TRAINING: dict[str, Any] = {
    "dataset": "d", "batch_size": 8, "max_length": 96, "max_steps": 1, "log_every": 1, "epochs": 1,
    "optimizer": OPTIMIZER_SETTINGS, "engine": ENGINE_SETTINGS,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Input:
    return vision_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Input:
    return local_input(made(tmp_path_factory.mktemp("prompts") / "d", "prompts", rows(10)).folder, Kind.DATASET)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Input:
    return vision_model(tmp_path_factory.mktemp("reference"), seed=1)


def run(folder: Path, inputs: dict[str, Input], cluster: InProcessCluster, **changes: Any) -> Output:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lengths.py").write_text(LENGTHS)
    context = replace(context_of(folder / "work", inputs), user_files_root=folder)
    return generate.run(valid(GenerateConfig, {**GENERATE, **changes}), inputs, context, cluster)


@pytest.fixture(scope="module")
def completions(
    model: Input,
    prompts: Input,
    reference: Input,
    in_process: InProcessCluster,
    tmp_path_factory: pytest.TempPathFactory,
) -> Input:
    inputs = {"model": model, "dataset": prompts, "reference.model": reference}
    compared = {"reference": {"model": "other"}, "engine": ENGINE_SETTINGS}
    output = run(tmp_path_factory.mktemp("generate"), inputs, in_process, **compared)
    assert output.metrics["images"] == dataset_info(output.folder)["images"] == 8
    return local_input(output.folder, Kind.DATASET)


def log_probs(folder: Path, given: Sequence[dict[str, Any]], images: Path) -> list[torch.Tensor]:
    """By the model in `folder`: of the sampled tokens of each completion, row after row."""
    tokenizer, processor = load_tokenizer(folder), open_processor(folder)
    read = RowImages(processor, images)
    sequences, masks, placed = [], [], []
    for row in given:
        ids = encode_prompt(tokenizer, row["prompt"])
        asked, _, found = read.expanded(ids, [False] * len(ids), images_of(row["prompt"]))
        for entry in row["completions"]:
            sequences.append([*asked, *entry["token_ids"]])
            masks.append([False] * len(asked) + [True] * len(entry["token_ids"]))
            placed.append(found)
    batch = with_images(pack(sequences, masks), placed, processor)
    policy = PolicyModel(load_causal_model(folder, dtype=torch.float32, attention="sdpa").eval())
    with torch.no_grad():
        logprobs = policy(batch)[0][batch.loss_mask]
    return list(logprobs.split([sum(mask) for mask in masks]))


def kept(folder: Path) -> set[str]:
    return {path.name for path in (folder / "images").iterdir()}


@pytest.mark.endurance("architectures")
@pytest.mark.timeout(300)
@pytest.mark.slow("starts vLLM for a vision model")
def test_completions_are_sampled_of_the_images_and_kept_with_them(
    model: Input, prompts: Input, reference: Input, completions: Input
) -> None:
    """The log-probs of the engine, and those of the ranks of the reference, are those of the models' own images."""
    found = read_rows(completions.folder)
    assert [row["prompt"] for row in found] == [row["prompt"] for row in read_rows(prompts.folder)]
    files = kept(completions.folder)
    assert files == {digest for row in found for digest in images_of(row["prompt"])} == kept(prompts.folder)
    assert all(
        (completions.folder / "images" / name).read_bytes() == (prompts.folder / "images" / name).read_bytes()
        for name in files
    )
    entries = [entry for row in found for entry in row["completions"]]
    for entry, logprobs in zip(entries, log_probs(model.folder, found, completions.folder / "images"), strict=True):
        assert logprobs.tolist() == pytest.approx(entry["logprobs"], abs=1e-4)
    theirs = log_probs(reference.folder, found, completions.folder / "images")
    for entry, logprobs in zip(entries, theirs, strict=True):
        assert float(logprobs.sum()) == pytest.approx(entry["reference_logprob"], abs=1e-3)
    other = {**found[0], "prompt": found[1]["prompt"]}  # the same question about another image
    (changed, *_) = log_probs(model.folder, [other], completions.folder / "images")
    assert changed.tolist() != pytest.approx(entries[0]["logprobs"], abs=1e-3)


@pytest.mark.endurance("architectures")
@pytest.mark.timeout(300)
def test_preferences_and_sft_are_trained_on_what_is_made_of_them(
    model: Input, completions: Input, tmp_path: Path
) -> None:
    given = {"dataset": completions}
    asked = {json.dumps(row["prompt"]) for row in read_rows(completions.folder)}
    paired = sampled.pairs(PairsConfig(dataset="d"), given, LocalContext(tmp_path / "pairs"))
    assert {json.dumps(row["prompt"]) for row in iterate_rows(paired.folder)} <= asked
    assert paired.metrics["images"] == len(kept(paired.folder)) > 1
    best = sampled.best_of_n(BestOfNConfig(dataset="d", least_reward=1.0), given, LocalContext(tmp_path / "best"))
    told = ConditionalConfig(dataset="d", text=" {reward}")
    conditional = sampled.conditional_conversations(told, given, LocalContext(tmp_path / "told"))
    for output in (best, conditional):
        named = {digest for row in read_rows(output.folder) for digest in images_of(row["messages"])}
        assert output.metrics["images"] == len(named) > 1
        assert kept(output.folder) == named
    inputs = {"model": model, "reference.model": model, "dataset": local_input(paired.folder, Kind.DATASET)}
    context = context_of(tmp_path / "dpo", inputs)
    dpo = valid(PreferenceConfig, {**TRAINING, "losses": {"dpo": {"type": "dpo", "beta": 0.1}}})
    preference.run(dpo, inputs, context, inline)
    assert context.logs[0][1]["loss"] == pytest.approx(0.6931, abs=1e-4)  # the log of 2: policy and reference agree
    inputs = {"model": model, "dataset": local_input(best.folder, Kind.DATASET)}
    context = context_of(tmp_path / "sft", inputs)
    sft.run(valid(SFTConfig, TRAINING), inputs, context, inline)
    assert len(context.logs) == 1


def test_images_that_no_row_names_any_more_are_left_out(prompts: Input, tmp_path: Path) -> None:
    """In a round's prompts, and in prompts that name a reward; a file that is missing is an error."""
    given = {"dataset": prompts}
    config = RoundPromptsConfig(dataset="d", count=3)
    first = round_prompts.run(config, given, LocalContext(tmp_path / "round"))
    chosen = read_rows(prompts.folder)[:3]
    assert read_rows(first.folder) == chosen
    assert kept(first.folder) == {digest for row in chosen for digest in images_of(row["prompt"])}
    assert first.metrics["images"] == dataset_info(first.folder)["images"] == len(kept(first.folder)) < 8
    reward = ConditionalPromptsConfig(dataset="d", reward=1.0)
    told = sampled.conditional_prompts(reward, given, LocalContext(tmp_path / "told"))
    assert kept(told.folder) == kept(prompts.folder)
    text = [row for row in read_rows(prompts.folder) if not images_of(row["prompt"])]
    write_dataset(tmp_path / "text", text, dataset_info(prompts.folder), images_from=(prompts.folder / "images",))
    assert not (tmp_path / "text" / "images").exists()
    assert "images" not in dataset_info(tmp_path / "text")
    (first.folder / "images" / min(kept(first.folder))).unlink()
    with pytest.raises(StageError, match=r"a row has the image [0-9a-f]{64}, whose file is not in"):
        write_dataset(tmp_path / "gone", chosen, {}, images_from=(first.folder / "images",))
    with pytest.raises(StageError, match=r"holds the character U\+FFFC, which stands for an image in this prompt"):
        sampled.conditional_prompts(
            ConditionalPromptsConfig(dataset="d", reward=1.0, text="\ufffc{reward}"),
            given,
            LocalContext(tmp_path / "c"),
        )


def test_what_reads_text_alone_refuses_them(model: Input, prompts: Input, tmp_path: Path) -> None:
    text = base_model(tmp_path / "text", hidden=64)
    judge = reward_model(tmp_path / "judge", text, 0, 0.0, 1.0)
    taste = {"taste": {"type": "reward_model"}}
    inputs = {"model": model, "dataset": prompts}
    with pytest.raises(StageError, match=r"row .* has images, and rewards.taste reads text alone: remove it"):
        run(tmp_path / "r", inputs | {"rewards.taste.model": judge}, no_cluster, rewards=taste)
    with pytest.raises(StageError, match="a message has images, but the model reads text alone"):
        run(tmp_path / "t", inputs | {"model": text}, no_cluster)
    few = {**GENERATE["rollout"], "max_images": 1}
    with pytest.raises(StageError, match=r"it has 2 images, more than rollout.max_images=1"):
        run(tmp_path / "m", inputs | {"dataset": two_pictures(tmp_path)}, no_cluster, rollout=few)
    blind = vision_model(tmp_path / "blind")
    config = json.loads((blind.folder / "config.json").read_text())
    (blind.folder / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(StageError, match=r"reference.model: the prompts have images, and it reads text alone: name"):
        run(tmp_path / "k", inputs | {"reference.model": blind}, no_cluster, reference={"model": "other"})


def two_pictures(folder: Path) -> Input:
    (row, other, *_) = rows(2)
    both = {**row, "images": [row["image"], other["image"]]}
    del both["image"]
    return local_input(made(folder / "two", "prompts", [both]).folder, Kind.DATASET)


def test_judges_of_pairs_get_no_images_and_labels_keep_them(model: Input, prompts: Input, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model.folder)
    engine = ScriptedEngine(lambda _, seed: [tokenizer.convert_tokens_to_ids("abc"[(seed or 0) % 3])])
    cluster = InProcessCluster(lambda *_: nullcontext(InlineEngines(engine)))
    output = run(tmp_path / "sampled", {"model": model, "dataset": prompts}, cluster)
    given = {"dataset": local_input(output.folder, Kind.DATASET)}
    template = "{{ prompt }} {{ first }} {{ second }}"
    judge = {"url": "http://127.0.0.1:9/v1", "model": "m", "template": template, "pattern": "(.)"}
    judged = valid(PairsConfig, {"dataset": "d", "judge": judge, "select": "all"})
    with pytest.raises(StageError, match=r"row .* has images, and judge reads text alone"):
        sampled.pairs(judged, given, LocalContext(tmp_path / "pairs"))
    rewarded = [
        {**row, "completions": [{**each, "reward": float(n)} for n, each in enumerate(row["completions"])]}
        for row in read_rows(output.folder)
    ]
    write_dataset(tmp_path / "rewarded", rewarded, {"format": "completions"}, images_from=(output.folder / "images",))
    given = {"dataset": local_input(tmp_path / "rewarded", Kind.DATASET)}
    labels = sampled.unpaired(UnpairedConfig(dataset="d", threshold=0.5), given, LocalContext(tmp_path / "unpaired"))
    assert dataset_info(labels.folder)["images"] == dataset_info(output.folder)["images"] > 0
