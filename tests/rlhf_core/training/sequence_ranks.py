"""What tests/rlhf_core/training/test_sequence_ranks.py asks of each of the ranks that share the tokens of a batch.

The folder holds the models that `models` writes; each rank compares with what it computes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from benchmarks.small_models import small_config, small_model
from rlhf_core.algorithms import build_algorithm
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.contract import Input
from rlhf_core.errors import StageError
from rlhf_core.losses.divergence import forward_kl
from rlhf_core.mesh import Mesh, current_mesh
from rlhf_core.models.activation_checkpointing import checkpoint_layers
from rlhf_core.models.distillation import StudentModel, TeacherModel, TopModel, by_teacher
from rlhf_core.models.layouts import TREE
from rlhf_core.models.packed import PackedModel, PolicyModel
from rlhf_core.models.sequence_parallel import CutTree, _Exchanged, _group
from rlhf_core.models.token_tree import TokenTree
from rlhf_core.models.tree_attention import tree_attention
from rlhf_core.packing import pack
from rlhf_core.rl.ranks import PolicyTrainer
from rlhf_core.rl.roles import roles
from rlhf_core.rl.worker import RLWorker
from rlhf_core.supervised.scalar import RewardModel
from rlhf_core.training.distributed import join_group
from rlhf_core.training.group import InlineGroup
from rlhf_core.types import PackedBatch
from tests.rlhf_core.rl.one_rank import rl_config, trajectories, with_advantages
from tests.rlhf_core.stages.context import local_input
from tests.rlhf_core.stages.supervised_runs import context_of
from tests.rlhf_core.training.ranks import Answer, write_answers

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
# Of lengths that no number of ranks divides. In `short` some ranks have padding alone.
BATCHES = {
    "tree": [[*PROMPT, 7, 7, 8], [*PROMPT, 8, 2], [*PROMPT, 7, 9, 10, 11, 12], [2, 3, 5, 7, 11, 13, 17, 19, 21]],
    "packed": [[i, *range(2, 2 + length)] for i, length in enumerate((13, 4, 7, 1))],
    "short": [[5]],
}
HEADS = ((4, 4), (4, 2), (4, 1), (8, 2), (3, 3), (6, 1))  # of queries, and of keys
WINDOWS = (None, 3)
MODELS: dict[str, dict[str, Any]] = {
    "grouped": {"model_type": "llama"},
    "windows": {"model_type": "mistral"},
    "three heads": {"model_type": "llama", "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1},
    "experts": {"model_type": "mixtral"},
}  # fmt: skip
REFUSED = ("lfm2", "phi3", "gemma2")


def batch_of(name: str) -> PackedBatch:
    return pack(BATCHES[name], [[i % 3 > 0 for i in range(len(ids))] for ids in BATCHES[name]])


def attention(folder: Path) -> Iterator[Answer]:
    """Errors of the attention function and its gradients in float64; the tensors are transposed, as those of layers."""
    for (name, heads), window in product(product(BATCHES, HEADS), WINDOWS):
        yield f"attention {name} {heads} {window}", attention_errors(batch_of(name), heads, window), {}


def attention_errors(batch: PackedBatch, heads: tuple[int, int], window: int | None) -> dict[str, float]:
    tree = TokenTree.of(batch)
    tree = tree.padded(len(tree.kept) + -len(tree.kept) % current_mesh().sequence)
    part = CutTree(tree)
    own = slice(part.start, part.start + part.length)
    generator = torch.Generator().manual_seed(0)
    states = [
        torch.randn(1, len(tree.kept), count, size, generator=generator, dtype=torch.float64)
        for count, size in ((heads[0], 8), (heads[1], 8), (heads[1], 6))
    ]
    weights = torch.randn(1, len(tree.kept), heads[0], 6, generator=generator, dtype=torch.float64)
    call = partial(tree_attention, nn.Module(), attention_mask=None, scaling=0.3, sliding_window=window)

    def run(given: TokenTree | CutTree, places: slice) -> list[Tensor]:
        leaves = [state[:, places].clone().requires_grad_() for state in states]
        output, _ = call(*(leaf.transpose(1, 2) for leaf in leaves), token_tree=given)
        return [output.detach(), *torch.autograd.grad((output * weights[:, places]).sum(), leaves)]

    found, expected = run(part, own), run(tree, slice(None))
    errors = [float((one - all_[:, own]).abs().max()) for one, all_ in zip(found, expected, strict=True)]
    return {"output": errors[0], "gradient": float(np.max(errors[1:])), "by heads": heads[0] % part.ranks == 0}


def models(folder: Path) -> Iterator[Answer]:
    """Errors of log-probs and gradients of whole models, for all batches at once."""
    for kind, config in MODELS.items():
        experts = kind == "experts"
        dtype = torch.float32 if experts else torch.float64  # torch multiplies by experts in float32 at most
        policy = PolicyModel(small_model(small_config(**config), dtype=dtype), chunk_elements=200)
        yield f"model {kind}", errors(policy, partial(outputs, with_routing=experts)), {}
    # Fills memory that nothing has written: else a buffer that is not filled again may still have the right values.
    torch.use_deterministic_algorithms(True, warn_only=True)
    for checkpoints in (True, "selective"):
        policy = PolicyModel(small_model(small_config(**MODELS["grouped"]), dtype=torch.float64))
        checkpoint_layers(policy.model, checkpoints)
        yield f"model checkpoints {checkpoints}", errors(policy, partial(outputs, with_routing=False)), {}
    torch.use_deterministic_algorithms(False)


def outputs(model: nn.Module, batch: PackedBatch, *, with_routing: bool) -> list[Tensor]:
    logprobs, entropy, routing = model(batch, only=batch.loss_mask, with_entropy=True, with_routing=with_routing)
    return [logprobs, entropy, *([routing] if with_routing else [])]


def errors(model: PackedModel, function: Callable[[nn.Module, PackedBatch], list[Tensor]]) -> dict[str, Any]:
    """Compare the outputs of all batches, and the gradient of a sum of them, with those of this rank alone."""
    model.check_layouts(torch.device("cpu"))
    found, gradient = differentiated(model, function)
    for value in gradient:
        current_mesh().reduce(value, over="all").div_(current_mesh().size)
    chosen, model.layouts = str(model.layouts), TREE
    expected, wanted = differentiated(model, function)
    return {
        "layouts": chosen,
        "output": float(np.max([(a - b).abs().max() for a, b in zip(found, expected, strict=True)])),
        "gradient": float(
            np.max([(a - b).norm() / b.norm() for a, b in zip(gradient, wanted, strict=True) if b.norm()])
        ),
        "without": sum(bool(a.norm()) != bool(b.norm()) for a, b in zip(gradient, wanted, strict=True)),
    }


def differentiated(
    model: PackedModel, function: Callable[[nn.Module, PackedBatch], list[Tensor]]
) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = [values for name in BATCHES for values in function(model.train(), batch_of(name))]
    total = torch.stack([(values * torch.randn(values.shape, generator=generator)).sum() for values in found]).sum()
    model.zero_grad()
    total.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [values.detach() for values in found], gradients


def other_heads(folder: Path) -> Iterator[Answer]:
    """A reward model, a student of a teacher, and a teacher's most probable tokens."""
    config = small_config(**MODELS["grouped"], num_labels=1)
    scalar = AutoModelForSequenceClassification.from_config(config).double()
    yield "rewards", errors(RewardModel(scalar, language=False), lambda model, batch: [model(batch)[0]]), {}
    teacher = TeacherModel(small_model(config, dtype=torch.float64))
    teacher.check_layouts(torch.device("cpu"))
    student = StudentModel(small_model(small_config("llama", num_hidden_layers=1), dtype=torch.float64))

    def taught(model: nn.Module, batch: PackedBatch) -> list[Tensor]:
        teacher.layouts = student.layouts
        with torch.no_grad():
            target = by_teacher(forward_kl, teacher.head, teacher(batch), 2.0)
        return list(model(batch, only=batch.loss_mask, taught=target)[:2])

    yield "student", errors(student, taught), {}
    top = TopModel(small_model(config, dtype=torch.float64))
    top.check_layouts(torch.device("cpu"))
    found = []
    with torch.no_grad():
        for layouts in (top.layouts, TREE):
            top.layouts = layouts
            found.append([top(batch_of(name), k=3, temperature=0.7) for name in BATCHES])
    equal = all(
        torch.equal(a[0], b[0]) and torch.allclose(a[1], b[1], rtol=0, atol=1e-12) for a, b in zip(*found, strict=True)
    )
    yield "top", {"equal": equal, "rows": [len(tokens) for tokens, _ in found[0]]}, {}


