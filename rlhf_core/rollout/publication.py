"""Publications of weights from the trainer to the engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.contract import Started
from rlhf_core.rollout.transport.base import Transport, WeightManifest, digested
from rlhf_core.rollout.transport.folder import Files, SharedFolder, read_files, weights_folder

Digests = Mapping[str, str]  # digest.tensor_digest of each tensor


@dataclass(frozen=True, slots=True)
class Publication:
    transport: Transport
    manifest: WeightManifest  # with digests if everything is already sent
    files: Callable[[], Files]  # of the folder, for engines on other nodes
    start: Callable[[], Started[Digests]] | None = None  # starts sending; results: rank 0 has the digests
    sending: Started[Digests] | None = None  # what it has started


@contextmanager
def publication_of(
    state: Mapping[str, Tensor],
    version: int,
    *,
    dtype: torch.dtype | None = None,
    lora: LoraConfig | None = None,
    unchanged: frozenset[str] = frozenset(),
) -> Iterator[Publication]:
    """Write weights in memory to a folder, and yield their publication.

    state: the whole model or, with `lora`, the adapter. dtype: to cast to, as the engine would do. unchanged: names
    that are not written.
    """
    tensors = published_tensors(state, dtype)
    manifest, digests = WeightManifest.of(version, tensors, unchanged), dict[str, str]()
    with weights_folder(manifest.num_bytes) as folder:
        transport = SharedFolder(folder, lora)
        transport.send(manifest.sent(digested(tensors.items(), digests)), manifest)
        yield Publication(transport, replace(manifest, digests=digests), lambda: read_files(folder))


def published_tensors(state: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return `state` on the CPU, contiguous.

    A tensor that shares the storage of an earlier one, such as a tied head, is left out: loading ties it again.
    """
    seen: set[tuple[int, torch.Size]] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        storage = (tensor.data_ptr(), tensor.shape)
        if storage in seen and tensor.numel():
            continue
        seen.add(storage)
        tensors[name] = tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype).contiguous()
    return tensors
