"""Models with leaks between packed sequences, models that scale their logits: each kind is computed correctly, or
rejected.

benchmarks/architectures.py does this for every architecture of transformers; here is one of each kind.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.lfm2 import modeling_lfm2

from benchmarks.architectures import oracle_error, ragged_batch
from benchmarks.small_models import small_config, small_model
from rlhf_core.errors import StageError
from rlhf_core.models import layout_check, layouts
from rlhf_core.models.layouts import INDEXED, PACKED, ROWS, TREE, Layouts
from rlhf_core.models.packed import PolicyModel, ScalarModel
from rlhf_core.packing import pack
from rlhf_core.types import PackedBatch

pytestmark = pytest.mark.parts

CPU = torch.device("cpu")
BOTH = Layouts("positions", rows=True)


def of_lengths(*lengths: int) -> PackedBatch:
    return pack([[1] * length for length in lengths], [[True] * length for length in lengths])


def checked(model: Any) -> Layouts:
    policy = PolicyModel(model)
    policy.check_layouts(CPU)
    return policy.layouts


def require_right(model: Any, found: Layouts) -> None:
    for layout in (ROWS, TREE) if found is TREE else (ROWS, PACKED) if found.packed else (ROWS,):
        assert oracle_error(model, layout) < 1e-4, layout


FURTHER_KINDS = (
    ("gemma3_text", "tree"),  # sliding windows
    ("deepseek_v32", "packed"),  # an indexer
    ("cohere2", "tree"),  # scales its logits
    ("opt", "tree"),  # positions of its own, which it is told
    ("mamba", "rows"),  # state-space layers alone
    ("granitemoehybrid", "rows"),  # and with attention and experts
    ("qwen3_5_text", "rows"),  # linear attention
    ("bloom", "rows"),  # alibi
    ("bert", "tree"),  # a head of several layers
    ("llama4_text", "rows"),  # attention in chunks
)


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("qwen3", "tree"),
        ("deepseek_v3", "tree"),  # latent attention, experts, groups of them
        ("gemma2", "packed"),  # caps its logits, and the scores of its attention
        ("lfm2", "rows"),  # convolutions
        ("gpt_oss", "rows"),  # a mask without positions, and attention sinks
        *(pytest.param(*kind, marks=pytest.mark.endurance("architectures")) for kind in FURTHER_KINDS),
    ],
)
def test_each_kind_of_model_is_computed_as_single_sequences_are(
    model_type: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = small_model(small_config(model_type))
    found = checked(model)
    assert (str(found), found.rows) == (expected, expected != "tree")
    require_right(model, found)
    reason = {"tree": "\n", "packed": ", since a token tree "}.get(expected, ", since packing ")
    assert f"{type(model).__name__}: sequences are laid out {expected}{reason}" in capsys.readouterr().out


@pytest.mark.parametrize("size", [7, 8, 9, 14, 18, 20, 26, 27, 28, 58, 113, 333, 1003])
def test_no_vocabulary_makes_a_tree_look_wrong(size: int) -> None:
    """In 113 tokens, those of the recipe `tiny`, two of the sequences that are compared began with the same one."""
    model = small_model(small_config("llama", vocab_size=size, bos_token_id=0, eos_token_id=1, pad_token_id=2))
    assert checked(model) is TREE


def test_what_shows_at_a_distance_is_found_in_a_model_of_full_size() -> None:
    """In llama4's chunks of 8192 tokens the check's few ones are right."""
    model = small_model(small_config("llama4_text", short=False))
    assert model.config.attention_chunk_size == 8192
    assert str(checked(model)) == "rows"
    assert oracle_error(small_model(small_config("llama4_text")), PACKED) > 0.1


@pytest.mark.parametrize("model_type", ["gemma2", "vaultgemma"])
def test_attention_that_leaves_out_an_argument_is_replaced_by_the_models_own(
    model_type: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers' `sdpa` takes `softcap` and ignores it; with scores of this size that is nats."""
    model = small_model(small_config(model_type, attn_logit_softcapping=2.0))
    assert checked(model) == BOTH
    assert model.config._attn_implementation == "eager"
    assert "since a token tree is for sdpa, which leaves out softcap" in capsys.readouterr().out
    assert oracle_error(model, PACKED) < 1e-4
    model.set_attn_implementation("sdpa")
    assert oracle_error(model, ROWS) > 0.1


