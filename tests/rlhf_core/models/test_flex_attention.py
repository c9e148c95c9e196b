"""FlexAttention computes what the calls of torch's attention do, and its masks leave out nothing that a token sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

from benchmarks.small_models import small_config, small_model
from rlhf_core.errors import StageError
from rlhf_core.models import flex_attention, token_tree, tree_blocks
from rlhf_core.models.attention_check import attention_difference
from rlhf_core.models.flex_attention import flex, use_flex_attention
from rlhf_core.models.loading import load_causal_model
from rlhf_core.models.packed import PolicyModel
from rlhf_core.models.token_tree import Segment, TokenTree
from rlhf_core.models.tree_attention import tree_attention
from rlhf_core.models.tree_blocks import TreeBlocks, padded_size
from tests.rlhf_core.models.trees import PROMPT, batch_of, grown

pytestmark = pytest.mark.parts

CPU = torch.device("cpu")
WINDOWS = (None, 1, 5, 300)


@pytest.fixture(autouse=True)
def backward_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As benchmarks/flex_on_cpu.py, for one test."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *states: None)


def visible(tree: TokenTree, window: int | None) -> Tensor:
    """(size, size) bool: whether a query sees a key, by the definition of a segment; padding sees itself alone."""
    length = len(tree.kept)
    size = padded_size(length)
    seen = torch.zeros(size, size, dtype=torch.bool)
    for segment in (*tree.segments, Segment(length, size - length, torch.empty(0, dtype=torch.int64))):
        places = torch.cat([segment.before, torch.arange(segment.start, segment.start + segment.length)])
        for i in range(segment.length):
            end = segment.before.numel() + i + 1
            seen[segment.start + i, places[max(0, end - (window or end)) : end]] = True
    return seen


def listed(count: Tensor, columns: Tensor) -> Tensor:
    """(blocks, blocks) bool, of a BlockMask's numbers and indices."""
    blocks = torch.zeros(columns.shape[-2:], dtype=torch.bool)
    for row, number in enumerate(count[0, 0].tolist()):
        blocks[row, columns[0, 0, row, :number].long()] = True
    return blocks


@pytest.mark.parametrize("window", WINDOWS)
def test_blocks_are_those_of_visible_pairs(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_blocks, "BLOCK", block := 8)
    skipped = whole_blocks = 0
    for seed in range(40):
        tree = TokenTree.of(batch_of(*grown(seed, vocabulary=2)))
        wanted = visible(tree, window)
        mask = TreeBlocks(tree.segments, CPU).mask(window)
        places = torch.arange(len(wanted))
        found = mask.mask_mod(torch.tensor(0), torch.tensor(0), places.unsqueeze(1), places)
        assert torch.equal(found, wanted)
        counts = wanted.view(len(wanted) // block, block, -1, block).sum((1, 3))
        partial, whole = (
            listed(mask.kv_num_blocks, mask.kv_indices),
            listed(mask.full_kv_num_blocks, mask.full_kv_indices),
        )
        assert not (partial & whole).any()
        assert not ((counts > 0) & ~partial & ~whole).any(), "what a token sees is left out"
        assert (counts[whole] == block * block).all(), "a token sees what it must not"
        if window is None:
            assert torch.equal(partial | whole, counts > 0)
            assert torch.equal(whole, counts == block * block)
        for rows, columns in (("kv", "q"), ("full_kv", "full_q")):  # which the backward pass reads
            forward, backward = (
                listed(getattr(mask, f"{name}_num_blocks"), getattr(mask, f"{name}_indices"))
                for name in (rows, columns)
            )
            assert torch.equal(forward, backward.t())
        skipped += int((~partial & ~whole).tril().sum())
        whole_blocks += int(whole.sum())
    assert skipped > 100
    assert window == 1 or whole_blocks > 100 or window == 5


@pytest.mark.parametrize(
    ("seed", "heads", "window"),
    [(seed, heads, window) for seed, heads in enumerate([(2, 2), (4, 2), (6, 1)] * 2) for window in WINDOWS],
)
def test_attention_and_its_gradients_are_those_of_the_groups(
    seed: int, heads: tuple[int, int], window: int | None
) -> None:
    tree = TokenTree.of(batch_of(*grown(seed)))
    generator = torch.Generator().manual_seed(seed)
    states = [
        torch.randn(1, count, len(tree.kept), size, generator=generator, dtype=torch.float64, requires_grad=True)
        for count, size in ((heads[0], 8), (heads[1], 8), (heads[1], 6))
    ]
    options: dict[str, Any] = {"scaling": 0.3, "sliding_window": window}
    blocks = TreeBlocks(tree.segments, CPU)
    found = flex(nn.Module(), *states, None, token_tree=blocks, **options)[0]
    expected = tree_attention(nn.Module(), *states, None, token_tree=tree, **options)[0]
    assert (found - expected).abs().max() < 1e-12
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    gradients = [torch.autograd.grad((result * weights).sum(), states) for result in (found, expected)]
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(*gradients, strict=True))


