"""Real Ray actors, real gloo, real DeepSpeed: two ranks compute what one rank computes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
import torch.distributed as dist
from ray.cloudpickle import register_pickle_by_value
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.actors.placement import reserve, worker_bundles
from rlhf_core.actors.worker_group import RayWorkerGroup
from rlhf_core.config.training import EngineConfig, LoraConfig, OptimizerConfig, Placement
from rlhf_core.errors import RewardError, StageError
from rlhf_core.models.loading import load_causal_model, save_model
from rlhf_core.models.packed import PolicyModel
from rlhf_core.training.deepspeed_engine import DeepSpeedEngine
from rlhf_core.training.packing import filler, pack, plan_micro_batches, select
from rlhf_core.types import PackedBatch

pytestmark = pytest.mark.usefixtures("ray_cluster")
register_pickle_by_value(sys.modules[__name__])  # the actors cannot import a test module

TWO = Placement(workers=2, cpus_per_worker=1.0)


class Worker:
    """What the tests ask of a rank."""

    def __init__(self, offset: int = 0, fail_at_start: int | None = None) -> None:
        self.rank = dist.get_rank()
        self.offset = offset
        if fail_at_start == self.rank:
            raise ValueError("cannot be built")

    def identity(self) -> tuple[int, int, int, str]:
        return self.rank, dist.get_world_size(), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

    def add(self, shard: int, extra: int) -> int:
        total = torch.tensor(shard + extra + self.offset)
        dist.all_reduce(total)
        return int(total)

    def count(self, until: int) -> Iterator[int]:
        for i in range(until):
            dist.barrier()
            yield 10 * i + self.rank

    def count_slowly(self) -> Iterator[float]:
        yield time.time()
        time.sleep(2)
        yield time.time()

    def die(self, rank: int) -> None:
        if self.rank == rank:
            os._exit(7)
        dist.barrier()

    def refuse(self, rank: int) -> None:
        if self.rank == rank:
            raise RewardError("reward.py returned 3 values for 4 completions")
        dist.barrier()

    def break_stream(self, rank: int) -> Iterator[int]:
        yield 1
        if self.rank == rank:
            raise KeyError("margin")
        dist.barrier()
        yield 2

    def hang(self, rank: int) -> None:
        if self.rank == rank:
            time.sleep(600)


@pytest.fixture(scope="module")
def group(ray_cluster: None) -> Iterator[RayWorkerGroup]:
    started = RayWorkerGroup(Placement(workers=2, cpus_per_worker=0.5, threads=3), Worker, 100)
    yield started
    started.shutdown()


def test_each_rank_knows_its_place_and_its_threads(group: RayWorkerGroup) -> None:
    assert group.size == 2
    assert group.call("identity") == [(0, 2, 3, "3"), (1, 2, 3, "3")]


def test_scatter_gives_each_rank_its_shard_and_all_the_rest(group: RayWorkerGroup) -> None:
    assert group.scatter("add", [1, 2], 1000) == [2203, 2203]
    with pytest.raises(ValueError, match="add: 3 shards for 2 ranks"):
        group.scatter("add", [1, 2, 3], 0)


def test_stream_yields_the_items_of_rank_0_while_both_ranks_run(group: RayWorkerGroup) -> None:
    assert list(group.stream("count", 3)) == [0, 10, 20]
    assert list(group.stream("count", 0)) == []


def test_stream_is_live(group: RayWorkerGroup) -> None:
    lags = [time.time() - sent for sent in group.stream("count_slowly")]
    assert max(lags) < 1.5


@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        ("die", StageError, "^rank 1 died in die: "),
        ("refuse", RewardError, "^rank 1: reward.py returned 3 values for 4 completions$"),
    ],
)
def test_a_failing_rank_is_named_with_its_cause(method: str, error: type[Exception], message: str) -> None:
    group = RayWorkerGroup(Placement(workers=2, cpus_per_worker=0.5), Worker)
    try:
        with pytest.raises(error, match=message):
            group.call(method, 1)
    finally:
        group.shutdown()


def test_a_failing_stream_names_the_rank_though_rank_0_hangs() -> None:
    group = RayWorkerGroup(Placement(workers=2, cpus_per_worker=0.5), Worker)
    try:
        items = group.stream("break_stream", 1)
        assert next(items) == 1
        with pytest.raises(StageError, match="^rank 1 failed in break_stream: KeyError: 'margin'"):
            list(items)
    finally:
        group.shutdown()


def test_a_hanging_rank_is_named() -> None:
    group = RayWorkerGroup(Placement(workers=2, cpus_per_worker=0.5), Worker, timeout=2)
    try:
        with pytest.raises(StageError, match="^hang: ranks 1 have not answered within 2 s$"):
            group.call("hang", 1)
    finally:
        group.shutdown()


def test_a_worker_that_cannot_be_built_gives_everything_back() -> None:
    with pytest.raises(StageError, match="^rank 1 failed in start: ValueError: cannot be built"):
        RayWorkerGroup(Placement(workers=2, cpus_per_worker=1.5), Worker, 0, 1)
    with reserve([{"CPU": 3.0}], timeout=30):
        pass


def test_more_than_the_cluster_has_is_refused_at_once() -> None:
    with pytest.raises(StageError, match="^asked Ray for 18 CPUs, the whole cluster has 4 CPUs"):
        RayWorkerGroup(Placement(workers=2, cpus_per_worker=9.0), Worker)


def test_a_busy_cluster_is_reported_after_the_timeout() -> None:
    with (
        reserve([{"CPU": 2.0}], timeout=30),
        pytest.raises(StageError, match=r"^asked Ray for 3 CPUs in 1 bundles and waited 1 s; free are .* of 4 CPUs"),
        reserve([{"CPU": 3.0}], timeout=1),
    ):
        pass


def test_ranks_run_in_the_bundles_they_are_given() -> None:
    with reserve([{"CPU": 0.5}, *worker_bundles(Placement(workers=1))], timeout=30) as reserved:
        group = RayWorkerGroup(Placement(workers=1), Worker, placement_group=reserved, first_bundle=1)
        assert group.call("identity") == [(0, 1, 1, "1")]
        group.shutdown()
    assert ray.cluster_resources()["CPU"] == 4


# --- training on two ranks -------------------------------------------------------------------------------------------

SEQUENCES = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7], [9, 3], [2, 3, 8, 4], [6, 2, 6, 4, 3, 3, 8]]


def whole_batch() -> PackedBatch:
    return pack(SEQUENCES, [[i > 0 for i in range(len(s))] for s in SEQUENCES])


class Trainer:
    """Two optimizer steps on a small Llama, whose settings a test varies."""

    def __init__(self, folder: Path, engine: EngineConfig, lora: LoraConfig | None = None) -> None:
        self.folder = folder
        model = load_causal_model(
            folder, dtype=torch.float32, attention="sdpa", lora=lora, gradient_checkpointing=engine.gradient_checkpointing
        )
        wrapped = PolicyModel(model, chunk_elements=200)  # several chunks of the head, more on one rank than on another
        optimizer = OptimizerConfig(learning_rate=0.01, weight_decay=0.1, max_gradient_norm=1.5)
        self.engine = DeepSpeedEngine(wrapped, engine=engine, optimizer=optimizer, total_steps=10)

    def train(self, shards: list[list[PackedBatch]], tokens: int) -> tuple[list[dict[str, float]], dict[str, Tensor] | None]:
        shard = shards[dist.get_rank()]

        def loss(model: nn.Module, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
            logprobs, entropy = model(batch, with_entropy=True)
            value = -((logprobs + 0.1 * entropy) * batch.loss_mask).sum() / tokens
            return value, {"loss": value, "tokens": batch.loss_mask.sum()}

        metrics = [self.engine.step(shard, loss) for _ in range(2)]
        return metrics, self.engine.full_state_dict()

    def save(self, folder: Path) -> None:
        state = self.engine.full_state_dict()
        if state is not None:
            save_model(self.engine.module.model, state, folder, None)

    def unequal(self, batch: PackedBatch) -> None:
        self.engine.forward([batch] * (1 + dist.get_rank()), lambda model, b: model(b)[0])


def shards_of(ranks: int, tokens_per_micro_batch: int) -> list[list[PackedBatch]]:
    batch = whole_batch()
    lengths = batch.sequence_lengths.tolist()
    plan = plan_micro_batches(lengths, ranks=ranks, tokens_per_micro_batch=tokens_per_micro_batch)
    return [[select(batch, part) if part else filler(batch) for part in rank] for rank in plan]


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


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_train_what_one_trains(model_folder: Path, tmp_path: Path, stage: int, checkpointing: bool) -> None:
    expected_metrics, expected = reference_steps(model_folder)
    engine = EngineConfig(dtype="float32", zero_stage=stage, gradient_checkpointing=checkpointing)
    group = RayWorkerGroup(TWO, Trainer, model_folder, engine)
    try:
        tokens = whole_batch().num_trained_tokens
        (metrics, weights), (_, nothing) = group.call("train", shards_of(2, 12), tokens)
        assert nothing is None
        with pytest.raises(StageError, match="ranks have 1 to 2 micro-batches"):
            group.call("unequal", whole_batch())
        group.call("save", tmp_path)
    finally:
        group.shutdown()
    for got, wanted in zip(metrics, expected_metrics, strict=True):
        assert got == pytest.approx(wanted, rel=1e-5)
    assert set(weights) == set(expected)
    for name, wanted_weight in expected.items():
        torch.testing.assert_close(weights[name], wanted_weight, rtol=1e-5, atol=1e-6)
    saved = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, tensor in saved.named_parameters():
        assert torch.equal(tensor, weights[name])


def reference_steps(folder: Path) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """The same two steps in plain torch, a sequence at a time, without any of our code."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    tokens = sum(len(s) - 1 for s in SEQUENCES)
    metrics = []
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
        rate = 0.01 if step == 0 else 0.01  # total 10 steps: one warm-up step, then the cosine starts at its top
        for parameters in optimizer.param_groups:
            parameters["lr"] = rate
        optimizer.step()
        metrics.append(
            {"loss": loss.item(), "tokens": float(tokens), "gradient_norm": norm.item(), "learning_rate": rate}
        )
    return metrics, {name: p.detach() for name, p in model.named_parameters()}
