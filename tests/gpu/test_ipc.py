"""Weights by handle between two processes: CUDA IPC on one card, shared memory on a CPU."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_core.rollout.digest import tensor_digest
from rlhf_core.rollout.transport.base import TransportError, WeightManifest, digested
from rlhf_core.rollout.transport.ipc import SharedBuffers

pytestmark = pytest.mark.parts

BUFFER_BYTES = 2**20
SECONDS = 120.0


def state(device: torch.device) -> dict[str, Tensor]:
    """Tensors that end inside of buffers, and one that is larger than both."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"large": (1500, 1000), "small": (7,), "empty": (0, 3), "scalar": (), "middle": (300, 333)}
    dtypes = (torch.bfloat16, torch.float32, torch.float32, torch.int64, torch.float16)
    made = {
        name: torch.randn(shape, generator=generator).mul(100).to(device, dtype)
        for (name, shape), dtype in zip(shapes.items(), dtypes, strict=True)
    }
    return made | {"turned": made["middle"].T}


def receive(transports: Sequence[SharedBuffers], manifests: Sequence[WeightManifest], answers: Any) -> None:
    """In the other process, which fails in the last publish."""
    for transport, manifest in zip(transports, manifests, strict=True):
        received = {}
        for name, tensor in transport.receive(manifest):
            assert tensor.device.type == transport.device
            received[name] = tensor_digest(tensor)
            if manifest.version == 3:
                raise ValueError("the receiver fails")
        answers.put(received)


def test_weights_by_handle_between_two_processes(device: torch.device) -> None:
    """Two publishes, of which the second may use memory that the first has freed; in the third the receiver fails."""
    weights, context = state(device), multiprocessing.get_context("spawn")
    kind: Any = device.type
    manifests = [WeightManifest.of(version, weights) for version in (1, 2, 3)]
    transports = [
        SharedBuffers(f"check-{version}", kind, 1, 1, timeout_seconds=SECONDS, buffer_bytes=BUFFER_BYTES)
        for version in (1, 2, 3)
    ]
    answers = context.Queue()
    receiver = context.Process(target=receive, args=(transports, manifests, answers))
    with ExitStack() as stack:
        for transport in transports:
            stack.enter_context(transport.listening())
        receiver.start()
        stack.callback(receiver.kill)
        for transport, manifest in zip(transports[:2], manifests[:2], strict=True):
            digests: dict[str, str] = {}
            transport.send(digested(weights.items(), digests), manifest)
            assert answers.get(timeout=SECONDS) == digests == {n: tensor_digest(t) for n, t in weights.items()}
            weights["large"].mul_(2)
        with pytest.raises(TransportError, match="version 3 did not travel"):
            transports[2].send(weights.items(), manifests[2])
