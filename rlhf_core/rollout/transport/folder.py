"""Weights as files in a folder on rank 0's node, in shared memory if it has room.

Engines on that node load the folder directly; other nodes receive its files through Ray (actors/engines.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray
from torch import Tensor

from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.errors import WeightSyncError
from rlhf_core.models.safetensors_file import read_safetensors, write_safetensors
from rlhf_core.rollout.transport.base import Offer, WeightManifest, Weights, own_rank, take_all
from rlhf_core.system.scratch import scratch_folder

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (intended: it is memory)

Files = dict[str, NDArray[numpy.uint8]]  # name -> content


@dataclass(frozen=True, slots=True)
class SharedFolder:
    """A Transport by files."""

    folder: Path  # after `send`: HF safetensors or, with `lora`, a PEFT adapter
    lora: LoraConfig | None = None

    @property
    def concurrent(self) -> bool:
        return False

    def send(self, weights: Weights, manifest: WeightManifest) -> None:
        """Write `weights`. Raises WeightSyncError for a tensor of an adapter that is not a LoRA factor."""
        if own_rank() != 0:
            take_all(weights)
            return
        if self.lora is not None:
            config = adapter_config(self.lora, manifest.shapes)
            (self.folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        file = "model.safetensors" if self.lora is None else "adapter_model.safetensors"
        write_safetensors({self.folder / file: manifest.layout}, weights)

    def receive(self, manifest: WeightManifest, worker: int = 0) -> Iterator[tuple[str, Tensor]]:
        return read_safetensors(self.folder)

    def for_engine(self, index: int) -> SharedFolder:
        return self

    def is_here(self) -> bool:
        return self.folder.is_dir()


@contextmanager
def offered(offer: Offer) -> Iterator[SharedFolder]:
    """Yield the transport of a publish, whose folder is removed at the end."""
    with weights_folder(offer.manifest.num_bytes) as folder:
        yield SharedFolder(folder, offer.lora)


def weights_folder(size: int) -> AbstractContextManager[Path]:
    """Make a folder for `size` bytes, removed at the end: in shared memory if it has room (containers often limit it to
    64 MiB), else in the temporary folder."""
    roomy = _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > size * 1.1 + 2**20
    return scratch_folder("weights", _SHARED_MEMORY if roomy else None)


def read_files(folder: Path) -> Files:
    return {file.name: numpy.fromfile(file, dtype=numpy.uint8) for file in folder.iterdir()}


@contextmanager
def received(files: Files) -> Iterator[Path]:
    """Write `files`, received from another node, to a folder that is removed at the end."""
    with weights_folder(sum(content.nbytes for content in files.values())) as folder:
        for file, content in files.items():
            content.tofile(folder / file)
        yield folder


def adapter_config(lora: LoraConfig, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return PEFT's adapter_config.json of the adapter with the tensors `names`.

    Raises WeightSyncError for a tensor that is not a LoRA factor.
    """
    modules: set[str] = set()
    for name in names:
        module, factor, _ = name.rsplit(".", 2) if name.count(".") > 2 else ("", "", "")
        if not name.startswith("base_model.model.") or factor not in ("lora_A", "lora_B"):
            raise WeightSyncError(
                f"`{name}` is not a LoRA factor; an adapter has tensors base_model.model.….lora_A.weight and "
                "lora_B.weight"
            )
        modules.add(module.rpartition(".")[2])
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rank_stabilised,
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
        "bias": "none",
        "inference_mode": True,
    }
