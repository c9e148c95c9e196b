"""Real Ray actors, real gloo, real DeepSpeed: two ranks compute what one rank computes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_optimizer_state
from peft import PeftModel, get_peft_model_state_dict
from ray.cloudpickle import register_pickle_by_value
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.actors.worker_group import RayWorkerGroup
from rlhf_core.config.engines.placement import Placement
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.stages.trained import LoraConfig, OptimizerConfig
from rlhf_core.division import Division
from rlhf_core.errors import StageError
from rlhf_core.metrics import LossAndMetrics, Sum
from rlhf_core.models.loading import load_causal_model, torch_dtype
from rlhf_core.models.packed import PolicyModel
from rlhf_core.packing import pack
from rlhf_core.training.deepspeed_engine import DeepSpeedEngine
from rlhf_core.training.metrics import over_steps
from rlhf_core.training.saving import write_model
from rlhf_core.types import PackedBatch

pytestmark = [pytest.mark.endurance("rl-matrix"), pytest.mark.usefixtures("ray_cluster")]
register_pickle_by_value(sys.modules[__name__])  # the actors cannot import a test module

Result = tuple[list[dict[str, float]], dict[str, Tensor], dict[str, Tensor] | None]
SEQUENCES = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7], [9, 3], [2, 3, 8, 4], [6, 2, 6, 4, 3, 3, 8]]


def whole_batch() -> PackedBatch:
    return pack(SEQUENCES, [[i > 0 for i in range(len(s))] for s in SEQUENCES])


class Trainer:
    """Two optimizer steps on a small Llama, whose settings a test varies."""

    def build(self, folder: Path, engine: EngineConfig, lora: LoraConfig | None) -> None:
        torch.manual_seed(0)
        model = load_causal_model(
            folder,
            dtype=torch_dtype(engine.dtype),
            attention="sdpa",
            lora=lora,
            gradient_checkpointing=engine.gradient_checkpointing,
        )
        wrapped = PolicyModel(model, chunk_elements=200)  # several chunks of the head, more on one rank than on another
        optimizer = OptimizerConfig(learning_rate=0.01, weight_decay=0.1, max_gradient_norm=1.5)
        self.engine = DeepSpeedEngine(wrapped, engine=engine, optimizer=optimizer, total_steps=10)

    def train(self, shards: list[list[PackedBatch]], tokens: int) -> Result:
        """Metrics of both steps; the weights; and the first step's gradient, which is AdamW's first moment over 0.1."""
        shard = shards[dist.get_rank()]

        def loss(model: nn.Module, batch: PackedBatch) -> LossAndMetrics:
            logprobs, entropy, _ = model(batch, with_entropy=True)
            value = -((logprobs + 0.1 * entropy) * batch.loss_mask).sum() / tokens
            return value, {"loss": Sum(value), "tokens": Sum(batch.loss_mask.sum())}

        metrics = [over_steps([self.engine.step(shard, loss)])]
        named = [(name, p) for name, p in self.engine.module.model.named_parameters() if p.requires_grad]
        gradient = {name: self.first_moment(p) / 0.1 for name, p in named}
        metrics.append(over_steps([self.engine.step(shard, loss)]))
        weights = {name: tensor.detach().cpu().clone() for name, tensor in self.engine.weights()}
        return metrics, gradient, weights if dist.get_rank() == 0 else None

    def first_moment(self, parameter: nn.Parameter) -> Tensor:
        optimizer = self.engine._engine.optimizer
        if isinstance(optimizer, torch.optim.AdamW):
            plain: Tensor = optimizer.state[parameter]["exp_avg"]
            return plain.clone()
        if hasattr(optimizer, "_hp_optimizer_states_linked"):
            # DeepSpeed links them while its first step has reached only the first parameter group.
            optimizer._hp_optimizer_states_linked = False
            optimizer._lazy_init_hp_params_optimizer_state()
        sharded: Tensor = safe_get_full_optimizer_state(parameter, "exp_avg")
        return sharded.reshape(getattr(parameter, "ds_shape", parameter.shape)).clone()

    def save(self, folder: Path) -> None:
        write_model(self.engine, folder, None)

    def unequal(self, batch: PackedBatch) -> None:
        self.engine.forward([batch] * (1 + dist.get_rank()), lambda model, b: model(b)[0])


def shards_of(ranks: int, tokens_per_micro_batch: int) -> list[list[PackedBatch]]:
    return Division.of(whole_batch(), replicas=ranks, tokens_per_micro_batch=tokens_per_micro_batch).split()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=29, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=True, initializer_range=0.1,
        )
    ).save_pretrained(folder)  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def trainers(ray_cluster: None) -> Iterator[RayWorkerGroup[Trainer]]:
    started = RayWorkerGroup(Placement(workers=2), Trainer, timeout=40)
    yield started
    started.shutdown()


@pytest.mark.parametrize(
    ("stage", "tokens_per_micro_batch", "checkpointing"),
    [(0, 12, False), (1, 12, False), (2, 1000, False), (3, 12, True), (3, 1000, False)],
)
def test_two_ranks_train_what_plain_torch_trains(
    model_folder: Path, trainers: RayWorkerGroup[Trainer], tmp_path: Path, stage: int, checkpointing: bool,
    tokens_per_micro_batch: int,
) -> None:  # fmt: skip
    expected_metrics, expected_gradient, expected = reference_steps(model_folder)
    engine = EngineConfig(dtype="float32", zero_stage=stage, gradient_checkpointing=checkpointing)
    trainers.call(Trainer.build, model_folder, engine, None)
    shards = shards_of(2, tokens_per_micro_batch)
    assert (len(shards[0]) > 1) == (tokens_per_micro_batch == 12)
    (metrics, gradient, weights), (_, _, nothing) = trainers.call(
        Trainer.train, shards, whole_batch().num_trained_tokens
    )
    assert nothing is None
    for got, wanted in zip(metrics, expected_metrics, strict=True):
        assert got == pytest.approx(wanted, rel=1e-5)
    assert set(weights) == set(gradient) == set(expected)
    for name, wanted_weight in expected.items():
        scale = float(expected_gradient[name].abs().max())
        torch.testing.assert_close(gradient[name], expected_gradient[name], rtol=1e-5, atol=1e-5 * scale)
        # AdamW divides by the gradient's own size, which magnifies the rounding of the smallest ones.
        torch.testing.assert_close(weights[name], wanted_weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_in_bfloat16_are_near_plain_float32(
    model_folder: Path, trainers: RayWorkerGroup[Trainer], stage: int
) -> None:
    expected_metrics, expected_gradient, _ = reference_steps(model_folder)
    trainers.call(Trainer.build, model_folder, EngineConfig(dtype="bfloat16", zero_stage=stage), None)
    (metrics, gradient, weights), _ = trainers.call(Trainer.train, shards_of(2, 12), whole_batch().num_trained_tokens)
    for got, wanted in zip(metrics, expected_metrics, strict=True):
        assert got == pytest.approx(wanted, rel=0.02)
    for name, wanted_gradient in expected_gradient.items():
        assert weights[name].dtype == torch.bfloat16
        assert gradient[name].dtype == torch.float32
        assert (gradient[name] - wanted_gradient).norm() < 0.03 * wanted_gradient.norm()


def test_a_sharded_model_is_saved_whole(model_folder: Path, trainers: RayWorkerGroup[Trainer], tmp_path: Path) -> None:
    trainers.call(Trainer.build, model_folder, EngineConfig(dtype="float32", zero_stage=3), None)
    (_, _, weights), _ = trainers.call(Trainer.train, shards_of(2, 1000), whole_batch().num_trained_tokens)
    trainers.call(Trainer.save, tmp_path)
    saved = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert {name for name, _ in saved.named_parameters()} == set(weights)
    for name, tensor in saved.named_parameters():
        assert torch.equal(tensor, weights[name])


def test_an_adapter_is_trained_and_saved_alone(
    model_folder: Path, trainers: RayWorkerGroup[Trainer], tmp_path: Path
) -> None:
    results = []
    for stage in (2, 3):
        trainers.call(Trainer.build, model_folder, EngineConfig(dtype="float32", zero_stage=stage), LoraConfig(rank=2))
        (metrics, _, weights), _ = trainers.call(Trainer.train, shards_of(2, 12), whole_batch().num_trained_tokens)
        results.append((metrics, weights))
    (metrics_2, weights_2), (metrics_3, weights_3) = results
    assert metrics_2[1] == pytest.approx(metrics_3[1], rel=1e-5)
    assert metrics_2[1]["loss"] < metrics_2[0]["loss"]
    assert set(weights_2) == set(weights_3)
    assert len(weights_2) == 2 * 2 * 7
    assert "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight" in weights_2
    for name, tensor in weights_2.items():
        torch.testing.assert_close(tensor, weights_3[name], rtol=1e-5, atol=1e-5)
    trainers.call(Trainer.save, tmp_path)
    adapted = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(model_folder), str(tmp_path))
    for name, tensor in get_peft_model_state_dict(adapted).items():
        assert torch.equal(tensor, weights_3[name])


def test_ranks_with_unequal_work_are_told_instead_of_hanging(
    model_folder: Path, trainers: RayWorkerGroup[Trainer]
) -> None:
    trainers.call(Trainer.build, model_folder, EngineConfig(dtype="float32", zero_stage=3), None)
    with pytest.raises(StageError, match="ranks have 1 to 2 micro-batches"):
        trainers.call(Trainer.unequal, whole_batch())


def reference_steps(folder: Path) -> tuple[list[dict[str, float]], dict[str, Tensor], dict[str, Tensor]]:
    """The same two steps in plain torch, a sequence at a time, without any of our code."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    tokens = sum(len(s) - 1 for s in SEQUENCES)
    metrics = []
    gradient: dict[str, Tensor] = {}
    for step in range(2):
        optimizer.zero_grad()
        loss = torch.tensor(0.0)
        for sequence in SEQUENCES:
            ids = torch.tensor([sequence])
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1], dim=-1)
            entropy = -(logprobs.exp() * logprobs).sum(-1)
            loss = loss - (logprobs.gather(-1, ids[0, 1:, None])[:, 0] + 0.1 * entropy).sum() / tokens
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.5)
        if step == 0:
            gradient = {name: p.grad.clone() for name, p in model.named_parameters()}
        # Of ten steps the first is the warm-up, and the second is the top of the cosine: both at the full rate.
        optimizer.step()
        metrics.append({"loss": loss.item(), "tokens": float(tokens), "gradient_norm": norm.item(),
                        "learning_rate": 0.01, "skipped_updates": 0.0})  # fmt: skip
    return metrics, gradient, {name: p.detach() for name, p in model.named_parameters()}
