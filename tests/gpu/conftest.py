"""Checks on the device that is there: the GPU, or else the CPU. `make gpu-checks` loads no other conftest."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from benchmarks.flex_on_cpu import allow_backward_on_cpu


@pytest.fixture
def flex_attention_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains on a CPU too."""
    monkeypatch.setattr(torch_flex, "_validate_device", torch_flex._validate_device)  # to be restored
    allow_backward_on_cpu()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without an NVIDIA GPU the tests that need one are left out."""
    if torch.cuda.is_available():
        return
    on_gpus = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=on_gpus)
    items[:] = [item for item in items if item not in on_gpus]
