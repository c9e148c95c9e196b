"""A tiny reward model to be served, and what it says where it trains a policy."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from rlhf_core.chat.encoding import encode_completion
from rlhf_core.chat.tokenizers import word_level_tokenizer
from rlhf_core.config.rewards.rewards import RewardModelReward
from rlhf_core.models.packed import ScalarModel
from rlhf_core.rewards.model import RewardReader
from rlhf_core.types import PackedBatch, Prompt, Trajectory

TOKENIZER = word_level_tokenizer(["good", "bad"], context_length=64)


def reward_model(folder: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, num_labels=1, pad_token_id=TOKENIZER.pad_token_id,
    )  # fmt: skip
    config.update({"reward_mean": 0.5, "reward_std": 2.0})
    LlamaForSequenceClassification(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def in_process(folder: Path, conversations: list[tuple[str, str]]) -> list[float]:
    """The rewards of finished completions (question, completion) in a stage `rl`, each in a forward of its own."""
    model = ScalarModel(AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)).eval()

    def scores(batch: PackedBatch) -> torch.Tensor:
        with torch.no_grad():
            raw: torch.Tensor = model(batch)
        return raw

    reward = RewardReader.of(RewardModelReward(type="reward_model"), folder, folder, 64).reward(scores)
    return [reward([_trajectory(*conversation)]).rewards[0] for conversation in conversations]


def _trajectory(question: str, completion: str) -> Trajectory:
    messages = [{"role": "user", "content": question}]
    ids, mask = encode_completion(TOKENIZER, messages, completion)
    prompt = Prompt("p", question, tuple(ids[: mask.index(True)]), {"id": "p", "prompt": messages})
    tokens = torch.tensor(ids)
    return Trajectory(prompt, tokens, torch.tensor(mask), torch.zeros(len(ids)), 0, "stop", completion)
