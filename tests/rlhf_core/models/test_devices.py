"""What the CPU computes, a GPU does too: forwards in each layout, attention along a tree, log-probs in chunks, Muon.

All of it is compared with float64, or with sequences alone. `pytest -m gpu` on a machine with an NVIDIA GPU, of which
only torch and transformers are asked.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.architectures import accepted, oracle_error
from benchmarks.small_models import small_config, small_model
from rlhf_core.models.logprobs import chunked_logprobs
from rlhf_core.models.packed import PolicyModel
from rlhf_core.training.muon import orthogonalize

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
EACH = pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=pytest.mark.gpu)], ids=str)


@EACH
@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text", "mixtral", "gemma2", "lfm2", "gpt_oss"])
def test_every_accepted_layout_is_that_of_sequences_alone(model_type: str, device: torch.device) -> None:
    """Kernels differ between devices, and so does what the check at load accepts."""
    model = small_model(small_config(model_type)).to(device)
    policy = PolicyModel(model)
    policy.check_layouts(device)
    layouts = accepted(policy.layouts)
    assert layouts
    for layout in layouts:
        assert oracle_error(model, layout) < 1e-4, layout


@EACH
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


@EACH
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)], ids=str)
@pytest.mark.parametrize("shape", [(64, 64), (96, 40), (40, 96)], ids=str)
def test_muon_makes_a_matrix_as_orthogonal_as_float64_does(
    shape: tuple[int, int], dtype: torch.dtype, most: float, device: torch.device
) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted = orthogonalize(matrix, 5, torch.float64)
    found = orthogonalize(matrix.to(device, torch.float32), 5, dtype).cpu()
    assert (found - wanted).norm() < most * wanted.norm()
