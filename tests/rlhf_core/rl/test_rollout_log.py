"""The log of rollouts: which steps and prompts it has, and that each token stands with what it was trained on."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlhf_core.artifacts.live import LiveFiles
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.logged_rollouts import LoggedStep, decode_step, step_of
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.rl.experience import pack_trajectories
from rlhf_core.rl.loop import Loop
from rlhf_core.rl.rollout_log import RolloutLog, chosen_groups
from rlhf_core.types import Branch, Prompt, SequenceImage, TrainingBatch, Trajectory
from tests.rlhf_core.rl.test_loop import CONFIG, TOKENIZER, FunctionOf, loop

pytestmark = pytest.mark.parts

REF = ArtifactRef(stage="rl", key="0" * 64)
ROW = {"id": "r", "prompt": [{"role": "user", "content": "0?"}], "answer": 7}


def steps_in(live: LiveFiles) -> dict[int, LoggedStep]:
    files = {step_of(path): live.get(path) for path in live.paths("rollouts/")}
    return {step: decode_step(data, "here") for step, data in files.items() if step is not None and data is not None}


def logged(ours: Loop) -> RolloutLog:
    return RolloutLog(ours.config, TOKENIZER, ours.context.live)


def trajectory(reward: float, *branches: Branch, images: tuple[SequenceImage, ...] = ()) -> Trajectory:
    prompt = Prompt("r", "0?", (1, 2), ROW, images=images)
    sampled = torch.tensor([False, False, True, True])
    logprobs = torch.tensor([0.0, 0.0, -1.0, -0.25])
    return Trajectory(
        prompt, torch.tensor([1, 2, 3, 4]), sampled, logprobs, weight_version=5, finish_reason="stop", completion="b",
        reward=reward, extra={"own": reward}, branches=branches, turns=1 + len(branches),
    )  # fmt: skip


def trained_on(trajectories: list[Trajectory]) -> TrainingBatch:
    rollouts = pack_trajectories(trajectories)
    counted = torch.arange(rollouts.num_tokens, dtype=torch.float32)
    return TrainingBatch(
        **{name: value for name, value in vars(rollouts).items() if not name.startswith("_")},
        old_logprobs=torch.where(rollouts.loss_mask, rollouts.rollout_logprobs + torch.tensor(2.0).log(), 0.0),
        advantages=torch.where(rollouts.loss_mask, counted, 0.0),
    )


def test_each_token_stands_with_what_it_was_trained_on(tmp_path: Path) -> None:
    ours = loop(tmp_path, FunctionOf(lambda c: float(c == "a")))
    log = RolloutLog(CONFIG, TOKENIZER, ours.context.live)
    last = replace(ours, rollout_log=log).run()
    steps = steps_in(ours.context.live)
    assert sorted(steps) == [1, 2, 3]
    step = steps[3]
    assert (step.prompts, step.completions, len(step.groups)) == (2, 4, 2)
    assert sum(step.histograms["reward"].counts) == 4
    completions = [completion for group in step.groups for completion in group.completions]
    assert sorted(completion.text for completion in completions) == ["a", "a", "bb", "bb"]
    assert sum(c.reward or 0.0 for c in completions) / 4 == last["reward"]
    for completion in completions:
        (sequence,) = completion.sequences
        sampled = [text for text, trained in zip(sequence.texts, sequence.trained, strict=True) if trained]
        assert "".join(sampled) == completion.text + TOKENIZER.eos_token
        assert sequence.engine_logprobs == (-1.0,) * len(sampled)  # as the engine is scripted
        assert {value and value > 0 for value in sequence.advantages} == {completion.text == "a"}
        assert completion.versions == ((len(sampled), 2),)
    assert step.groups[0].prompt[0]["content"].endswith("?")


@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_trainers_log_probs_and_entropies_are_those_before_the_update(tmp_path: Path, minibatches: int) -> None:
    settings = CONFIG.model_dump(mode="json", exclude_unset=True)
    config = RLConfig.model_validate_json(
        json.dumps(
            settings
            | {"log_rollouts": {"prompts": 1, "steps": 2}, "grpo": settings["grpo"] | {"minibatches": minibatches}}
        )
    )
    ours = loop(tmp_path, FunctionOf(lambda c: float(c == "a")), config)
    replace(ours, rollout_log=logged(ours)).run()
    steps = steps_in(ours.context.live)
    assert sorted(steps) == [1, 3]
    for step in steps.values():
        (group,) = step.groups
        assert sum(step.histograms["ratio"].counts) == 4  # of the prompt that is not logged, too
        for sequence in (sequence for completion in group.completions for sequence in completion.sequences):
            # Weights are small: the first policies are uniform over the vocabulary, but for a hundredth.
            uniform = [math.log(len(TOKENIZER))] * sum(sequence.trained)
            assert sequence.entropies == pytest.approx(uniform, abs=0.05)
            assert sequence.trainer_logprobs == pytest.approx([-value for value in uniform], abs=0.5)


def test_the_log_changes_nothing_that_is_trained(tmp_path: Path) -> None:
    plain, logging = (loop(tmp_path / name, FunctionOf(lambda c: float(c == "a"))) for name in ("plain", "logging"))
    without, last = (each.run() for each in (plain, replace(logging, rollout_log=logged(logging))))
    measured = {name for name in last if not name.startswith("seconds/")}
    assert {name: last[name] for name in measured} == {name: without[name] for name in measured}
    assert plain.trainer.digests() == logging.trainer.digests()


def test_a_truncated_completion_that_is_not_trained_on_has_no_log_probs(tmp_path: Path) -> None:
    settings = CONFIG.model_dump(mode="json", exclude_unset=True)
    masking = settings | {"grpo": settings["grpo"] | {"mask_truncated_completions": True}, "steps": 1}
    config = RLConfig.model_validate_json(json.dumps(masking | {"sampling": {"max_tokens": 2}}))
    ours = loop(tmp_path, FunctionOf(lambda c: float(c == "a")), config)
    replace(ours, rollout_log=logged(ours)).run()
    (step,) = steps_in(ours.context.live).values()
    known = {
        completion.finish_reason: {value is not None for value in completion.sequences[0].trainer_logprobs or ()}
        for group in step.groups
        for completion in group.completions
    }
    assert known == {"stop": {True}, "length": {False}}


def test_a_completion_says_what_each_reward_contributes(tmp_path: Path) -> None:
    settings = CONFIG.model_dump(mode="json", exclude_unset=True)
    own = settings["grpo"]["rewards"]["own"] | {"weight": 0.5}
    shaping = {"clip": [-1.0, 0.25]}
    weighted = settings | {"grpo": settings["grpo"] | {"rewards": {"own": own}, "shaping": shaping}, "steps": 1}
    config = RLConfig.model_validate_json(json.dumps(weighted))
    ours = loop(tmp_path, FunctionOf(lambda c: {"reward": float(c == "a"), "words": 2.0}), config)
    replace(ours, rollout_log=logged(ours)).run()
    (step,) = steps_in(ours.context.live).values()
    right = [c for group in step.groups for c in group.completions if c.text == "a"]
    assert [(c.rewards, c.weighted, c.details, c.reward) for c in right] == [
        ({"own": 1.0}, {"own": 0.5}, {"own/words": 2.0}, 0.25)
    ] * 2


def test_the_same_run_logs_the_same_bytes(tmp_path: Path) -> None:
    logs = []
    for name in ("one", "other"):
        ours = loop(tmp_path / name, FunctionOf(lambda c: float(c == "a")))
        replace(ours, rollout_log=logged(ours)).run()
        logs.append({path: ours.context.live.get(path) for path in ours.context.live.paths()})
    assert logs[0] == logs[1] != {}


def test_an_episode_has_all_its_sequences_and_images(tmp_path: Path) -> None:
    picture = tmp_path / ("a" * 64)
    picture.write_bytes(b"pixels")
    image = SequenceImage(str(picture), start=0, length=1)
    branch = Branch(torch.tensor([9, 8]), torch.tensor([False, True]), torch.tensor([0.0, -2.0]), (image,))
    trajectories = [trajectory(0.0), trajectory(1.0, branch, images=(image,)), trajectory(2.0), trajectory(-1.0)]
    live = LiveFiles(LocalStore(tmp_path / "store"), REF)
    without = [replace(each, prompt=replace(each.prompt, images=())) for each in trajectories]
    batch = trained_on(
        [replace(each, branches=tuple(replace(b, images=()) for b in each.branches)) for each in without]
    )
    RolloutLog(CONFIG, TOKENIZER, live).step(3, trajectories, batch)
    (step,) = steps_in(live).values()
    plain, branched = step.groups[0].completions
    assert (step.groups[0].answer, plain.sequences[0].advantages) == ("7", (2.0, 3.0))
    main, other = branched.sequences
    assert (main.token_ids, main.advantages, main.engine_logprobs) == ((1, 2, 3, 4), (6.0, 7.0), (-1.0, -0.25))
    assert (other.token_ids, other.trained, other.engine_logprobs) == ((9, 8), (False, True), (-2.0,))
    assert other.advantages == (9.0,)
    assert main.trainer_logprobs == pytest.approx((-0.30685, 0.44315))
    assert (main.images, other.images) == (((image_of := main.images[0]),), (image_of,))
    assert live.get(f"rollouts/images/{image_of.sha256}") == b"pixels"
    assert step.histograms["ratio"].edges[0] <= 2.0 <= step.histograms["ratio"].edges[-1]
    assert sum(step.histograms["length"].counts) == 4


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, [1]), (2, [1, 3]), (3, [0, 1, 3]), (9, [0, 1, 2, 3])],
)
def test_the_lowest_and_the_highest_reward_come_before_other_prompts(count: int, expected: list[int]) -> None:
    assert chosen_groups([0.5, 0.5, -1.0, 0.5, 0.5, 0.5, 0.5, 2.0], 2, count) == expected
