"""A model as one GGUF file, for Llama, Qwen 2 and Qwen 3 with a tokenizer of byte pairs.

The file is read again by transformers before it gets its name: its logits and tokens must be those of the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.errors import StageError, StoreError, reason_of
from rlhf_core.inference.exporting import Exported, build
from rlhf_core.models.folders.folder import ADAPTER_CONFIG, read_config
from rlhf_core.models.safetensors_file import read_safetensors
from rlhf_core.system.paths import user_path
from rlhf_core.system.scratch import scratch_folder
from rlhf_core.system.streams import kept_streams

TOLERANCE = 1e-4  # of the logits, relative to the largest; both computed in float32
_ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How tokenizers split text before they look for byte pairs, and what GGUF calls it.
_SPLITS = {
    "gpt-2": [("ByteLevel", None)],
    "smollm": [("Digits", None), ("ByteLevel", None)],
    "qwen2": [("Split", _LETTERS + r"\p{N}" + _REST), ("ByteLevel", None)],
    "llama-bpe": [("Split", _LETTERS + r"\p{N}{1,3}" + _REST), ("ByteLevel", None)],
}
_TEXTS = ("Two and two are four.", "  1234 x = [7, 8]\n\n\tit's naïve — 数字 🙂")


def export_gguf(repository: ArtifactRepository, what: Exported, target: Path) -> Path:
    """Write the file `target`, completely or not at all, in the dtype of the stored weights.

    Raises StageError for a model that GGUF has no form for here, or whose file is not the same model when it is read
    again; StoreError if `target` exists.
    """
    target = user_path(target).absolute()
    if target.exists() or target.is_symlink():
        raise StoreError(f"{target} exists already: give another file")
    target.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder("export", target.parent) as folder:
        model = build(repository, what, folder)
        if (model / ADAPTER_CONFIG).is_file():
            raise StageError(f"{what.name} is an adapter, and a GGUF file holds a whole model: give --merge")
        file = folder / "model.gguf"
        _write(model, file, what)
        with kept_streams():
            _compare(model, file, what.name)
        file.rename(target)
    return target


def _write(model: Path, file: Path, what: Exported) -> None:
    import gguf

    config = read_config(model)
    name = _architecture(config, what.name)
    tokens = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    split = _split(tokens, what.name)
    writer = gguf.GGUFWriter(file, name)
    layers = int(config["num_hidden_layers"])
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_name(what.name)
    if what.licence is not None:
        writer.add_license(what.licence)
    writer.add_context_length(int(config["max_position_embeddings"]))
    writer.add_embedding_length(int(config["hidden_size"]))
    writer.add_block_count(layers)
    writer.add_feed_forward_length(int(config["intermediate_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(config.get("num_key_value_heads") or heads))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(_rope(config).get("rope_theta", 10_000.0)))
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    writer.add_vocab_size(int(config["vocab_size"]))
    _add_tokenizer(writer, model, tokens, split, int(config["vocab_size"]))
    kind = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}[name]
    names = gguf.get_tensor_name_map(kind, layers)
    for key, value in read_safetensors(model):
        if key == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        place = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if place is None:
            raise StageError(f"{what.name}: GGUF has no name for the tensor {key} of a {name}")
        if name == "llama" and key.endswith((".q_proj.weight", ".k_proj.weight")):
            value = _interleaved(value, value.shape[0] // head_dim)
        _add_tensor(writer, place, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _architecture(config: Mapping[str, Any], name: str) -> str:
    """Return GGUF's name of the model's class. Raises StageError for others, and for parts that GGUF has otherwise."""
    given = next(iter(config.get("architectures") or ()), "none")
    if given not in _ARCHITECTURES:
        raise StageError(f"{name} is a {given}, and GGUF is written here for {', '.join(_ARCHITECTURES)} alone")
    if (kind := _rope(config).get("rope_type", "default")) != "default":
        raise StageError(f"{name} scales its rotary positions ({kind}), for which no GGUF is written here")
    if config.get("use_sliding_window"):
        raise StageError(f"{name} attends in windows, for which no GGUF is written here")
    return _ARCHITECTURES[given]


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of rotary positions, as this or an earlier release of transformers writes them."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = {"rope_theta": config["rope_theta"]} if "rope_theta" in config else {}
    return {**theta, **given, **({"rope_type": given["type"]} if "type" in given else {})}


def _split(tokens: Mapping[str, Any], name: str) -> str:
    """Return GGUF's name of how the tokenizer splits text. Raises StageError for another kind of tokenizer."""
    outer = tokens.get("pre_tokenizer") or {}
    steps = [
        (step["type"], (step.get("pattern") or {}).get("Regex") if step["type"] == "Split" else None)
        for step in outer.get("pretokenizers", [outer])
        if step
    ]
    kinds = [split for split, known in _SPLITS.items() if known == steps]
    if tokens["model"]["type"] != "BPE" or not kinds:
        raise StageError(
            f"{name}: its tokenizer cannot be exported to GGUF; byte-pair tokenizers of {', '.join(_SPLITS)} can"
        )
    return kinds[0]


