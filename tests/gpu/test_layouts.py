"""Forwards and backwards of each layout of sequences, of checkpointed and of compiled layers, against float64."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from benchmarks.architectures import accepted, oracle_error, ragged_batch
from benchmarks.small_models import small_config, small_model
from rlhf_core.config.engines.training import GradientCheckpointing
from rlhf_core.models.activation_checkpointing import checkpoint_layers
from rlhf_core.models.dropout import set_train_mode
from rlhf_core.models.flex_attention import use_flex_attention
from rlhf_core.models.layouts import TREE, Layouts
from rlhf_core.models.logprobs import chunked_logprobs
from rlhf_core.models.packed import PolicyModel
from rlhf_core.packing import pack
from rlhf_core.types import PackedBatch
from tests.gpu import float64

pytestmark = pytest.mark.endurance("benchmarks")

# Heads of 64 and 128, for which a GPU has kernels of flash attention; several groups of key heads.
CONFIGS: Mapping[str, Any] = {
    "llama": LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.1,
    ),
    "qwen3": Qwen3Config(
        vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=1, head_dim=128, initializer_range=0.1, tie_word_embeddings=True,
    ),
}  # fmt: skip
PACKED, ROWS = Layouts("positions", rows=False), Layouts(None, rows=True)


def groups() -> PackedBatch:
    """Three prompts of different lengths with completions, and one sequence that shares nothing."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> Tensor:
        return torch.randint(3, 1000, (count,), generator=generator)

    sequences, prompts = [draw(70)], [0]
    for prompt, completions in ((130, (40, 1, 65)), (31, (90, 17)), (64, (64, 64, 5, 33))):
        shared = draw(prompt)
        sequences += [torch.cat([shared, draw(length)]) for length in completions]
        prompts += [prompt] * len(completions)
    return pack(sequences, [torch.arange(len(ids)) >= max(n, 1) for ids, n in zip(sequences, prompts, strict=True)])


def built(config: Any, dtype: torch.dtype, attention: str) -> Any:
    """A model of a config of its own, since it changes it."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, attn_implementation=attention).eval()


def expected(model: Any, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of the trained tokens and the gradient of their weighted sum, of a copy in float64."""
    exact = built(model.config, torch.float64, "eager")
    exact.load_state_dict({name: tensor.double().cpu() for name, tensor in model.state_dict().items()})
    logprobs = float64.logprobs(exact, batch) * batch.loss_mask
    (logprobs * weights(batch)).sum().backward()
    return logprobs.detach(), float64.gradients(exact)


def weights(batch: PackedBatch) -> Tensor:
    return torch.linspace(-3, 3, batch.num_tokens, device=batch.input_ids.device).cos()


def computed(policy: PolicyModel, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """As `expected`."""
    policy.zero_grad()
    logprobs = policy(batch, only=batch.loss_mask)[0]
    (logprobs * weights(batch)).sum().backward()
    return logprobs.detach().cpu(), float64.gradients(policy.model)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)], ids=str)
@pytest.mark.parametrize("layouts", [TREE, PACKED, ROWS], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_and_gradient_are_those_of_float64(
    name: str, layouts: Layouts, dtype: torch.dtype, most: float, device: torch.device
) -> None:
    model = built(CONFIGS[name], dtype, "sdpa").to(device)
    policy = PolicyModel(model)
    policy.check_layouts(device)
    assert policy.layouts == TREE
    if layouts != TREE:
        model.set_attn_implementation("sdpa")
        policy.layouts = layouts
    wanted, wanted_gradient = expected(model, groups())
    found, gradient = computed(policy, groups().to(device))
    assert (found - wanted).abs().mean() < most
    assert float64.relative_error(gradient, wanted_gradient) < most


# On a CPU, where flex attention computes all scores at once, two are enough.
FLEX = [
    pytest.param(name, layouts, dtype, most, id=f"{name}-{layouts}-{dtype}",
                 marks=[] if (name, layouts) in (("llama", TREE), ("qwen3", PACKED)) and dtype == torch.float32
                 else pytest.mark.gpu)
    for name in CONFIGS for layouts in (TREE, PACKED, ROWS)
    for dtype, most in ((torch.float32, 1e-4), (torch.bfloat16, 0.1))
]  # fmt: skip


@pytest.mark.slow("on a CPU flex attention computes all scores at once")
@pytest.mark.usefixtures("flex_attention_on_cpu")
@pytest.mark.parametrize(("name", "layouts", "dtype", "most"), FLEX)
def test_flex_attention_is_that_of_float64(
    name: str, layouts: Layouts, dtype: torch.dtype, most: float, device: torch.device
) -> None:
    model = built(CONFIGS[name], dtype, "sdpa").to(device)
    use_flex_attention(model)
    policy = PolicyModel(model)
    policy.check_layouts(device)
    assert policy.layouts == TREE
    policy.layouts = layouts
    wanted, wanted_gradient = expected(model, groups())
    with torch.no_grad():
        scored = policy(groups().to(device), only=groups().loss_mask.to(device))[0].cpu()
    found, gradient = computed(policy, groups().to(device))
    assert torch.equal(scored, found), "the ratio of a policy to itself is 1"
    assert (found - wanted).abs().mean() < most
    assert float64.relative_error(gradient, wanted_gradient) < most


@pytest.mark.slow("on a CPU flex attention computes all scores at once")
@pytest.mark.usefixtures("flex_attention_on_cpu")
@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_flex_attention_has_windows_and_caps(model_type: str, device: torch.device) -> None:
    model = small_model(small_config(model_type)).to(device)
    use_flex_attention(model)
    policy = PolicyModel(model)
    policy.check_layouts(device)
    assert policy.layouts == TREE
    batch = ragged_batch(model.config.get_text_config().vocab_size)
    exact = small_model(model.config.__class__.from_dict({**model.config.to_dict(), "dtype": None})).double()
    exact.set_attn_implementation("eager")
    exact.load_state_dict({name: tensor.double().cpu() for name, tensor in model.state_dict().items()})
    with torch.no_grad():
        found = policy(batch.to(device))[0].cpu()
        assert (found - float64.logprobs(exact, batch)).abs().max() < 1e-3


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "mixtral", "lfm2", "gpt_oss", "mamba2"])
def test_every_accepted_layout_is_that_of_sequences_alone(model_type: str, device: torch.device) -> None:
    """Kernels differ between devices, and so does what the check at load accepts."""
    model = small_model(small_config(model_type)).to(device)
    policy = PolicyModel(model)
    policy.check_layouts(device)
    layouts = accepted(policy.layouts)
    assert layouts
    for layout in layouts:
        assert oracle_error(model, layout) < 1e-4, layout