def test_attention_that_was_chosen_and_leaves_out_an_argument_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(small_config("gemma2"))
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", lambda self: False)
    with pytest.raises(
        StageError, match=r"^Gemma2ForCausalLM: the attention sdpa leaves out softcap: set engine\.attention: eager$"
    ):
        checked(model)


@pytest.mark.parametrize("model_type", ["gpt_oss", "lfm2", "qwen3_next"])
def test_a_leak_far_below_the_rounding_of_bfloat16_is_found(model_type: str) -> None:
    """As before the first step of pre-training: the weights are small."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(small_config(model_type), dtype=torch.bfloat16).eval()
    assert str(checked(model)) == "rows"


@pytest.mark.parametrize(("model_type", "expected"), [("llama", "tree"), ("qwen3_moe", "tree"), ("gemma2", "packed")])
def test_rounding_in_bfloat16_is_no_leak(model_type: str, expected: str) -> None:
    assert str(checked(small_model(small_config(model_type), dtype=torch.bfloat16))) == expected


def test_critic_and_reward_model_have_the_layout_of_the_policy() -> None:
    for model_type, expected in (("qwen3", "tree"), ("gpt_oss", "rows")):
        torch.manual_seed(0)
        classifier = transformers.AutoModelForSequenceClassification.from_config(
            small_config(model_type, num_labels=1)
        ).eval()
        scalar = ScalarModel(classifier)
        scalar.check_layouts(CPU)
        assert str(scalar.layouts) == expected
        batch = ragged_batch(61)
        scores = scalar(batch)
        if scalar.layouts is TREE:
            classifier.set_attn_implementation("sdpa")
        for ids, found in zip(
            batch.input_ids.split(batch.sequence_lengths.tolist()),
            scores.split(batch.sequence_lengths.tolist()), strict=True,
        ):  # fmt: skip
            alone = classifier(input_ids=ids.unsqueeze(0), use_cache=False).logits.item()
            assert found[-1].item() == pytest.approx(alone, abs=1e-5)


def test_the_model_is_told_the_boundaries_where_it_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for GPUs does; this one stands in for it."""
    plain = modeling_lfm2.causal_conv1d_fn

    def with_boundaries(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None = None) -> Tensor:
        if seq_idx is None:
            return plain(x, weight, bias)
        sizes = torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist()
        return torch.cat([plain(part, weight, bias) for part in x.split(sizes, dim=-1)], dim=-1)

    model = small_model(small_config("lfm2"))
    assert str(checked(model)) == "rows"
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", with_boundaries)
    assert checked(model) == Layouts("indices", rows=True)
    assert oracle_error(model, INDEXED) < 1e-4
    assert oracle_error(model, PACKED) > 0.1


def test_a_model_that_sees_later_tokens_is_refused() -> None:
    config = small_config("bert")
    config.is_decoder = False
    with pytest.raises(StageError, match="BertLMHeadModel does not read from left to right"):
        checked(small_model(config))


def test_a_model_that_computes_no_numbers_is_refused_as_such() -> None:
    model = small_model(small_config("llama"))
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.fill_(1e38)
    with pytest.raises(StageError, match="LlamaForCausalLM computes NaN or infinity for ordinary tokens: its weights"):
        checked(model)


