"""Weights on their way from the trainer to the engines: a folder in shared memory.

Engines on the node where it was written load it as it lies there; to other nodes its files travel by Ray.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.errors import WeightSyncError
from rlhf_core.models.safetensors_file import write_safetensors
from rlhf_core.rollout.digest import tensor_digest
from rlhf_core.system.scratch import scratch_folder

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (memory, which is what is wanted)

Files = dict[str, NDArray[numpy.uint8]]  # name -> content


@dataclass(frozen=True, slots=True)
class Publication:
    folder: Path  # HF safetensors or, with LoRA, a PEFT adapter folder; on the node of the process that wrote it
    digests: Mapping[str, str]  # digest.tensor_digest of each tensor
    files: Callable[[], Files]  # what the folder holds, for engines that cannot see it


@contextmanager
def publication(
    layout: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]], *, lora: LoraConfig | None = None
) -> Iterator[Publication]:
    """`weights` as a folder, removed at the end, written one tensor at a time.

    layout: shape and dtype of each by its name. weights: of the whole model or, with `lora`, of the adapter.
    Raises WeightSyncError for a tensor that is no LoRA factor.
    """
    size = sum(tensor.numel() * tensor.element_size() for tensor in layout.values())
    with scratch_folder("weights", _roomy_folder(size)) as folder:
        if lora is not None:
            config = adapter_config(lora, layout)
            (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        file = "model.safetensors" if lora is None else "adapter_model.safetensors"
        digests: dict[str, str] = {}
        write_safetensors({folder / file: layout}, _digested(weights, digests))
        yield Publication(folder, digests, lambda: read_files(folder))


def _digested(weights: Iterable[tuple[str, Tensor]], digests: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """`weights`, of each of which `digests` has the digest afterwards."""
    for name, tensor in weights:
        digests[name] = tensor_digest(tensor)
        yield name, tensor


def publication_of(
    state: Mapping[str, Tensor], *, dtype: torch.dtype | None = None, lora: LoraConfig | None = None
) -> AbstractContextManager[Publication]:
    """A publication of weights that are all in memory. `dtype` casts them, as the engine would do anyway."""
    tensors = published_tensors(state, dtype)
    return publication(tensors, tensors.items(), lora=lora)


def published_tensors(state: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """`state` on the CPU, contiguous. A tensor that shares its storage with an earlier one (a tied head) is left out:
    loading ties it again."""
    seen: set[tuple[int, torch.Size]] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        storage = (tensor.data_ptr(), tensor.shape)
        if storage in seen and tensor.numel():
            continue
        seen.add(storage)
        tensors[name] = tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype).contiguous()
    return tensors


def read_files(folder: Path) -> Files:
    return {file.name: numpy.fromfile(file, dtype=numpy.uint8) for file in folder.iterdir()}


@contextmanager
def received(files: Files) -> Iterator[Path]:
    """A folder with `files` that came from another node, removed at the end."""
    size = sum(content.nbytes for content in files.values())
    with scratch_folder("weights", _roomy_folder(size)) as folder:
        for file, content in files.items():
            content.tofile(folder / file)
        yield folder


def _roomy_folder(size: int) -> Path | None:
    """Shared memory where it has room (containers often give it 64 MiB), else the temporary folder."""
    if _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > size * 1.1 + 2**20:
        return _SHARED_MEMORY
    return None


def adapter_config(lora: LoraConfig, names: Mapping[str, Any]) -> dict[str, Any]:
    """PEFT's adapter_config.json for the adapter whose tensors are called `names`.

    Raises WeightSyncError for a tensor that is no LoRA factor.
    """
    modules: set[str] = set()
    for name in names:
        module, factor, _ = name.rsplit(".", 2) if name.count(".") > 2 else ("", "", "")
        if not name.startswith("base_model.model.") or factor not in ("lora_A", "lora_B"):
            raise WeightSyncError(
                f"`{name}` is no LoRA factor; an adapter has tensors base_model.model.….lora_A.weight and lora_B.weight"
            )
        modules.add(module.rpartition(".")[2])
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
        "bias": "none",
        "inference_mode": True,
    }


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the safetensors files of `folder`, from their headers alone."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return shapes
