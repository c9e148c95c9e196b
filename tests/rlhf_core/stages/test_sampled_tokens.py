"""What a real engine samples is what is rewarded and trained, and what is exported stops where turns end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.chat.encoding import encode_prompt, load_tokenizer
from rlhf_core.chat.tokenizers import word_level_tokenizer
from rlhf_core.config.stages.base_model import BaseModelConfig
from rlhf_core.config.stages.sampled import BestOfNConfig, GenerateConfig, UnpairedConfig
from rlhf_core.contract import Input
from rlhf_core.data.reading import read_rows, write_dataset
from rlhf_core.stages import generate, sampled
from rlhf_core.stages.in_process import InProcessCluster
from rlhf_core.stages.runner import run_job
from rlhf_core.stages.table import STAGES
from rlhf_core.supervised.kto import labelled_example
from rlhf_core.supervised.sft import conversation_examples
from tests.rlhf_core.stages.context import LocalContext, local_input
from tests.rlhf_core.stages.specs import specified
from tests.rlhf_core.stages.supervised_runs import context_of, dataset

pytestmark = pytest.mark.parts

END, MARKS = "<|im_end|>", ("<answer>", "</answer>")
# Turns do not end with EOS, and a reply is asked for behind an open block.
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.role == 'assistant' %}{{ '<think>' }}"
    "{% if '</think>' not in m.content %}{{ '</think>' }}{% endif %}{% endif %}{{ m.content + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant><think>' }}{% endif %}"
)
PROMPTS = [{"prompt": [{"role": "user", "content": f"say {word}"}], "answer": word} for word in "abcdef"]


def tokenizer() -> PreTrainedTokenizerFast:
    made = word_level_tokenizer(("<think>", "</think>"), 64)
    made.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>", END, *MARKS]})
    made.chat_template = TEMPLATE
    return made


def write_model(folder: Path, *, always_ends: bool = False) -> Path:
    """always_ends: it says <|im_end|> whatever it is asked; else anything."""
    torch.manual_seed(0)
    words = tokenizer()
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(words), hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, initializer_range=0.05, bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id,
    ))  # fmt: skip
    if always_ends:
        with torch.no_grad():
            model.model.embed_tokens.weight.fill_(1.0)
            for layer in (model.model.layers[0].self_attn.o_proj, model.model.layers[0].mlp.down_proj, model.lm_head):
                layer.weight.zero_()
            model.lm_head.weight[words.convert_tokens_to_ids(END)] = 1.0
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def completions(in_process: InProcessCluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Input, Input]:
    """A model, and what vLLM sampled of it."""
    folder = tmp_path_factory.mktemp("sampled")
    inputs = {
        "model": local_input(write_model(folder / "model"), Kind.POLICY), "dataset": dataset(folder / "rows", PROMPTS)
    }  # fmt: skip
    config = GenerateConfig.model_validate_json(json.dumps({
        "dataset": "prompts", "samples": 16, "sampling": {"max_tokens": 24},
        "rewards": {"marked": {"type": "verifier", "pattern": r"(<answer>)"}},
        "rollout": {"max_length": 60, "cpu_cache_gib": 0.05, "cpus_per_engine": 0.5},
    }))  # fmt: skip
    made = generate.run(config, inputs, context_of(folder / "work", inputs), in_process)
    return inputs["model"], local_input(made.folder, Kind.DATASET)


@pytest.mark.slow("starts vLLM")
def test_texts_are_as_the_policy_wrote_them(completions: tuple[Input, Input]) -> None:
    words = load_tokenizer(completions[0].folder)
    marks, ends = words.convert_tokens_to_ids(list(MARKS)), words.convert_tokens_to_ids([END, "<eos>"])
    seen = cut = 0
    for row in read_rows(completions[1].folder):
        for entry in row["completions"]:
            ids = entry["token_ids"]
            ended = ids[-1] in ends
            assert entry["finish_reason"] == ("stop" if ended else "length")
            assert ended or len(ids) == 24
            assert entry["text"] == "".join(words.convert_ids_to_tokens(ids[: len(ids) - ended]))
            seen += sum(token in marks for token in ids)
            cut += not ended
    assert seen > 10
    assert cut > 10


def test_tokens_that_were_sampled_are_trained(completions: tuple[Input, Input], tmp_path: Path) -> None:
    model, made = completions
    words = load_tokenizer(model.folder)
    entries = {
        (json.dumps(row["prompt"]), entry["text"]): entry["token_ids"]
        for row in read_rows(made.folder) for entry in row["completions"]
    }  # fmt: skip

    def require_trained(example: Any, messages: list[Any], text: str) -> None:
        ids = entries[json.dumps(messages), text]
        assert example.sequences == ([*encode_prompt(words, messages), *ids],)
        assert example.masks[0] == [False] * (len(example.sequences[0]) - len(ids)) + [True] * len(ids)

    inputs = {"dataset": made}
    best = sampled.best_of_n(BestOfNConfig(dataset="d"), inputs, LocalContext(tmp_path / "best"))
    for row in read_rows(best.folder):
        (example,) = conversation_examples(words, row)
        require_trained(example, row["messages"][:-1], row["messages"][-1]["content"])
    rated = [
        {
            **row,
            "completions": [{**entry, "reward": float(index % 2)} for index, entry in enumerate(row["completions"])],
        }
        for row in read_rows(made.folder)
    ]
    write_dataset(tmp_path / "rated", rated, {"format": "completions"})
    inputs = {"dataset": local_input(tmp_path / "rated", Kind.DATASET)}
    unpaired = sampled.unpaired(UnpairedConfig(dataset="d", threshold=0.5), inputs, LocalContext(tmp_path / "unpaired"))
    for row in read_rows(unpaired.folder):
        require_trained(labelled_example(words, row), row["prompt"], row["completion"])


@pytest.mark.usefixtures("own_folders")
def test_a_folder_that_a_stage_writes_stops_where_turns_end(local: ArtifactRepository, tmp_path: Path) -> None:
    """Its tokenizer's EOS is not what the chat template ends turns with."""
    write_model(tmp_path / "recipe" / "model", always_ends=True)
    config = BaseModelConfig.model_validate({"source": {"type": "folder", "path": "model"}, "dtype": "float32"})
    spec = specified(local, tmp_path / "recipe", "", STAGES["base"], config=config)
    folder = local.fetch(run_job(local.store.url, spec.ref).ref, tmp_path / "fetched")
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    words = load_tokenizer(folder)
    prompt = torch.tensor([encode_prompt(words, PROMPTS[0]["prompt"])])
    answered = model.generate(prompt, max_new_tokens=20, do_sample=False)
    assert answered[0, prompt.shape[1] :].tolist() == [words.convert_tokens_to_ids(END)]
    assert set(model.generation_config.eos_token_id) == set(words.convert_tokens_to_ids(["<eos>", END]))