def refused(folder: Path) -> Iterator[Answer]:
    """Models that mix tokens outside of attention, or whose positions depend on others."""
    for kind in REFUSED:
        model = PolicyModel(small_model(small_config(kind)))
        with pytest.raises(StageError) as error:
            model.check_layouts(torch.device("cpu"))
        yield f"refused {kind}", {"reason": str(error.value)}, {}


def planted(folder: Path) -> Iterator[Answer]:
    """An exchange into the layout of a transposed tensor, whose memory is filled in another order, without an error."""

    def into_the_same_strides(ctx: Any, values: Tensor, sent: list[int], received: list[int], mesh: Mesh) -> Tensor:
        ctx.sizes, ctx.mesh = (received, sent), mesh
        output = torch.empty_like(values) if sent == received else values.new_empty(sum(received), *values.shape[1:])
        dist.all_to_all_single(output, values.contiguous(), received, sent, group=_group(mesh))
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Exchanged, "forward", staticmethod(into_the_same_strides))
        with pytest.raises(StageError) as error:
            PolicyModel(small_model(small_config("llama"))).check_layouts(torch.device("cpu"))
    yield "planted", {"reason": str(error.value)}, {}


def reinforcement(folder: Path) -> Iterator[Answer]:
    """What a driver asks of the ranks: policy, reference and critic. Each rank has a driver, which asks it alone."""
    work = folder / f"work{current_mesh().rank}"
    model = local_input(folder / "policy", Kind.POLICY)
    yield "rl", rl_step(ppo(current_mesh().sequence), model, work, Ranks), {}


