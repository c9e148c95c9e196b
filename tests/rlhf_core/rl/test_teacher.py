"""The teacher of an RL run: its log-probs, where it is, and a loop that it alone trains."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from rlhf_core.algorithms import build_algorithm
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.contract import Input
from rlhf_core.models.loading import load_causal_model
from rlhf_core.models.packed import PolicyModel
from rlhf_core.models.vision import RowImages, open_processor
from rlhf_core.rl.experience import pack_hinted, pack_trajectories
from rlhf_core.types import Prompt, Trajectory
from tests.rlhf_core.pictures import picture, vision_model
from tests.rlhf_core.rl.one_rank import episodes, rl_config, trainer, trajectories
from tests.rlhf_core.stages.context import local_input

pytestmark = pytest.mark.parts

ENGINE = {"dtype": "float32", "zero_stage": 0}
INPUT = "on_policy_distillation.teacher.model"


@pytest.fixture
def other(model: Input, tmp_path: Path) -> Input:
    torch.manual_seed(2)
    LlamaForCausalLM(LlamaForCausalLM.from_pretrained(model.folder).config).save_pretrained(tmp_path / "other")
    return local_input(tmp_path / "other", Kind.POLICY)


def test_it_sees_the_pictures_of_prompts(tmp_path: Path) -> None:
    student, teacher = vision_model(tmp_path / "student"), vision_model(tmp_path / "teacher", seed=1)
    processor = open_processor(student.folder)
    assert processor is not None
    episodes = []
    for index, colour in enumerate(("red", "red", "blue", "blue")):
        content = picture(colour)
        digest = hashlib.sha256(content).hexdigest()
        (tmp_path / digest).write_bytes(content)
        ids, mask, images = RowImages(processor, tmp_path).expanded(
            [2, processor.image_token_id, 3, 5, 6], [False] * 3 + [True] * 2, [digest]
        )
        prompt = Prompt(str(index // 2), "", tuple(ids[:-2]), row={}, images=images)
        episodes.append(Trajectory(prompt, torch.tensor(ids), torch.tensor(mask), torch.zeros(len(ids)), 0, "stop"))
    batch = pack_trajectories(episodes, processor)
    config = rl_config("on-policy-distillation", engine={**ENGINE, "tokens_per_micro_batch": 64})
    scored = trainer(config, student, tmp_path / "work", {INPUT: teacher})[0].score(batch)
    alone = PolicyModel(load_causal_model(teacher.folder, dtype=torch.float32, attention="sdpa").eval())
    with torch.no_grad():
        expected = alone(batch, temperature=1.0)[0] * batch.loss_mask
    assert scored.teacher_logprobs is not None
    torch.testing.assert_close(scored.teacher_logprobs, expected, atol=1e-5, rtol=0)
    red, _, blue, _ = scored.teacher_logprobs[batch.loss_mask].split(2)
    assert not torch.equal(red, blue)  # of the same words


def test_its_log_probs_are_those_of_its_model(model: Input, other: Input, tmp_path: Path) -> None:
    config = rl_config("on-policy-distillation", teacher={"offload": True}, sampling={"max_tokens": 4})
    ours, group = trainer(config, model, tmp_path / "work", {INPUT: other})
    e = trajectories()
    scored = ours.score(e)
    expected, _ = trainer(rl_config("grpo"), other, tmp_path / "alone")
    assert scored.teacher_logprobs is not None
    torch.testing.assert_close(
        scored.teacher_logprobs, torch.tensor(expected.probe(e)) * e.loss_mask, atol=1e-6, rtol=0
    )
    assert list(group._worker.parts()) == ["policy"], "a frozen model has no state"


def test_with_a_hint_it_reads_the_same_tokens_after_another_prompt(model: Input, other: Input, tmp_path: Path) -> None:
    config = rl_config("on-policy-distillation", teacher={"hint": "!"}, engine=ENGINE | {"tokens_per_micro_batch": 9})
    ours, _ = trainer(config, model, tmp_path / "work", {INPUT: other})
    sampled = episodes(hint=(17, 18))
    hinted = pack_hinted(sampled)
    assert hinted is not None
    assert hinted.sequence_lengths.tolist() == [8, 7, 11, 8]
    experience = pack_trajectories(sampled)
    scored = ours.score(experience, hinted)
    assert torch.equal(hinted.input_ids[hinted.loss_mask], experience.input_ids[experience.loss_mask])
    assert scored.teacher_logprobs is not None
    teacher = LlamaForCausalLM.from_pretrained(other.folder)
    start = 0
    for episode in sampled:
        ids = torch.tensor([*episode.prompt.hinted_ids, *episode.token_ids[3:].tolist()])
        logprobs = torch.log_softmax(teacher(ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[:, 0]
        count = len(episode.token_ids) - 3
        found = scored.teacher_logprobs[start : start + len(episode.token_ids)]
        torch.testing.assert_close(found[3:], logprobs[-count:].detach(), atol=1e-5, rtol=0)
        assert (found[:3] == 0).all()
        start += len(episode.token_ids)
    without = ours.score(experience)
    assert torch.equal(scored.old_logprobs, without.old_logprobs)  # type: ignore[arg-type]
    assert not torch.allclose(scored.teacher_logprobs, without.teacher_logprobs)  # type: ignore[arg-type]
    assert pack_hinted(episodes()) is None


def test_the_student_comes_nearer_to_its_teacher(model: Input, other: Input, tmp_path: Path) -> None:
    """On tokens that are not sampled anew, whose log-probs by the teacher are higher or lower than by the student."""
    config = rl_config("on-policy-distillation", rewards={}, group_size=1)
    ours, _ = trainer(config, model, tmp_path / "work", {INPUT: other})
    scored = ours.score(trajectories())
    before = torch.tensor(ours.probe(scored))[scored.loss_mask]
    metrics = ours.update(build_algorithm(config).advantages(scored, torch.zeros(4), torch.arange(4), 0.0), 0).metrics
    after = torch.tensor(ours.probe(scored))[scored.loss_mask]
    assert scored.teacher_logprobs is not None
    wanted = scored.teacher_logprobs[scored.loss_mask] - before
    assert metrics["teacher_kl"] == pytest.approx(float(-wanted.mean()), rel=1e-5)
    assert float(((after - before) * wanted).sum()) > 0


def test_a_student_that_is_its_teacher_does_not_move(model: Input, tmp_path: Path) -> None:
    config = rl_config("on-policy-distillation", rewards={}, group_size=1)
    ours, _ = trainer(config, model, tmp_path)
    scored = ours.score(trajectories())
    assert scored.old_logprobs is not None
    assert torch.equal(scored.teacher_logprobs, scored.old_logprobs)  # type: ignore[arg-type]
    metrics = ours.update(build_algorithm(config).advantages(scored, torch.zeros(4), torch.arange(4), 0.0), 0).metrics
    assert (metrics["teacher_kl"], metrics["gradient_norm"]) == (0.0, 0.0)