def gradient_and_kept(policy: PolicyModel) -> tuple[Tensor, int]:
    """Of all weights, and how many bytes its forward has kept for that."""
    batch = ragged_batch(policy.model.config.get_text_config().vocab_size).to(policy.model.device)
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    set_train_mode(policy, dropout=False)
    policy.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        logprobs = policy(batch)[0]
    logprobs.sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]), sum(kept.values())


@pytest.mark.parametrize("kind", [True, "selective"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "gemma3_text", "mamba2"])
def test_what_is_computed_again_is_the_same(model_type: str, kind: GradientCheckpointing, device: torch.device) -> None:
    plain, checkpointed = (PolicyModel(small_model(small_config(model_type)).to(device)) for _ in range(2))
    checkpoint_layers(checkpointed.model, kind)
    plain.check_layouts(device)
    checkpointed.check_layouts(device, selective=kind == "selective")
    assert checkpointed.layouts == plain.layouts
    (expected, all_of_it), (found, kept) = gradient_and_kept(plain), gradient_and_kept(checkpointed)
    assert kept < 0.8 * all_of_it
    if device.type == "cpu":
        assert found.equal(expected)
    else:  # where sums are in the order in which threads end
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow("torch compiles layers")
def test_compiled_layers_are_those_of_float64(device: torch.device) -> None:
    model = built(CONFIGS["llama"], torch.bfloat16, "sdpa").to(device)
    policy = PolicyModel(model)
    policy.check_layouts(device, compiled=True)
    batch = groups()
    wanted, wanted_gradient = expected(model, batch)
    with torch.no_grad():
        scored = policy(batch.to(device), only=batch.loss_mask.to(device))[0].cpu()
    found, gradient = computed(policy, batch.to(device))
    assert torch.equal(scored, found), "the ratio of a policy to itself is 1"
    assert (found - wanted).abs().mean() < 0.1
    assert float64.relative_error(gradient, wanted_gradient) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_log_probs_in_chunks_have_the_gradient_of_float64(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    vocabulary, temperature = 500, 0.7
    exact = nn.Linear(16, vocabulary, bias=False).to(dtype).double()
    exact_hidden, targets = torch.randn(33, 16).to(dtype).double().requires_grad_(), torch.randint(vocabulary, (33,))
    wanted = torch.log_softmax(exact(exact_hidden) / temperature, dim=-1)
    chosen, entropy = wanted.gather(-1, targets[:, None])[:, 0], -(wanted.exp() * wanted).sum(-1)
    expected = torch.autograd.grad((chosen + 0.3 * entropy).sum(), [exact_hidden, exact.weight])
    head = nn.Linear(16, vocabulary, bias=False).to(device, dtype)
    head.load_state_dict(exact.state_dict())
    hidden = exact_hidden.detach().to(device, dtype).requires_grad_()
    found, found_entropy = chunked_logprobs(
        head, hidden, targets.to(device), vocabulary=vocabulary, temperature=temperature, with_entropy=True,
        chunk_elements=8 * vocabulary,
    )  # fmt: skip
    assert found_entropy is not None
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert (found.cpu() - chosen).abs().max() < tolerance * chosen.abs().max()
    gradients = torch.autograd.grad((found + 0.3 * found_entropy).sum(), [hidden, head.weight])
    for gradient, wanted_gradient in zip(gradients, expected, strict=True):
        assert (gradient.cpu() - wanted_gradient).norm() < tolerance * wanted_gradient.norm()
