"""Packing keeps every token with its fields."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from rlhf_core.packing import pack, select
from rlhf_core.types import PackedBatch, Pixels, PreferenceBatch, Scored


def experience() -> Scored:
    packed = pack([[5, 6, 7], [8], [9, 4]], [[False, True, True], [True], [False, True]])
    return Scored(
        **{name: getattr(packed, name) for name in ("input_ids", "sequence_lengths", "loss_mask")},
        episode_indices=torch.tensor([30, 10, 20]),
        rollout_logprobs=torch.arange(6.0),
    )


def test_pack_lays_sequences_end_to_end() -> None:
    batch = experience()
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9, 4]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.sequence_lengths.tolist() == [3, 1, 2]
    assert batch.loss_mask.tolist() == [False, True, True, True, False, True]
    assert batch.num_trained_tokens == 4


@pytest.mark.parametrize(("ids", "masks"), [([], []), ([[1]], []), ([[]], [[]]), ([[1, 2]], [[True]])])
def test_pack_refuses_what_does_not_fit(ids: list[list[int]], masks: list[list[bool]]) -> None:
    with pytest.raises(ValueError, match=r"^pack: "):
        pack(ids, masks)


def test_select_slices_tokens_and_sequences_and_leaves_absent_fields_absent() -> None:
    part = select(experience(), [2, 0])
    assert isinstance(part, Scored)
    assert part.input_ids.tolist() == [9, 4, 5, 6, 7]
    assert part.position_ids.tolist() == [0, 1, 0, 1, 2]
    assert part.sequence_lengths.tolist() == [2, 3]
    assert part.episode_indices is not None
    assert part.episode_indices.tolist() == [20, 30]
    assert part.rollout_logprobs.tolist() == [4, 5, 0, 1, 2]
    assert part.values is None


def test_a_batch_pickles_as_buffers_and_arrives_whole_and_writable() -> None:
    pixels = Pixels(torch.rand(1, 3, 2, 2), torch.tensor([1]), mask=torch.ones(1, 2, 2, dtype=torch.bool))
    batch = replace(experience(), pixels=pixels, image_parts=torch.tensor([-1, 0, -1, -1, -1, -1]))
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    sizes = sorted(buffer.raw().nbytes for buffer in buffers)
    # Tiles' mask, mask, tiles' tokens, lengths, episodes, int32 ids, log-probs, ...
    assert sizes == [4, 6, 8, 24, 24, 24, 24, 48, 48]
    back = pickle.loads(pickled, buffers=[buffer.raw().toreadonly() for buffer in buffers])
    tensors = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    assert all(torch.equal(value, getattr(back, name)) for name, value in tensors.items())
    assert all(value.dtype == getattr(back, name).dtype for name, value in tensors.items())
    assert back.values is None
    assert torch.equal(back.pixels.values, pixels.values)
    back.rollout_logprobs.fill_(1.0)
    assert batch.rollout_logprobs.tolist() == [0, 1, 2, 3, 4, 5]


def test_select_tells_tokens_from_sequences_when_there_are_as_many() -> None:
    batch = replace(select(experience(), [1]), episode_indices=torch.tensor([10]))
    assert select(batch, [0]).rollout_logprobs.tolist() == [3]


def preferences() -> PreferenceBatch:
    packed = pack([[1, 2], [1, 3, 4], [5], [6]], [[True] * n for n in (2, 3, 1, 1)])
    return PreferenceBatch(**vars(packed), margins=torch.tensor([0.5, 1.5]))


def test_select_takes_whole_pairs_with_their_margin() -> None:
    part = select(preferences(), [1])
    assert part.input_ids.tolist() == [5, 6]
    assert part.margins is not None
    assert part.margins.tolist() == [1.5]
    both = select(preferences(), [1, 0])
    assert both.sequence_lengths.tolist() == [1, 1, 2, 3]
    assert both.margins is not None
    assert both.margins.tolist() == [1.5, 0.5]


def test_pairs_come_in_twos() -> None:
    assert (preferences().num_examples, preferences().example_lengths.tolist()) == (2, [5, 2])
    odd = PreferenceBatch(**vars(pack([[1], [2], [3]], [[True]] * 3)))
    with pytest.raises(ValueError, match="3 sequences in examples of 2"):
        select(odd, [0])


def test_selected_parts_of_a_plan_are_plain_batches() -> None:
    batch: PackedBatch = pack([[1, 2], [3]], [[True, True], [True]])
    assert type(select(batch, [1])) is PackedBatch