def test_a_model_that_is_wrong_in_every_layout_is_refused() -> None:
    def mix(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output + output.mean(0, keepdim=True)  # over the rows of a batch

    model = small_model(small_config("gpt_oss"))
    model.model.norm.register_forward_hook(mix)
    with pytest.raises(
        StageError,
        match="GptOssForCausalLM gives different results for batched and single sequences, so it cannot be "
        "trained: packing makes a sequence depend on its neighbours; padding makes",
    ):
        checked(model)
    model = small_model(small_config("lfm2"))
    model.model.embedding_norm.register_forward_hook(mix)
    transformers.AttentionInterface.register("own_flash", transformers.AttentionInterface()["sdpa"])
    model.config._attn_implementation_internal = "own_flash"
    with pytest.raises(StageError, match=r"; set engine\.attention: sdpa$"):
        checked(model)


def test_an_output_that_is_not_the_models_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a plain projection of a model that divides its logits."""
    model = small_model(small_config("granite", logits_scaling=8.0))
    assert str(checked(model)) == "tree"
    model.set_attn_implementation("sdpa")
    monkeypatch.setattr("rlhf_core.models.packed.OutputHead", lambda model: model.get_output_embeddings())
    with pytest.raises(StageError, match="GraniteForCausalLM: its output cannot be computed from its hidden states"):
        checked(model)


def test_logits_are_capped_as_a_nested_config_says() -> None:
    """Gemma-3's config has a text config in it."""
    text = {**small_config("gemma3_text").to_dict(), "final_logit_softcapping": 0.5}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 16, "patch_size": 8}  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=1,
        **dict.fromkeys(("boi_token_index", "eoi_token_index", "image_token_index"), 60),
    )  # fmt: skip
    model = small_model(config)
    assert type(model).__name__ == "Gemma3ForConditionalGeneration"
    found = checked(model)
    require_right(model, found)


def test_long_sequences_do_not_change_the_positions_of_short_ones() -> None:
    """longrope: beyond 16 tokens the factors are others, and transformers asks only the longest of a forward."""
    model = small_model(small_config("phi3"))
    require_right(model, Layouts("positions", rows=True))
    require_right(model, checked(model))
    together = PolicyModel(model)
    together.layouts = TREE
    together._limit = None
    batch = pack([[5] * 40, [7, 8, 9, 10]], [[True] * 40, [True] * 4])
    alone = pack([[7, 8, 9, 10]], [[True] * 4])
    assert (together(batch)[0][-4:] - together(alone)[0]).abs().max() > 1e-3


def test_rows_of_similar_length_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "_SMALL", 0)
    batch = of_lengths(3, 40, 4, 38, 2)
    model = small_model(small_config("qwen3"))
    assert layouts._groups(model, batch, ROWS, None) == [[1, 3], [2, 0], [4]]
    assert layouts._groups(model, batch, PACKED, None) == [[0, 1, 2, 3, 4]]
    assert layouts._groups(model, batch, PACKED, 3) == [[1, 3, 2], [0, 4]]
    assert oracle_error(model, ROWS) < 1e-4


def test_sequences_that_may_be_packed_are_in_rows_where_these_cost_less() -> None:
    """A packed row of n sequences computes n times the attention that is wanted."""
    model = small_model(small_config("qwen3"))
    assert layouts._groups(model, of_lengths(400, 40, 410, 390), BOTH, None) == [[2, 0, 3], [1]]
    assert layouts._groups(model, of_lengths(7, 2, 4), BOTH, None) == [[0, 1, 2]]  # attention costs next to nothing
    model.config._attn_implementation = "flash_attention_2"
    assert layouts._groups(model, of_lengths(400, 40, 410, 390), BOTH, None) == [[0, 1, 2, 3]]


def test_ranks_agree_on_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another rank finds wrong is wrong on all."""
    agreed = iter([[True], [False], [True, False, False]])  # of sdpa, of a tree, of rows and packing
    monkeypatch.setattr(layout_check, "_on_all_ranks", lambda right, device: next(agreed))
    model = small_model(small_config("qwen3"))
    assert str(checked(model)) == "rows"
    assert model.config._attn_implementation == "sdpa"
    assert oracle_error(model, ROWS) < 1e-4
