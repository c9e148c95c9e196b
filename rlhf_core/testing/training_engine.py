"""The contract of a training engine on one rank: steps depend on the batch alone; state and weights round-trip."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.config.stages.trained import OptimizerConfig
from rlhf_core.errors import StageError
from rlhf_core.metrics import LossAndMetrics, Sum
from rlhf_core.models.loading import load_causal_model
from rlhf_core.models.packed import PolicyModel
from rlhf_core.packing import pack, select
from rlhf_core.training.distributed import join_group
from rlhf_core.training.engine import TrainingEngine
from rlhf_core.training.optimizers import learning_rate
from rlhf_core.training.randomness import random_state
from rlhf_core.training.state import RankState
from rlhf_core.types import PackedBatch

STEPS = 8
OPTIMIZER = OptimizerConfig(learning_rate=0.01, warmup_share=0.5, schedule="linear", max_skipped_updates=2)
_SEQUENCES = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7], [3, 2, 3]]
_TOKENS = sum(len(sequence) - 1 for sequence in _SEQUENCES)
Make = Callable[[], TrainingEngine]


class TrainingEngineContract:
    """Subclass it with `build`."""

    def build(self, model: nn.Module, optimizer: OptimizerConfig, total_steps: int) -> TrainingEngine:
        """Build the engine in float32; the process is the only rank of a group."""
        raise NotImplementedError

    @pytest.fixture
    def make(self, tmp_path: Path) -> Make:
        """Return a factory of engines of a tiny model with the same weights each time."""
        join_group(rank=0, size=1)
        torch.manual_seed(0)
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=23, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                tie_word_embeddings=True, initializer_range=0.1,
            )
        ).save_pretrained(tmp_path)  # fmt: skip

        def engine() -> TrainingEngine:
            model = load_causal_model(tmp_path, dtype=torch.float32, attention="sdpa")
            return self.build(PolicyModel(model), OPTIMIZER, STEPS)

        return engine

    def test_any_split_into_micro_batches_takes_the_same_steps(self, make: Make) -> None:
        whole, one_by_one = make(), make()
        batch = _batch()
        for _ in range(2):
            expected = whole.step([batch], _loss)
            actual = one_by_one.step([select(batch, [i]) for i in range(4)], _loss)
            assert actual.means["tokens"] == expected.means["tokens"] == _TOKENS
            assert actual.means["loss"] == pytest.approx(expected.means["loss"], rel=1e-5)
            assert actual.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-5)
        for name, weight in _weights(whole).items():
            torch.testing.assert_close(_weights(one_by_one)[name], weight, rtol=1e-5, atol=1e-5)

    def test_steps_follow_the_schedule_and_lower_the_loss(self, make: Make) -> None:
        engine = make()
        metrics = [engine.step([_batch()], _loss) for _ in range(4)]
        assert [m.learning_rate for m in metrics] == [learning_rate(OPTIMIZER, step, STEPS) for step in range(4)]
        assert metrics[3].means["loss"] < metrics[0].means["loss"]
        assert engine.counters.steps == 4

    def test_a_forward_changes_nothing(self, make: Make) -> None:
        engine = make()
        engine.step([_batch()], _loss)
        before, numbers = _weights(engine), random_state()
        first, second = engine.forward([_batch(), select(_batch(), [1])], lambda model, part: model(part)[0])
        assert not first.requires_grad
        torch.testing.assert_close(first[_batch().sequence_lengths[0] :][: len(second)], second, rtol=0, atol=1e-5)
        measured = engine.measure([_batch()], lambda model, part: _loss(model, part)[1])
        assert measured["loss"] == pytest.approx(float(-(first * _batch().loss_mask).sum() / _TOKENS), rel=1e-5)
        _require_equal(_weights(engine), before)
        _require_equal(random_state(), numbers)

    def test_an_update_that_is_not_finite_is_skipped(self, make: Make) -> None:
        engine = make()
        engine.step([_batch()], _loss)
        before = _state(engine)
        assert engine.step([_batch()], partial(_loss, scale=math.inf)).skipped
        assert (engine.counters.steps, engine.counters.skipped_updates) == (2, 1)
        after = _state(engine)
        _require_equal(*({n: t for n, t in state.items() if n != "counters"} for state in (after, before)))
        with pytest.raises(StageError, match="2 updates in a row were skipped"):
            engine.step([_batch()], partial(_loss, scale=math.inf))

    def test_a_restored_engine_takes_the_steps_of_the_one_that_was_kept(self, make: Make) -> None:
        kept, restored = make(), make()
        kept.step([_batch()], _loss)
        kept.step([_batch()], _loss)
        state = kept.state()
        through_bytes = RankState(load(save(_contiguous(state.shared))), load(save(_contiguous(state.own))))
        expected = [kept.step([_batch()], _loss) for _ in range(2)]
        restored.load_state(through_bytes)
        assert [restored.step([_batch()], _loss) for _ in range(2)] == expected
        _require_equal(_state(restored), _state(kept))

    def test_weights_by_name_and_others_in_their_place(self, make: Make) -> None:
        engine = make()
        layout = {name: (tensor.shape, tensor.dtype) for name, tensor in engine.weight_layout().items()}
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in engine.weights()} == layout
        masters = {name: weight.clone() for name, weight in engine.master_weights()}
        before = _weights(engine)
        assert masters.keys() == before.keys()
        assert {weight.dtype for weight in masters.values()} == {torch.float32}
        _require_equal(masters, before)
        zeros = {name: torch.zeros_like(weight) for name, weight in masters.items()}
        with engine.replaced(zeros.items()):
            _require_equal(_weights(engine), zeros)
        _require_equal(_weights(engine), before)

    def test_what_is_offloaded_comes_back(self, make: Make) -> None:
        plain, lent = make(), make()
        for engine in (plain, lent):
            engine.step([_batch()], _loss)
        lent.offload()
        lent.reload()
        assert lent.step([_batch()], _loss) == plain.step([_batch()], _loss)
        _require_equal(_weights(lent), _weights(plain))

    def test_no_micro_batches_is_an_error(self, make: Make) -> None:
        with pytest.raises(StageError, match="no micro-batches"):
            make().step([], _loss)


def _batch() -> PackedBatch:
    return pack(_SEQUENCES, [[i > 0 for i in range(len(sequence))] for sequence in _SEQUENCES])


def _loss(model: nn.Module, part: PackedBatch, scale: float = 1.0) -> LossAndMetrics:
    value = -(model(part)[0] * part.loss_mask).sum() / _TOKENS * scale
    return value, {"loss": Sum(value.detach()), "tokens": Sum(part.loss_mask.sum())}


def _weights(engine: TrainingEngine) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in engine.weights()}


def _state(engine: TrainingEngine) -> dict[str, Tensor]:
    state = engine.state()
    return {name: tensor.clone() for name, tensor in {**state.shared, **state.own}.items()}


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _require_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []
