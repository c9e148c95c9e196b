"""Memory that a trainer frees while engines take their turn, and takes back."""

from __future__ import annotations

import pytest

from benchmarks.gpu import measure_turn
from benchmarks.gpu_workload import Group, Scale
from rlhf_core.training.distributed import join_group

pytestmark = pytest.mark.parts

SHAPE = Scale(
    config={
        "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
    },
    sequence=512, short=2048, long=2048, rl=Group(1, 256, 4, 256), grpo=Group(1, 256, 4, 256),
)  # fmt: skip
_WORKSPACES = 100e6  # bytes: two of cuBLAS, each 32 MiB on Hopper, and the model's small buffers
_WEIGHT_BYTES = 2 + 4 + 4 + 4  # bfloat16, float32 master, two moments


@pytest.mark.gpu
def test_a_trainer_frees_the_device_for_engines() -> None:
    join_group(rank=0, size=1)
    turn = measure_turn(SHAPE)
    assert turn is not None
    parameters = 32_000 * 1024 + 8 * (2 * 1024 * (16 + 8) * 64 + 3 * 1024 * 3072)
    assert turn.training_bytes > _WEIGHT_BYTES * parameters
    assert turn.lent_bytes < _WORKSPACES
    assert turn.lent_reserved_bytes < 2 * _WORKSPACES
