"""The code of ranks that share tokens, weights or a model as it is read, with one rank: it equals that without."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.models.adapters import base_model
from rlhf_core.models.folders.tensor_plan import COLUMN, ROW
from rlhf_core.models.layouts import CUT_TREE, TREE
from rlhf_core.models.loading import load_causal_model
from rlhf_core.models.packed import PolicyModel
from rlhf_core.models.sequence_parallel import CutTree
from rlhf_core.models.token_tree import TokenTree
from rlhf_core.models.tree_attention import _attend
from rlhf_core.training.build import sharding
from rlhf_core.training.deepspeed_engine import DeepSpeedEngine
from rlhf_core.training.deepspeed_settings import import_deepspeed
from rlhf_core.training.deepspeed_tensor import SharedLayers
from rlhf_core.training.distributed import join_group
from tests.gpu import float64
from tests.gpu.test_layouts import CONFIGS, built, computed, groups
from tests.rlhf_core.training.tiny_engine import OPTIMIZER, batch, loss, tiny_model, weights_of

pytestmark = pytest.mark.endurance("benchmarks")

MOST = 1e-5  # relative, of sums in another order


@pytest.fixture(autouse=True)
def alone() -> None:
    join_group(rank=0, size=1)


def policy(device: torch.device) -> PolicyModel:
    return PolicyModel(built(CONFIGS["llama"], torch.float32, "sdpa").to(device))


def checked(model: PolicyModel, device: torch.device) -> PolicyModel:
    model.check_layouts(device)
    assert model.layouts == TREE
    return model


def require_equal(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert (found[0] - expected[0]).abs().max() < MOST * expected[0].abs().max()
    assert float64.relative_error(found[1], expected[1]) < MOST


def test_a_rank_that_has_all_tokens_computes_the_same(device: torch.device) -> None:
    model = checked(policy(device), device)
    expected = computed(model, groups().to(device))
    model.layouts = CUT_TREE
    require_equal(computed(model, groups().to(device)), expected)


@pytest.mark.parametrize("way", ["_by_heads", "_by_queries"])
def test_attention_of_all_tokens_is_that_of_the_row(way: str, device: torch.device) -> None:
    tree = TokenTree.of(groups().to(device))
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(1, heads, len(tree.kept), 16, generator=generator).to(device) for heads in (4, 2, 2)]
    states = [state.requires_grad_() for state in states]
    attend = partial(_attend, dropout=0.0, scaling=None, window=None)
    results = [attend(*states, tree.plan), getattr(CutTree(tree), way)(attend, *states)]
    weights = torch.randn(results[0].shape, generator=generator).to(device)
    gradients = [torch.autograd.grad((result * weights).sum(), states) for result in results]
    for expected, found in zip((results[0], *gradients[0]), (results[1], *gradients[1]), strict=True):
        assert (found - expected).norm() <= MOST * expected.norm()


def test_layers_that_a_rank_has_whole_compute_the_same(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed cuts nothing for one rank; its layers still make their sums over the group."""
    from deepspeed.module_inject import layers

    import_deepspeed().init_distributed(verbose=False)  # its own name of the group that is there
    model = policy(device)
    shared = SharedLayers.of(model)
    expected = computed(checked(model, device), groups().to(device))
    monkeypatch.setattr(layers, "DEEPSPEED_AUTOTP_MODE", layers.AUTOTP_MODE.TRAINING)
    kinds: dict[str, Any] = {COLUMN: layers.LinearLayer, ROW: layers.LinearAllreduce}
    replaced = 0
    for name, style in shared.styles.items():
        if style in kinds:
            parent, _, attribute = name.rpartition(".")
            layer = kinds[style](model.get_submodule(name), mp_group=dist.group.WORLD)
            setattr(model.get_submodule(parent), attribute, layer)
            replaced += 1
    assert replaced == 7 * base_model(model.model).config.num_hidden_layers
    require_equal(computed(model, groups().to(device)), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_is_divided_as_it_is_read_is_the_whole_one(tmp_path: Path, dtype: str) -> None:
    folder = tiny_model(tmp_path)
    config = EngineConfig.model_validate({"zero_stage": 3, "dtype": dtype})
    results = []
    for shared_by in (None, sharding(config)):
        model = load_causal_model(folder, dtype=getattr(torch, dtype), attention="sdpa", sharding=shared_by)
        engine = DeepSpeedEngine(PolicyModel(model), engine=config, optimizer=OPTIMIZER, total_steps=4)
        before = weights_of(engine)
        norms = [engine.step([batch()], loss).gradient_norm for _ in range(2)]
        results.append((before, norms, weights_of(engine)))
    (whole, norms, trained), (divided, same_norms, same) = results
    assert all(torch.equal(whole[name], divided[name]) for name in whole)
    assert same_norms == pytest.approx(norms, rel=MOST)
    assert float64.relative_error(same, trained) < MOST
