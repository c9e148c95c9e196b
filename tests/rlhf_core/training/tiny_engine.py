"""A tiny Llama under the engine, and a loss, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.stages.trained import LoraConfig, MuonConfig, OptimizerConfig
from rlhf_core.metrics import LossAndMetrics, Sum
from rlhf_core.models.loading import load_causal_model, torch_dtype
from rlhf_core.models.packed import PolicyModel
from rlhf_core.packing import pack
from rlhf_core.training.deepspeed_engine import DeepSpeedEngine
from rlhf_core.training.distributed import join_group
from rlhf_core.training.engine import TrainingEngine
from rlhf_core.types import PackedBatch

SEQUENCES = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7], [3, 2, 3]]
TOKENS = sum(len(sequence) - 1 for sequence in SEQUENCES)
OPTIMIZER = OptimizerConfig(learning_rate=0.01, warmup_share=0.5, schedule="linear", final_learning_rate_share=0.0)

MUON = OptimizerConfig(
    name="muon", learning_rate=0.02, weight_decay=0.1, warmup_share=0.0, schedule="constant", max_gradient_norm=0.5,
    muon=MuonConfig(adamw_learning_rate=0.01),
)  # fmt: skip
# Weights stay as they are, and AdamW's first moment is the gradient: see `gradient`.
GRADIENT = OptimizerConfig(learning_rate=1e-30, betas=(0.0, 0.95), max_gradient_norm=1e6)


def batch() -> PackedBatch:
    return pack(SEQUENCES, [[i > 0 for i in range(len(sequence))] for sequence in SEQUENCES])


def tiny_model(folder: Path, seed: int = 0) -> Path:
    """Writes the model; this process becomes the one rank of a group."""
    torch.manual_seed(seed)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=23, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            tie_word_embeddings=True, initializer_range=0.1,
        )
    ).save_pretrained(folder)  # fmt: skip
    join_group(rank=0, size=1)
    return folder


def build(
    folder: Path, *, optimizer: OptimizerConfig | None = OPTIMIZER, lora: LoraConfig | None = None, **settings: object
) -> DeepSpeedEngine:
    engine = EngineConfig.model_validate({"dtype": "float32", **settings})
    model = load_causal_model(
        folder, dtype=torch_dtype(engine.dtype), attention="sdpa", lora=lora,
        gradient_checkpointing=engine.gradient_checkpointing,
    )  # fmt: skip
    return DeepSpeedEngine(PolicyModel(model, chunk_elements=100), engine=engine, optimizer=optimizer, total_steps=4)


def loss(model: nn.Module, part: PackedBatch) -> LossAndMetrics:
    value = -(model(part)[0] * part.loss_mask).sum() / TOKENS
    return value, {"loss": Sum(value), "tokens": Sum(part.loss_mask.sum())}


def weights_of(engine: TrainingEngine) -> dict[str, Tensor]:
    """Copies of all its weights, on every rank."""
    return {name: tensor.detach().cpu().clone() for name, tensor in engine.weights()}


def gradient(engine: TrainingEngine) -> dict[str, Tensor]:
    """Of the last step, over all ranks; of an engine with the optimizer GRADIENT and without ZeRO."""
    assert isinstance(engine, DeepSpeedEngine)
    assert engine.optimizer is not None
    named = engine.module.model.named_parameters()
    return {name: engine.optimizer.state[parameter]["exp_avg"].clone() for name, parameter in named}
