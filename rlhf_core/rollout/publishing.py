"""Publishing weights to the engines, and the proof that they serve them.

A publish is a file of safetensors bytes: the trainer makes them, Ray's object store carries them, each engine's node
writes them into a folder in shared memory, the engine loads the folder, and the folder goes.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from rlhf_core.config.training import LoraConfig
from rlhf_core.errors import WeightSyncError

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (memory, which is what is wanted)


def serialize_weights(state: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> bytes:
    """`state` as the bytes of a safetensors file; `dtype` casts, as the engine would do anyway.

    A tensor that shares its storage with an earlier one (a tied head) is left out: loading ties it again.
    """
    seen: set[tuple[int, torch.Size]] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        storage = (tensor.data_ptr(), tensor.shape)
        if storage in seen and tensor.numel():
            continue
        seen.add(storage)
        tensors[name] = tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype).contiguous()
    return save(tensors)


@contextmanager
def weights_folder(weights: bytes, lora: LoraConfig | None = None) -> Iterator[Path]:
    """A folder with the published `weights`, removed at the end: a PEFT adapter folder where `lora` is given."""
    with tempfile.TemporaryDirectory(prefix="weights-", dir=_roomy_folder(len(weights))) as name:
        folder = Path(name)
        file = folder / ("model.safetensors" if lora is None else "adapter_model.safetensors")
        file.write_bytes(weights)
        if lora is not None:
            config = adapter_config(lora, tensor_shapes(folder))
            (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
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


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """What one engine says of the probe."""

    engine: str
    version: int
    logprobs: list[list[float]]
    differing: tuple[str, ...] = ()  # tensors that it found itself not to serve as they were published


class ProvenEngines(Protocol):
    def probe(self, sequences: Sequence[Sequence[int]]) -> list[ProbeAnswer]:
        """Every engine's log-probs of all `sequences`, at temperature 1, and the version it says it serves."""


def default_tolerance(dtype: str) -> float:
    """The largest |log-prob difference| on the probe that rounding explains, with room for larger models.

    Measured on CPU, vLLM against our packed forward, over some hundred tokens: float32 4e-6 (3 M parameters, random),
    3e-5 (50 M, random), 5e-5 (SmolLM2-135M); bfloat16 0.1, 0.23 and 0.40, with means of 0.02 to 0.06. The head's trap
    (vllm_worker) was off by 0.5 to 4. So in bfloat16 log-probs alone would see old weights late: there the comparison
    of tensors, which is exact, sees them at once.
    """
    return {"float32": 1e-3, "bfloat16": 1.0}[dtype]


def verify_weights(
    engines: ProvenEngines,
    sequences: Sequence[Sequence[int]],
    expected: Sequence[Sequence[float]],
    version: int,
    tolerance: float,
) -> float:
    """The worst |log-prob difference| of any engine and the trainer on the probe, which is at most `tolerance`.

    sequences: token ids; expected: the trainer's log-probs of them at temperature 1; the first of each says nothing.
    Raises WeightSyncError naming version, engine, worst difference and, where it can be told, the tensors.
    """
    worst = 0.0
    for answer in engines.probe(sequences):
        if answer.version != version:
            raise WeightSyncError(
                f"{answer.engine} serves version {answer.version}, but version {version} was published"
            )
        difference = max((_difference(a, e) for a, e in zip(answer.logprobs, expected, strict=True)), default=0.0)
        if answer.differing or not difference <= tolerance:
            raise WeightSyncError(
                f"{answer.engine} does not serve version {version} as published: its log-probs of the probe are off by "
                f"up to {difference:.3g} (tolerance {tolerance:.3g}); {_blame(answer.differing)}"
            )
        worst = max(worst, difference)
    return worst


def _blame(tensors: Sequence[str]) -> str:
    if not tensors:
        return "it serves each tensor that it was given, as far as it can tell: was it given the trainer's?"
    more = f" and {len(tensors) - 8} more" if len(tensors) > 8 else ""
    return f"it goes on with old values of {', '.join(tensors[:8])}{more}"


def _difference(actual: Sequence[float], expected: Sequence[float]) -> float:
    """NaN, if any value is: no comparison with it is true, so that it can never pass."""
    pairs = zip(actual[1:], expected[1:], strict=True)
    differences = [abs(a - e) for a, e in pairs]
    return math.nan if any(map(math.isnan, differences)) else max(differences, default=0.0)
