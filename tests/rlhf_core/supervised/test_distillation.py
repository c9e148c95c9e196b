"""The step of distillation: loss and gradient are those of its sequences one by one in float64, however it is split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.config.stages.distillation import DistillationConfig
from rlhf_core.contract import Input
from rlhf_core.models.distillation import StudentModel
from rlhf_core.supervised.distillation import DistillationWorker
from rlhf_core.supervised.examples import Example, Shard, divide
from rlhf_core.supervised.sft import conversation_examples, pack_sequences
from rlhf_core.training.distributed import join_group
from tests.rlhf_core.laid_out import Layout, use_layout
from tests.rlhf_core.stages.supervised_runs import ENGINE, base_model, context_of, conversations
from tests.rlhf_core.training.tiny_engine import GRADIENT, gradient

pytestmark = pytest.mark.parts

TEMPERATURE, CROSS_ENTROPY, WEIGHT = 1.7, 0.3, 0.8
DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": lambda p, q: (p * (p.log() - q.log())).sum(-1),
    "reverse_kl": lambda p, q: (q * (q.log() - p.log())).sum(-1),
}


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    mixture = WEIGHT * p + (1 - WEIGHT) * q
    forward = DIVERGENCES["forward_kl"]
    return WEIGHT * forward(p, mixture) + (1 - WEIGHT) * forward(q, mixture)


DIVERGENCES["jensen_shannon"] = jensen_shannon


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Input]:
    folder = tmp_path_factory.mktemp("models")
    join_group(rank=0, size=1)
    return {
        "model": base_model(folder / "student"),
        "teacher.model": base_model(folder / "teacher", seed=1, hidden=48, tied=False),
    }


@pytest.fixture(scope="module")
def examples(inputs: dict[str, Input]) -> list[Example]:
    tokenizer = load_tokenizer(inputs["model"].folder)
    rows = [{"id": str(i), **row} for i, row in enumerate(conversations(5))]
    return [example for row in rows for example in conversation_examples(tokenizer, row)]


def worker(folder: Path, inputs: dict[str, Input], **settings: Any) -> DistillationWorker:
    config = DistillationConfig.model_validate({
        "dataset": "d", "batch_size": 5, "max_length": 64, "optimizer": GRADIENT, "engine": ENGINE,
        "teacher": {"model": "other"}, "temperature": TEMPERATURE, "cross_entropy_coefficient": CROSS_ENTROPY,
        **settings,
    })  # fmt: skip
    refs = {name: given.manifest.ref for name, given in inputs.items()}
    return DistillationWorker(
        config, context_of(folder, inputs), refs["model"], 4, refs["teacher.model"], config.temperature
    )


def expected(
    inputs: dict[str, Input], examples: Sequence[Example], divergence: Callable[[Tensor, Tensor], Tensor]
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics and gradient in plain torch."""
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(inputs[name].folder, dtype=torch.float64, attn_implementation="eager")
        for name in ("model", "teacher.model")
    )
    divergences, entropies = [], []
    for example in examples:
        ids = torch.tensor(example.sequences)
        trained = torch.tensor(example.masks[0][1:])
        ours, theirs = (model(input_ids=ids).logits[0, :-1][trained] for model in (student, teacher))
        both = ((logits / TEMPERATURE).softmax(-1) for logits in (theirs.detach(), ours))
        divergences.append(divergence(*both))
        entropies.append(functional.cross_entropy(ours, ids[0, 1:][trained], reduction="none"))
    means = {"divergence": torch.cat(divergences).mean(), "cross_entropy": torch.cat(entropies).mean()}
    means["loss"] = TEMPERATURE**2 * means["divergence"] + CROSS_ENTROPY * means["cross_entropy"]
    means["loss"].backward()
    found = {name: p.grad for name, p in student.named_parameters() if p.grad is not None}
    return {name: value.item() for name, value in means.items()}, found


@pytest.mark.parametrize(
    ("divergence", "ranks", "tokens", "layout"),
    [
        ("forward_kl", 1, 1000, "tree"), ("forward_kl", 4, 1, "rows"), ("forward_kl", 6, 1, "packed"),
        ("reverse_kl", 1, 20, "rows"), ("jensen_shannon", 1, 20, "tree"),
    ],
)  # fmt: skip
def test_the_gradient_does_not_depend_on_the_split(
    inputs: dict[str, Input], examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    divergence: str, ranks: int, tokens: int, layout: Layout,
) -> None:  # fmt: skip
    use_layout(monkeypatch, layout)
    monkeypatch.setattr(DistillationWorker, "wrapper", partial(StudentModel, chunk_elements=200))
    wanted_means, wanted = expected(inputs, examples, DIVERGENCES[divergence])
    shards = divide(pack_sequences(examples), ranks, tokens)
    # Gradients of ranks add up, as those of micro-batches do.
    everything = Shard(
        [batch for shard in shards for batch in shard.micro_batches], shards[0].num_tokens, shards[0].num_examples
    )
    assert ranks < 6 or any(not batch.num_trained_tokens for batch in everything.micro_batches), "no filler"
    mixture = {"teacher_weight": WEIGHT} if divergence == "jensen_shannon" else {}
    one = worker(tmp_path, inputs, divergence=divergence, **mixture)
    (metrics,) = one.train([everything])
    for name, value in wanted_means.items():
        assert metrics.means[name] == pytest.approx(value, rel=1e-5)
    found = gradient(one.engine)
    assert found.keys() == wanted.keys()
    whole = torch.stack([value.norm() for value in wanted.values()]).norm()
    distance = torch.stack([(found[name] - value).norm() for name, value in wanted.items()]).norm()
    assert distance <= 1e-5 * whole


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_student_that_is_its_teacher_has_nothing_to_learn(
    inputs: dict[str, Input], examples: list[Example], tmp_path: Path, divergence: str
) -> None:
    same = {"model": inputs["model"], "teacher.model": inputs["model"]}
    one = worker(tmp_path, same, divergence=divergence, cross_entropy_coefficient=0.0)
    (shard,) = divide(pack_sequences(examples), 1, 40)
    assert one.validate(shard)["loss"] == 0.0
    (metrics,) = one.train([shard])
    assert (metrics.means["loss"], metrics.gradient_norm) == (0.0, 0.0)