class Ranks(InlineGroup[RLWorker]):
    """This rank, as a group of one: the group of this process has been joined."""

    def __init__(self, factory: Callable[..., RLWorker], *arguments: Any) -> None:
        self.before = lambda method: None
        self._worker = factory(*arguments)


def ppo(ranks: int) -> RLConfig:
    engine = {"dtype": "float32", "zero_stage": 2, "tokens_per_micro_batch": 12, "sequence_parallel": ranks}
    kl = {"coefficient": 0.1, "place": "reward"}
    return rl_config("ppo", kl=kl, engine=engine, lora={"rank": 2}, placement={"workers": ranks})


def rl_step(
    config: RLConfig, model: Input, work: Path, group: Callable[..., InlineGroup[RLWorker]] = InlineGroup
) -> dict[str, Any]:
    inputs = {"model": model}
    workers = group(RLWorker, config, context_of(work, inputs), roles(config, inputs))
    ours = PolicyTrainer(config, build_algorithm(config), workers, seed=0)
    scored = ours.score(trajectories())
    metrics = [ours.update(with_advantages(config, ours, scored), step).metrics for step in range(2)]
    assert scored.values is not None
    return {"values": scored.values.tolist(), "metrics": metrics, "probe": list(ours.probe(scored))}


def main(rank: int, address: str, folder: Path, *sizes: str) -> None:
    """sizes: ranks, and of the mesh the sequence axis."""
    torch.set_num_threads(1)
    size, sequence = map(int, sizes)
    scenarios = (attention, models, other_heads, refused, planted, reinforcement)
    join_group(rank=rank, size=size, address=address, sequence=sequence)
    write_answers(rank, folder, chain.from_iterable(scenario(folder) for scenario in scenarios))