def _add_tokenizer(writer: Any, model: Path, tokens: Mapping[str, Any], split: str, size: int) -> None:
    import gguf

    vocabulary = {index: token for token, index in tokens["model"]["vocab"].items()}
    kinds = dict.fromkeys(vocabulary, gguf.TokenType.NORMAL)
    for added in tokens.get("added_tokens", ()):
        vocabulary[added["id"]] = added["content"]
        kinds[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list([vocabulary.get(index, f"[PAD{index}]") for index in range(size)])
    writer.add_token_types([kinds.get(index, gguf.TokenType.UNUSED) for index in range(size)])
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in tokens["model"]["merges"]])
    loaded = load_tokenizer(model)
    for add, token in (
        (writer.add_bos_token_id, loaded.bos_token_id),
        (writer.add_eos_token_id, loaded.eos_token_id),
        (writer.add_pad_token_id, loaded.pad_token_id),
    ):
        if token is not None:
            add(token)
    bos = loaded.bos_token_id
    writer.add_add_bos_token(bos is not None and bos in loaded("x").input_ids)
    if isinstance(loaded.chat_template, str):
        writer.add_chat_template(loaded.chat_template)


def _interleaved(weight: Any, heads: int) -> Any:
    """Return rows of queries or keys in GGUF's order of rotary pairs: neighbours, where transformers has halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _add_tensor(writer: Any, name: str, value: Any) -> None:
    """Add a tensor as it is; vectors in float32, as readers of GGUF expect them."""
    import gguf
    import torch

    if value.dtype == torch.bfloat16 and value.ndim > 1:
        data = gguf.quants.quantize(value.float().numpy(), gguf.GGMLQuantizationType.BF16)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, (value if value.dtype == torch.float16 and value.ndim > 1 else value.float()).numpy())


def _compare(model: Path, file: Path, name: str) -> None:
    """Raise StageError unless transformers reads the same model and tokenizer from the file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = load_tokenizer(model)
    try:
        read = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        for text in _TEXTS:
            if read(text, add_special_tokens=False).input_ids != tokenizer(text, add_special_tokens=False).input_ids:
                raise StageError(f"{name}: transformers reads other tokens from the GGUF file: export a folder instead")
        ids = torch.tensor([tokenizer(_TEXTS[0], add_special_tokens=False).input_ids])
        found = []
        for place, options in ((model, {}), (file.parent, {"gguf_file": file.name})):
            loaded = AutoModelForCausalLM.from_pretrained(str(place), dtype=torch.float32, **options)
            with torch.no_grad():
                found.append(loaded.eval()(input_ids=ids).logits)
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        raise StageError(f"{name}: transformers cannot read the GGUF file back ({reason_of(error)})") from error
    expected, actual = found
    difference = float((expected - actual).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE:
        raise StageError(
            f"{name}: transformers reads a model with other logits from the GGUF file (by {difference:.2g} of the "
            "largest): export a folder instead"
        )