FURTHER = [
    pytest.param(name, marks=pytest.mark.endurance("architectures"))
    for name in ("gemma2", "qwen3", "mistral", "gemma3_text", "lfm2")
]


@pytest.mark.endurance("architectures")
@pytest.mark.parametrize("model_type", ["llama", *FURTHER])
def test_log_probs_and_gradients_of_a_model_are_those_of_sdpa(model_type: str) -> None:
    """With grouped heads, windows of all layers and of some, caps of scores, scales, and in padded rows (lfm2)."""
    batch = batch_of([*PROMPT, 3, 4, *PROMPT], [*PROMPT, 5, 6], [7, *PROMPT[:9]], [*PROMPT[:10], 50, 51])
    results = []
    for is_flex in (False, True):
        model = small_model(small_config(model_type, attention_dropout=0.0)).double()
        if is_flex:
            use_flex_attention(model)
        policy = PolicyModel(model)
        policy.check_layouts(CPU)
        logprobs = policy(batch)[0]
        logprobs.sum().backward()
        results.append((logprobs.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    assert str(policy.layouts) == ("rows" if model_type == "lfm2" else "tree")
    (expected, wanted), (found, gradients) = results
    # Gemma computes parts of its layers in float32, in whatever dtype it is.
    most = 1e-5 if model_type.startswith("gemma") else 1e-12
    assert (found - expected).abs().max() < most
    assert wanted.keys() == gradients.keys()
    assert all((gradients[name] - wanted[name]).norm() <= most * wanted[name].norm() for name in wanted)


@pytest.mark.endurance("architectures")
def test_sequences_end_to_end_do_not_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a tree is wrong the row has none: here for a class whose sequences may not share tokens."""
    right = token_tree._common_length
    monkeypatch.setattr(token_tree, "_common_length", lambda a, b: right(a, b) + 1)
    model = small_model(small_config("llama"))
    use_flex_attention(model)
    policy = PolicyModel(model)
    policy.check_layouts(CPU)
    assert (str(policy.layouts), model.config._attn_implementation) == ("packed", "flex")
    first, second = [*PROMPT, 3, 4], [*PROMPT, 5]
    together = policy(batch_of(first, second))[0]
    assert (together - torch.cat([policy(batch_of(ids))[0] for ids in (first, second)])).abs().max() < 1e-4


@pytest.fixture
def masks_made(monkeypatch: pytest.MonkeyPatch) -> list[BlockMask]:
    made: list[BlockMask] = []
    make = BlockMask.from_kv_blocks

    def counted(*arguments: Any) -> BlockMask:
        made.append(make(*arguments))
        return made[-1]

    monkeypatch.setattr(BlockMask, "from_kv_blocks", counted)
    flex_attention._separate.cache_clear()
    return made


@pytest.mark.endurance("architectures")
def test_a_mask_is_made_once_for_all_layers(masks_made: list[BlockMask]) -> None:
    model = small_model(small_config("gemma3_text", num_hidden_layers=4))
    use_flex_attention(model)
    policy = PolicyModel(model)
    policy.check_layouts(CPU)
    batch = batch_of([*PROMPT, 3, 4], [*PROMPT, 5])
    masks_made.clear()
    for forwards in (1, 2):
        policy(batch)[0].sum().backward()
        assert len(masks_made) == 2 * forwards, "one for layers with a window, one for those without"


def test_a_second_micro_batch_of_the_same_size_has_its_own_mask() -> None:
    model = small_model(small_config("llama"))
    use_flex_attention(model)
    policy = PolicyModel(model)
    policy.check_layouts(CPU)
    for batch in (batch_of([*PROMPT, 3, 4], [*PROMPT, 5]), batch_of([*PROMPT[:11], 3], [*PROMPT[11:], 4, 5])):
        assert len(TokenTree.of(batch).kept) == 23
        apart = [policy(batch_of(ids.tolist()))[0] for ids in batch.input_ids.split(batch.sequence_lengths.tolist())]
        assert (policy(batch)[0] - torch.cat(apart)).abs().max() < 1e-4


def test_rows_are_padded_to_few_sizes() -> None:
    sizes = {padded_size(tokens) for tokens in range(1, 16_385)}
    assert len(sizes) == 24
    assert all(size % tree_blocks.BLOCK == 0 for size in sizes)
    assert padded_size(1) == 128
    assert padded_size(16_384) == 16_384
    assert padded_size(16_385) == 20_480
    assert max((padded_size(tokens) - tokens) / tokens for tokens in range(513, 70_000)) <= 1 / 4


@pytest.mark.endurance("architectures")
def test_other_trees_of_the_same_size_are_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.testing import CompileCounter

    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(torch_flex.flex_attention, dynamic=False, backend=counter)
    monkeypatch.setattr(flex_attention, "flex_attention", compiled)
    module, others = nn.Module(), {"scaling": 0.5, "softcap": 20.0}
    for seed in range(4):
        tree = TokenTree.of(batch_of(*grown(seed)[:2]))
        blocks = TreeBlocks(tree.segments, CPU)
        assert blocks.size == 128
        states = [torch.randn(1, heads, blocks.length, 4) for heads in (4, 2, 2)]
        flex(module, *states, None, token_tree=blocks, **others)
        assert counter.frame_count == 1
    for window, graphs in ((7, 2), (7, 2), (9, 3)):
        flex(module, *states, None, token_tree=blocks, sliding_window=window, **others)
        assert counter.frame_count == graphs


@pytest.mark.endurance("architectures")
@pytest.mark.slow("torch compiles attention")
@pytest.mark.parametrize("window", [None, 100])
def test_compiled_attention_skips_blocks_and_computes_the_same(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The eager one computes all pairs, the compiled one those of the blocks that the mask lists."""
    prompt = list(range(300))
    sequences = [prompt + [400 + i] * 150 for i in range(4)] + [[500 + i] * 90 for i in range(5)]
    tree = TokenTree.of(batch_of(*sequences))
    blocks = TreeBlocks(tree.segments, CPU)
    assert blocks.mask(window).sparsity() > 40
    states = [torch.randn(1, heads, blocks.length, 16) for heads in (4, 2, 2)]
    monkeypatch.setattr(flex_attention, "flex_attention", flex_attention._compiled())
    with torch.no_grad():
        expected = tree_attention(nn.Module(), *states, None, token_tree=tree, sliding_window=window)[0]
        found = flex(nn.Module(), *states, None, token_tree=blocks, sliding_window=window)[0]
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("model_type", "changes", "problem"),
    [
        ("gpt_oss", {}, "flex does not compute s_aux of this model; set sdpa"),
        ("llama4_text", {}, "chunks of 5 places of a row, which engine.attention: flex would leave out; set sdpa"),
        ("gptj", {}, "transformers has no attention `flex` for GPTJForCausalLM: set engine.attention: eager"),
        ("qwen2_moe", {
            "use_sliding_window": True, "sliding_window": 4096,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        }, "is not told of its sliding windows, which engine.attention: flex would leave out; set sdpa"),
    ],
)  # fmt: skip
def test_what_flex_attention_would_leave_out_is_refused(model_type: str, changes: Any, problem: str) -> None:
    model = small_model(small_config(model_type, **changes))

    def load() -> None:
        use_flex_attention(model)
        PolicyModel(model).check_layouts(CPU)

    with pytest.raises(StageError, match=problem):
        load()


def test_dropout_in_attention_is_refused() -> None:
    states = [torch.ones(1, 2, 20, 4)] * 3
    with pytest.raises(StageError, match=r"flex has no dropout, but the model's config has 0\.1 in its attention"):
        flex(nn.Module(), *states, None, dropout=0.1)
    tree = TokenTree.of(batch_of([*PROMPT, 3]))
    for mask, blocks in ((torch.ones(1, 1, 20, 20), None), (None, TreeBlocks(tree.segments, CPU))):
        with pytest.raises(NotImplementedError, match="for one row of tokens with its tree, or sequences, and no mask"):
            flex(nn.Module(), *states, mask, token_tree=blocks)


@pytest.mark.endurance("architectures")
@pytest.mark.parametrize("left_out", ["softcap", "sliding_window"])
def test_a_part_that_flex_attention_leaves_out_is_noticed(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(small_config("gemma2"))
    use_flex_attention(model)
    ids = torch.arange(3, 14).unsqueeze(0)
    assert attention_difference(model, ids) is None
    part = "_capped" if left_out == "softcap" else "_separate"
    whole = getattr(flex_attention, part)
    if left_out == "softcap":
        monkeypatch.setattr(flex_attention, part, lambda cap: whole(1e9))
    else:
        monkeypatch.setattr(TreeBlocks, "mask", lambda self, window, made=TreeBlocks.mask: made(self, None))
    assert attention_difference(model, ids) is not None


def test_a_folder_is_loaded_with_it(tmp_path: Path) -> None:
    small_model(small_config("llama")).save_pretrained(tmp_path)
    model = load_causal_model(tmp_path, dtype=torch.float32, attention="flex")
    assert model.config._attn_implementation == "flex"
