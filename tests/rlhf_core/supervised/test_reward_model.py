from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.chat.tokenizers import word_level_tokenizer
from rlhf_core.errors import StageError
from rlhf_core.models.loading import load_causal_model, load_scalar_model
from rlhf_core.models.packed import PolicyModel
from rlhf_core.supervised.held_out import finish_folder, split_by_prompt
from rlhf_core.supervised.pairs import pack_pairs, pair_example
from rlhf_core.supervised.reward_model import judged_pair
from rlhf_core.supervised.scalar import RewardModel
from tests.rlhf_core.stages.supervised_runs import base_model, pairs, stored_config

pytestmark = pytest.mark.parts

TOKENIZER = word_level_tokenizer((), 64)


def test_a_pair_ends_where_its_reward_is_read() -> None:
    row = {"id": "r", "prompt": [{"role": "user", "content": "q"}], "chosen": "ab", "rejected": "c", "margin": 2}
    example = judged_pair(TOKENIZER, row)
    texts = ["".join(TOKENIZER.convert_ids_to_tokens(ids)) for ids in example.sequences]
    assert texts == ["<bos><user>q<assistant>ab<eos>", "<bos><user>q<assistant>c<eos>"]
    assert [sum(mask) for mask in example.masks] == [3, 0]
    batch = pack_pairs([example, example])
    assert batch.margins is not None
    assert batch.margins.tolist() == [2.0, 2.0]
    assert batch.sequence_lengths.tolist() == [7, 6, 7, 6]


def test_of_completions_of_several_turns_the_last_ends_where_the_reward_is_read() -> None:
    """From the first turn on in which they part; the user's turns are read and not trained."""
    good, asked = [{"role": "assistant", "content": "ab"}], {"role": "user", "content": "r"}
    chosen = [*good, asked, {"role": "assistant", "content": "c"}]
    row = {"id": "r", "prompt": [{"role": "user", "content": "q"}], "chosen": chosen, "rejected": good}
    example = pair_example(TOKENIZER, row)
    texts = ["".join(TOKENIZER.convert_ids_to_tokens(ids)) for ids in example.sequences]
    start = "<bos><user>q<assistant>ab<eos>"
    assert texts == [f"{start}<user>r<assistant>c<eos>", start]
    assert [[int(trained) for trained in mask] for mask in example.masks] == [
        [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1, 1],
    ]  # fmt: skip


def test_what_a_template_writes_after_the_end_of_a_turn_is_cut() -> None:
    tokenizer = word_level_tokenizer((), 64)
    tokenizer.chat_template = str(tokenizer.chat_template).replace("{{ eos_token }}", "{{ eos_token }}\n")
    row = {"id": "r", "prompt": [{"role": "user", "content": "q"}], "chosen": "a", "rejected": "b"}
    example = judged_pair(tokenizer, row)
    assert [ids[-1] for ids in example.sequences] == [tokenizer.eos_token_id] * 2


def test_held_out_prompts_occur_in_no_trained_pair() -> None:
    rows = [{"id": str(i), "prompt": [{"role": "user", "content": str(i // 4)}]} for i in range(200)]
    trained, held_out = split_by_prompt(rows, seed=3)
    assert (len(trained), len(held_out)) == (188, 12)  # 5 % are 10 pairs; prompts are not split
    assert not {json.dumps(r["prompt"]) for r in trained} & {json.dumps(r["prompt"]) for r in held_out}
    assert sorted(int(row["id"]) for row in [*trained, *held_out]) == list(range(200))
    assert split_by_prompt(rows, seed=3) == (trained, held_out)
    assert split_by_prompt(rows, seed=4)[1] != held_out


def test_one_prompt_cannot_be_split() -> None:
    with pytest.raises(StageError, match="two different prompts"):
        split_by_prompt([{"id": str(i), "prompt": []} for i in range(9)], seed=0)
    trained, held_out = split_by_prompt([{"id": "a", "prompt": [1]}, {"id": "b", "prompt": [2]}], seed=0)
    assert (len(trained), len(held_out)) == (1, 1)


def _load(folder: Path, language: bool) -> RewardModel:
    return RewardModel(load_scalar_model(folder, dtype=torch.float32, attention="sdpa"), language=language)


def test_the_language_term_is_that_of_the_causal_model(tmp_path: Path) -> None:
    folder = base_model(tmp_path).folder
    batch = pack_pairs([judged_pair(load_tokenizer(folder), {"id": str(i), **row}) for i, row in enumerate(pairs(3))])
    scores, logprobs, _ = _load(folder, language=True)(batch)
    causal = PolicyModel(load_causal_model(folder, dtype=torch.float32, attention="sdpa"))
    assert torch.allclose(logprobs, causal(batch, only=batch.loss_mask)[0], atol=1e-6)
    plain, nothing, _ = _load(folder, language=False)(batch)
    assert nothing is None
    assert torch.equal(scores, plain)


def test_the_language_term_needs_tied_embeddings(tmp_path: Path) -> None:
    folder = base_model(tmp_path, tied=False).folder
    with pytest.raises(StageError, match="tied embeddings"):
        _load(folder, language=True)


def _finished(tmp_path: Path, **tokens: Any) -> tuple[Path, Any]:
    tokenizer = word_level_tokenizer((), 64)
    for name, token in tokens.items():
        setattr(tokenizer, name, token)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["X"]}')
    finish_folder(tmp_path, tokenizer, reward_mean=0.25, reward_std=1.5)
    return tmp_path, load_tokenizer(tmp_path)


def test_padding_is_kept_where_it_ends_nothing(tmp_path: Path) -> None:
    folder, tokenizer = _finished(tmp_path)
    assert stored_config(folder) == {
        "architectures": ["X"], "reward_mean": 0.25, "reward_std": 1.5, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    assert tokenizer.pad_token == "<pad>"


def test_padding_with_the_end_token_is_replaced(tmp_path: Path) -> None:
    folder, tokenizer = _finished(tmp_path, pad_token="<eos>")
    assert tokenizer.pad_token == "<unk>"
    assert stored_config(folder)["pad_token_id"] == tokenizer.unk_token_id
