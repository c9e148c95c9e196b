"""Shared prefixes are in the tree once, and each sequence is computed as if it were alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.small_models import small_config, small_model
from rlhf_core.models import token_tree
from rlhf_core.models.packed import PolicyModel
from rlhf_core.models.token_tree import TokenTree
from rlhf_core.models.tree_attention import IMPLEMENTATION, _attend, tree_attention
from tests.rlhf_core.models.trees import PROMPT, batch_of, grown

pytestmark = pytest.mark.parts


def test_a_prompt_is_there_once_with_its_completions_behind_it() -> None:
    batch = batch_of([*PROMPT, 30, 31], [*PROMPT, 30, 40, 41], [7], [*PROMPT, 50])
    tree = TokenTree.of(batch)
    assert len(tree.kept) == 20 + 2 + 3 + 1 + 1  # 30 alone is not worth a branch
    prompts = [tree.places[start : start + 20].tolist() for start in (0, 22, 46)]
    assert prompts[0] == prompts[1] == prompts[2]
    assert len({*tree.places.tolist()}) == 27


def test_the_turns_of_an_agent_make_a_deeper_tree() -> None:
    turn, other = list(range(30, 45)), list(range(45, 60))
    batch = batch_of([*PROMPT, *turn, 1], [*PROMPT, *turn, 2], [*PROMPT, *other, 3], [*PROMPT, *turn])
    assert len(TokenTree.of(batch).kept) == 20 + 15 + 15 + 1 + 1 + 1


@given(st.integers(0, 10**6))
@settings(max_examples=200, deadline=None)
def test_the_batch_can_be_read_from_the_tree(seed: int) -> None:
    batch = batch_of(*grown(seed, vocabulary=2))
    tree = TokenTree.of(batch)
    for values in (batch.input_ids, batch.position_ids):
        assert torch.equal(values[tree.kept][tree.places], values)
    assert tree.plan.queries[tree.plan.order].tolist() == list(range(len(tree.kept)))
    assert sum(int(group.real.sum()) for group in tree.plan.groups) == len(tree.kept)


@given(st.integers(0, 10**6), st.sampled_from([(2, 2), (4, 2), (6, 1)]), st.sampled_from([None, 1, 5, 300]))
@settings(max_examples=60, deadline=None)
def test_attention_and_its_gradients_are_those_of_sequences_alone(
    seed: int, heads: tuple[int, int], window: int | None
) -> None:
    batch = batch_of(*grown(seed))
    tree = TokenTree.of(batch)
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(1, count, len(tree.kept), size, generator=generator, dtype=torch.float64, requires_grad=True)
        for count, size in ((heads[0], 8), (heads[1], 8), (heads[1], 6))
    )
    found = tree_attention(nn.Module(), query, key, value, None, scaling=0.3, sliding_window=window, token_tree=tree)[0]
    expected = torch.cat([
        alone(*(part[:, :, places] for part in (query, key, value)), window)
        for places in tree.places.split(batch.sequence_lengths.tolist())
    ], dim=1)  # fmt: skip
    assert (found[:, tree.places] - expected).abs().max() < 1e-12
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    gradients = [
        torch.autograd.grad((result * weights).sum(), (query, key, value))
        for result in (found[:, tree.places], expected)
    ]
    assert all((a - b).abs().max() < 1e-11 for a, b in zip(*gradients, strict=True))


@given(st.integers(0, 10**6), st.integers(2, 5), st.sampled_from([None, 3]))
@settings(max_examples=60, deadline=None)
def test_attention_of_the_parts_of_a_row_is_that_of_the_row(seed: int, parts: int, window: int | None) -> None:
    """Of each part to the keys of all; padding in the plan of a part has the place 0, which may be before the part."""
    tree = TokenTree.of(batch_of(*grown(seed)))
    tree = tree.padded(-(-len(tree.kept) // parts) * parts)
    length = len(tree.kept) // parts
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, 2, len(tree.kept), 4, generator=generator, dtype=torch.float64) for _ in "qkv")
    attend = partial(_attend, dropout=0.0, scaling=None, window=window)
    whole = attend(query, key, value, tree.plan)
    for start in range(0, len(tree.kept), length):
        plan = tree.planned(start, start + length)
        assert plan.queries.min() == 0
        part = attend(query[:, :, start : start + length], key, value, plan)
        assert (part - whole[:, start : start + length]).abs().max() < 1e-12


def alone(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """(1, T, H, d)"""
    distances = torch.arange(query.shape[2]).unsqueeze(1) - torch.arange(query.shape[2])
    seen = (distances >= 0) & (distances < (window or len(distances)))
    result = scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=0.3, enable_gqa=True)
    return result.transpose(1, 2)


def test_what_it_does_not_compute_is_refused() -> None:
    tree = TokenTree.of(batch_of(PROMPT))
    states = [torch.ones(1, 2, 20, 4)] * 3
    with pytest.raises(NotImplementedError, match="does not compute softcap, s_aux"):
        tree_attention(nn.Module(), *states, None, token_tree=tree, softcap=30.0, s_aux=torch.ones(2))
    for mask, given_tree in ((None, None), (torch.ones(1, 1, 20, 20), tree)):
        with pytest.raises(NotImplementedError, match="for one row of tokens with its tree, and no mask"):
            tree_attention(nn.Module(), *states, mask, token_tree=given_tree)


def test_gradient_checkpoints_have_the_tree_too() -> None:
    model = small_model(small_config("llama"))
    policy = PolicyModel(model)
    policy.check_layouts(torch.device("cpu"))
    assert model.config._attn_implementation == IMPLEMENTATION
    batch = batch_of([*PROMPT, 3, 4], [*PROMPT, 5])
    norms = []
    for checkpoints in (False, True):
        if checkpoints:
            model.gradient_checkpointing_enable()
        model.train().zero_grad()
        policy(batch)[0].sum().backward()
        norms.append([float(parameter.grad.norm()) for parameter in model.parameters() if parameter.grad is not None])
    assert norms[0] == norms[1]


def test_a_window_that_attention_is_not_told_of_is_noticed() -> None:
    """Some classes make masks of it alone. The sequences of the check are shorter than any real window."""
    layers = ["full_attention", "sliding_attention"] * 2
    for model_type, expected in (("qwen2_moe", "packed"), ("qwen2", "tree")):
        config = small_config(model_type, use_sliding_window=True, sliding_window=4096, layer_types=layers)
        policy = PolicyModel(small_model(config))
        policy.check_layouts(torch.device("cpu"))
        assert str(policy.layouts) == expected


def test_a_tree_that_is_wrong_where_sequences_branch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that begin apart are right."""
    right = token_tree._common_length
    monkeypatch.setattr(token_tree, "_common_length", lambda a, b: right(a, b) + 1)
    model = small_model(small_config("llama"))
    policy = PolicyModel(model)
    policy.check_layouts(torch.device("cpu"))
    assert (str(policy.layouts), model.config._attn_implementation) == ("packed", "sdpa")
