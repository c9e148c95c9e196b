"""What tests/rlhf_core/training/test_long_sequence.py asks of each rank: a step on one long sequence, in little memory.

The folder holds the model `long`.
"""

from __future__ import annotations

import re
import resource
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.packing import pack
from rlhf_core.training.distributed import join_group
from rlhf_core.types import PackedBatch
from tests.rlhf_core.training.ranks import write_answers
from tests.rlhf_core.training.tiny_engine import GRADIENT, build, loss

TOKENS, VOCABULARY = 4096, 64


def long_model(folder: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
            num_key_value_heads=2, max_position_embeddings=TOKENS,
        )
    ).save_pretrained(folder)  # fmt: skip


def sequence(length: int) -> PackedBatch:
    ids = torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(0))
    return pack([ids], [torch.arange(length) > 0])


def main(rank: int, address: str, folder: Path, ranks: str, mebibytes: str) -> None:
    """mebibytes: of memory for the step, beside what the process has after a short one; 0: as much as there is."""
    torch.set_num_threads(1)
    join_group(rank=rank, size=int(ranks), address=address, sequence=int(ranks))
    engine = build(folder / "long", optimizer=GRADIENT, zero_stage=0)
    engine.step([sequence(64)], loss)
    if int(mebibytes):
        (used,) = re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
        most = int(used) * 1024 + int(mebibytes) * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        found = {"norm": engine.step([sequence(TOKENS)], loss).gradient_norm}
    except RuntimeError as error:
        found = {"error": str(error)}
    write_answers(rank, folder, iter([("step", found, {})]))
