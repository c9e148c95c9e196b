"""How often a micro-batch makes the host wait for the device, beside the one read of a step's metrics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.small_models import small_config, small_model
from rlhf_core.losses.policy import clipped_policy_loss
from rlhf_core.models.layouts import TREE, Layouts
from rlhf_core.models.packed import PolicyModel
from rlhf_core.models.token_tree import TokenTree
from rlhf_core.models.tree_blocks import TreeBlocks
from rlhf_core.packing import select_sequences
from rlhf_core.types import PackedBatch
from tests.rlhf_core.models.trees import PROMPT, batch_of
from tests.rlhf_core.training.device_reads import DeviceReads
from tests.rlhf_core.training.tiny_engine import batch as tiny_batch
from tests.rlhf_core.training.tiny_engine import build, tiny_model
from tests.rlhf_core.training.tiny_engine import loss as tiny_loss

pytestmark = pytest.mark.parts

BATCH = batch_of([*PROMPT, 3, 4], [*PROMPT, 5], [7, 8, 9])
PACKED, ROWS = Layouts("positions", rows=False), Layouts(None, rows=True)
# The norm of the gradient, and the metrics. Under ZeRO DeepSpeed reads the norm, of buffers that are not followed here.
READS = {0: ["__float__", "_local_scalar_dense", "tolist"], 2: ["tolist"]}
MASK = ["__bool__", "_local_scalar_dense"]  # transformers looks where sequences begin as it makes a mask


def checked(layouts: Layouts) -> PolicyModel:
    model = small_model(small_config("llama", num_hidden_layers=2))
    policy = PolicyModel(model)
    policy.check_layouts(torch.device("cpu"))
    if layouts != TREE:
        model.set_attn_implementation("sdpa")
        policy.layouts = layouts
    return policy


def put(reads: DeviceReads, model: nn.Module) -> None:
    reads.put([*model.parameters(), *model.buffers()])


@pytest.mark.parametrize(("layouts", "expected"), [(TREE, []), (ROWS, []), (PACKED, MASK)])
def test_what_forward_and_backward_of_a_model_read(layouts: Layouts, expected: list[str]) -> None:
    policy, reads = checked(layouts), DeviceReads()
    put(reads, policy)
    batch = reads.batch(BATCH)
    with reads.watched():
        logprobs, entropy, _ = policy(batch, only=batch.loss_mask, with_entropy=True)
        (logprobs + entropy).sum().backward()
    assert reads.is_there(logprobs)
    assert reads.found == expected
    assert torch.equal(logprobs, policy(BATCH, only=BATCH.loss_mask)[0])


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_a_step_reads_as_often_with_more_micro_batches(
    zero_stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = DeviceReads()
    engine = build(tiny_model(tmp_path), zero_stage=zero_stage, dtype="bfloat16" if zero_stage else "float32")
    put(reads, engine.module)
    monkeypatch.setattr(PackedBatch, "to", lambda self, device: reads.batch(self))
    found = []
    for count in (1, 1, 3):
        reads.found.clear()
        with reads.watched():
            engine.step([tiny_batch()] * count, tiny_loss)
        found.append(list(reads.found))
    assert found[1] == found[2]
    assert found[1] == READS[zero_stage]


def test_a_batch_that_does_not_know_its_host_is_copied_back() -> None:
    """A changed batch has no copy in host memory, which makes the test above fail."""
    policy, reads = checked(TREE), DeviceReads()
    put(reads, policy)
    batch = reads.batch(BATCH)
    vars(batch).pop("_on_host")
    with reads.watched():
        policy(batch)
    assert reads.found


def test_losses_count_their_tokens() -> None:
    """A value selected by a mask waits, the first for the whole forward; these are all."""
    reads = DeviceReads()
    count = BATCH.num_tokens
    batch = reads.batch(BATCH)
    logprobs = torch.randn(count, requires_grad=True)
    others = [torch.randn(count) for _ in range(3)]
    reads.put([logprobs, *others])
    with reads.watched():
        loss, metrics = clipped_policy_loss(
            logprobs, others[0], others[1], batch.loss_mask, others[2], clip_low=0.2, clip_high=0.2
        )
        loss.backward()
    assert reads.is_there(metrics["approx_kl"].value)
    assert reads.found == ["index"] * 4 + ["index_put"]


def test_a_mask_of_flex_attention_is_made_without_reading() -> None:
    blocks, reads = TreeBlocks(TokenTree.of(BATCH).segments, torch.device("cpu")), DeviceReads()
    reads.put(value for value in vars(blocks).values() if isinstance(value, torch.Tensor))
    with reads.watched():
        masks = [blocks.mask(window) for window in (None, 5)]
    assert all(reads.is_there(mask.kv_indices) for mask in masks)
    assert reads.found == []


def test_a_batch_and_its_parts_know_what_they_were_on_the_host() -> None:
    batch = BATCH.to("meta")
    assert batch.on_host is BATCH
    part, expected = select_sequences(batch, [2, 0]), select_sequences(BATCH, [2, 0])
    assert part.input_ids.is_meta
    for name in ("input_ids", "sequence_lengths", "loss_mask"):
        assert torch.equal(getattr(part.on_host, name), getattr(expected, name))
        assert getattr(part, name).shape == getattr(expected, name).shape
    changed = replace(batch, loss_mask=~batch.loss_mask)
    with pytest.raises(NotImplementedError, match="meta"):  # a copy, of what it is now
        _ = changed.on_host
