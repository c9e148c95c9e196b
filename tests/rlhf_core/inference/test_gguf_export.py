"""A model as a GGUF file: transformers reads the same logits and tokens from it, or there is no file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.errors import StageError, StoreError
from rlhf_core.inference import gguf_export
from rlhf_core.inference.exporting import Exported
from rlhf_core.inference.gguf_export import export_gguf
from tests.rlhf_core.artifacts.manifests import manifest

pytestmark = pytest.mark.parts

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 320,
}  # fmt: skip
EXPORTED: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1000.0}),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True, rms_norm_eps=1e-5),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=128),
}
TEXT = "Two and two are four; it's 1234 naïve numbers.\n\n  Or not?"


def made(folder: Path, config: PretrainedConfig, splits: str = "qwen2", dtype: torch.dtype = torch.bfloat16) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases, which start as ones and zeros
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    pattern = dict(gguf_export._SPLITS["qwen2"])["Split"]
    qwen = [
        pre_tokenizers.Split(Regex(str(pattern)), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence(qwen) if splits == "qwen2" else pre_tokenizers.Whitespace()  # type: ignore[assignment]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>").save_pretrained(
        folder
    )
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> ArtifactRepository:
    return ArtifactRepository(open_store(str(tmp_path / "store")))


def stored(repository: ArtifactRepository, folder: Path) -> Exported:
    return Exported(repository.publish(manifest("policy", kind=Kind.POLICY), folder).ref.full)


@pytest.mark.parametrize("name", EXPORTED)
def test_transformers_reads_the_same_model(repository: ArtifactRepository, name: str, tmp_path: Path) -> None:
    folder = made(tmp_path / "model", EXPORTED[name])
    file = export_gguf(repository, stored(repository, folder), tmp_path / "out" / "model.gguf")
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    loaded = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(input_ids=ids).logits
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)
    read, given = (
        AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name),
        AutoTokenizer.from_pretrained(folder),
    )
    assert read(TEXT).input_ids == given(TEXT).input_ids
    assert [path.name for path in file.parent.iterdir()] == ["model.gguf"]
    with pytest.raises(StoreError, match="exists already"):
        export_gguf(repository, Exported("policy"), file)


def test_what_gguf_has_no_form_for_is_refused(repository: ArtifactRepository, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    scaled = LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    cases = {
        "scales its rotary positions": made(tmp_path / "scaled", scaled),
        "its tokenizer cannot be exported to GGUF": made(tmp_path / "words", EXPORTED["llama"], splits="words"),
        "is a GPT2LMHeadModel, and GGUF is written": made(
            tmp_path / "gpt2", GPT2Config(n_layer=1, n_embd=32, n_head=2)
        ),
    }
    for number, (said, folder) in enumerate(cases.items()):
        ref = repository.publish(manifest(str(number), kind=Kind.POLICY), folder).ref
        with pytest.raises(StageError, match=said):
            export_gguf(repository, Exported(ref.full), file)
    assert not file.exists()


def test_a_file_that_is_another_model_is_not_kept(
    repository: ArtifactRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_export, "_interleaved", lambda weight, heads: weight)
    what = stored(repository, made(tmp_path / "model", EXPORTED["llama"]))
    with pytest.raises(StageError, match="transformers reads a model with other logits"):
        export_gguf(repository, what, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()
