"""The reward model as a reward: which tokens it is given, and where it is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from rlhf_core.chat.tokenizers import word_level_tokenizer
from rlhf_core.config.rewards.rewards import ProcessRewardModelReward, RewardModelReward
from rlhf_core.errors import RewardError, StageError
from rlhf_core.models.packed import ScalarModel
from rlhf_core.rewards.model import RewardReader
from rlhf_core.types import PackedBatch, Prompt, Trajectory

pytestmark = pytest.mark.parts

OWN = word_level_tokenizer(["good", "bad"], context_length=64)
WHOLE = RewardModelReward(type="reward_model", normalize=False)
LONGEST = 64  # tokens of a sequence
STEPS = ProcessRewardModelReward(type="process_reward_model", normalize=False)


def reward_model(folder: Path, *, words: tuple[str, ...] = ("good", "bad"), context: int = 64) -> Path:
    torch.manual_seed(0)
    tokenizer = word_level_tokenizer(words, context_length=context)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=context, num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    config.update({"reward_mean": 0.5, "reward_std": 2.0})
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    OWN.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def same(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reward_model(tmp_path_factory.mktemp("same"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reward_model(tmp_path_factory.mktemp("other"), words=("goo", "is it "))


class Scores:
    """A reward model's scores of tokens, as the workers give them; keeps the batches."""

    def __init__(self, folder: Path) -> None:
        self._model = ScalarModel(AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32))
        self.batches: list[PackedBatch] = []

    def __call__(self, batch: PackedBatch) -> Tensor:
        self.batches.append(batch)
        with torch.no_grad():
            scored: Tensor = self._model(batch)
        return scored


def plain_score(folder: Path, token_ids: list[int]) -> float:
    """What transformers itself says of one sequence."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return float(model(torch.tensor([token_ids])).logits)


def trajectory(completion: str, *, finished: bool = True) -> Trajectory:
    messages = [{"role": "user", "content": "is it good"}]
    prompt_ids = OWN("<bos><user>is it good<assistant>", add_special_tokens=False)["input_ids"]
    sampled = OWN(completion, add_special_tokens=False)["input_ids"] + [OWN.eos_token_id] * finished
    token_ids = torch.tensor([*prompt_ids, *sampled])
    mask = torch.arange(token_ids.numel()) >= len(prompt_ids)
    prompt = Prompt("p", "is it good", tuple(prompt_ids), {"id": "p", "prompt": messages})
    reason = "stop" if finished else "length"
    return Trajectory(prompt, token_ids, mask, torch.zeros(token_ids.numel()), 0, reason, completion)


def test_a_completion_is_read_at_its_last_token(policy: Path, same: Path) -> None:
    trajectories = [trajectory("good"), trajectory("bad bad", finished=False)]
    result = RewardReader.of(WHOLE, same, policy, LONGEST).reward(Scores(same))(trajectories)
    expected = [plain_score(same, t.token_ids.tolist()) for t in trajectories]
    assert result.rewards == pytest.approx(expected, abs=1e-5)
    assert (result.scores, result.steps) == ([None, None], None)


def test_rewards_are_normalised_by_what_is_stored_with_the_model(policy: Path, same: Path) -> None:
    (raw,) = RewardReader.of(WHOLE, same, policy, LONGEST).reward(Scores(same))([trajectory("good")]).rewards
    settings = RewardModelReward(type="reward_model")
    (scaled,) = RewardReader.of(settings, same, policy, LONGEST).reward(Scores(same))([trajectory("good")]).rewards
    assert scaled == pytest.approx((raw - 0.5) / 2.0)


@pytest.mark.parametrize(("mean", "std"), [(None, None), (0.0, 0.0), (float("nan"), 1.0), (0.0, None)])
def test_statistics_that_are_not_usable_are_refused(
    policy: Path, tmp_path: Path, mean: float | None, std: float | None
) -> None:
    folder = reward_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "reward_mean": mean, "reward_std": std}))
    with pytest.raises(StageError, match="set normalize: false"):
        RewardReader.of(RewardModelReward(type="reward_model"), folder, policy, LONGEST).reward(
            lambda batch: torch.zeros(1)
        )


def test_steps_are_read_at_their_last_tokens(policy: Path, same: Path) -> None:
    """Causal attention: the score at a token is that of the text up to it."""
    trajectories = [trajectory("good\nbad\n\nx"), trajectory("bad")]
    result = RewardReader.of(STEPS, same, policy, LONGEST).reward(Scores(same))(trajectories)
    first = trajectories[0].token_ids.tolist()
    start = first.index(OWN.convert_tokens_to_ids("<assistant>")) + 1
    # good, newline | bad, newline | newline, x, EOS
    expected = [plain_score(same, first[: start + length]) for length in (2, 4, 7)]
    assert result.rewards == [0.0, 0.0]
    assert result.steps is not None
    assert result.steps[0] == pytest.approx(expected, abs=1e-5)
    assert result.steps[1] == pytest.approx([plain_score(same, trajectories[1].token_ids.tolist())], abs=1e-5)


def test_another_tokenizer_is_reached_through_text(policy: Path, other: Path) -> None:
    judge = Scores(other)
    trajectories = [trajectory("goodness"), trajectory("goodness", finished=False)]
    result = RewardReader.of(WHOLE, other, policy, LONGEST).reward(judge)(trajectories)
    theirs = word_level_tokenizer(("goo", "is it "), context_length=64)
    text = "<bos><user>is it good<assistant>goodness<eos>"
    ids = theirs(text, add_special_tokens=False)["input_ids"]
    assert len(ids) != trajectories[0].token_ids.numel()
    # A completion that was cut has no end, there either.
    assert judge.batches[0].input_ids.tolist() == [*ids, *ids[:-1]]
    assert result.rewards == pytest.approx([plain_score(other, ids), plain_score(other, ids[:-1])], abs=1e-5)


def test_another_chat_template_is_another_language(policy: Path, tmp_path: Path) -> None:
    folder = reward_model(tmp_path)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    judge = Scores(folder)
    RewardReader.of(WHOLE, folder, policy, LONGEST).reward(judge)([trajectory("bad")])
    assert judge.batches[0].input_ids.tolist() == OWN("is it goodbad<eos>", add_special_tokens=False)["input_ids"]


def test_what_the_reward_model_cannot_read_is_refused(policy: Path, tmp_path: Path) -> None:
    folder = reward_model(tmp_path, words=("x",), context=20)
    with pytest.raises(
        RewardError, match="prompt p with its completion has 22 tokens of the reward model, which reads"
    ):
        RewardReader.of(WHOLE, folder, policy, LONGEST).reward(Scores(folder))([trajectory("goodness")])


def test_steps_of_another_tokenizer_are_refused(policy: Path, other: Path) -> None:
    with pytest.raises(StageError, match="cannot be read at the steps of the policy's tokens"):
        RewardReader.of(STEPS, other, policy, LONGEST).reward(Scores(other))


def test_a_score_that_is_not_finite_is_named(policy: Path, same: Path) -> None:
    judge = RewardReader.of(WHOLE, same, policy, LONGEST).reward(
        lambda batch: torch.full((batch.num_tokens,), float("nan"))
    )
    with pytest.raises(RewardError, match="the reward model returned nan for prompt p: 'bad'"):
        judge([trajectory("bad")])
