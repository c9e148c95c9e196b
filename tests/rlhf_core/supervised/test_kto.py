"""The step of KTO: loss and gradient are those of its sequences one by one in float64, however the step is split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.config.stages.kto import KTOConfig
from rlhf_core.contract import Input
from rlhf_core.supervised.examples import Example, Shard, divide
from rlhf_core.supervised.kto import KTOWorker, labelled_example, pack_unpaired
from rlhf_core.training.distributed import join_group
from tests.rlhf_core.laid_out import Layout, use_layout
from tests.rlhf_core.stages.supervised_runs import ENGINE, base_model, context_of
from tests.rlhf_core.training.tiny_engine import GRADIENT, gradient

pytestmark = pytest.mark.parts

BETA, GOOD, BAD = 0.4, 1.2, 0.7


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Input]:
    folder = tmp_path_factory.mktemp("models")
    join_group(rank=0, size=1)
    return {"model": base_model(folder / "policy", seed=3), "reference.model": base_model(folder / "reference")}


def examples_of(inputs: dict[str, Input], answers: Sequence[str]) -> list[Example]:
    tokenizer = load_tokenizer(inputs["model"].folder)
    rows = [
        {"id": str(i), "prompt": [{"role": "user", "content": "q" * (i + 1)}], "completion": text, "label": i % 3 == 0}
        for i, text in enumerate(answers)
    ]
    return [labelled_example(tokenizer, row) for row in rows]


@pytest.fixture(scope="module")
def examples(inputs: dict[str, Input]) -> list[Example]:
    return examples_of(inputs, ["a", "bcd", "a longer one", "ef", "g"])


def worker(folder: Path, inputs: dict[str, Input], **settings: Any) -> KTOWorker:
    config = KTOConfig.model_validate({
        "dataset": "d", "batch_size": 5, "max_length": 64, "optimizer": GRADIENT, "engine": ENGINE, "beta": BETA,
        "desirable_weight": GOOD, "undesirable_weight": BAD, "reference": {"model": "other"}, **settings,
    })  # fmt: skip
    reference = inputs["reference.model" if config.reference.model else "model"].manifest.ref
    return KTOWorker(config, context_of(folder, inputs), inputs["model"].manifest.ref, 4, reference)


def expected(inputs: dict[str, Input], examples: Sequence[Example]) -> tuple[float, float, dict[str, Tensor]]:
    """z, loss and gradient in plain torch."""
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(
            inputs[name].folder, dtype=torch.float64, attn_implementation="eager"
        )
        for name in ("model", "reference.model")
    )  # fmt: skip

    def ratio(prompt: list[int], completion: list[int]) -> Tensor:
        ids = torch.tensor([prompt + completion])
        scores = [torch.log_softmax(model(input_ids=ids).logits[0, :-1], dim=-1) for model in (policy, reference)]
        of_policy, of_reference = (score.gather(-1, ids[0, 1:, None])[len(prompt) - 1 :, 0].sum() for score in scores)
        return of_policy - of_reference.detach()

    parts = []
    for example in examples:
        length = example.masks[0].index(True)
        parts.append((example.sequences[0][:length], example.sequences[0][length:]))
    with torch.no_grad():
        others = [ratio(parts[i][0], parts[(i + 1) % len(parts)][1]) for i in range(len(parts))]
    divergence = max(0.0, torch.stack(others).mean().item())
    total = torch.zeros((), dtype=torch.float64)
    for example, (prompt, completion) in zip(examples, parts, strict=True):
        gain = BETA * (ratio(prompt, completion) - divergence)
        total = total + (GOOD * (1 - gain.sigmoid()) if example.desirable else BAD * (1 - (-gain).sigmoid()))
    total = total / len(examples)
    total.backward()
    return divergence, total.item(), {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("ranks", "tokens", "layout"), [(1, 1000, "tree"), (1, 40, "rows"), (4, 1, "tree"), (4, 1, "packed")]
)
def test_the_gradient_does_not_depend_on_the_split(
    inputs: dict[str, Input], examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    layout: Layout, ranks: int, tokens: int,
) -> None:  # fmt: skip
    use_layout(monkeypatch, layout)
    divergence, wanted_loss, wanted = expected(inputs, examples)
    assert divergence > 0.01
    shards = divide(pack_unpaired(examples, 64), ranks, tokens)
    # Gradients of ranks add up, as those of micro-batches do.
    everything = Shard(
        [batch for shard in shards for batch in shard.micro_batches], shards[0].num_tokens, shards[0].num_examples
    )
    assert ranks == 1 or any(not batch.num_trained_tokens for batch in everything.micro_batches), "no filler"
    one = worker(tmp_path, inputs)
    (metrics,) = one.train([everything])
    assert metrics.means["loss"] == pytest.approx(wanted_loss, rel=1e-5)
    assert metrics.means["kl"] == pytest.approx(divergence, rel=1e-4)
    assert metrics.means["desirable_share"] == pytest.approx(0.4)
    found = gradient(one.engine)
    assert found.keys() == wanted.keys()
    whole = torch.stack([value.norm() for value in wanted.values()]).norm()
    distance = torch.stack([(found[name] - value).norm() for name, value in wanted.items()]).norm()
    assert distance <= 1e-5 * whole


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_a_policy_that_is_its_reference_is_undecided(
    inputs: dict[str, Input], examples: list[Example], tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    one = worker(tmp_path, inputs, reference={}, lora=lora)
    (shard,) = divide(pack_unpaired(examples, 64), 1, 60)
    for measured in (one.validate(shard), one.train([shard])[0].means):
        assert measured["kl"] == measured["desirable_reward"] == measured["undesirable_reward"] == 0.0
        assert measured["loss"] == pytest.approx((2 * GOOD + 3 * BAD) / 2 / 5)


def test_the_kl_is_never_negative(inputs: dict[str, Input], examples: list[Example], tmp_path: Path) -> None:
    exchanged = {"model": inputs["reference.model"], "reference.model": inputs["model"]}
    (shard,) = divide(pack_unpaired(examples, 64), 1, 1000)
    assert worker(tmp_path / "0", inputs).validate(shard)["kl"] > 0.01
    assert worker(tmp_path / "1", exchanged).validate(shard)["kl"] == 0.0


def test_the_step_knows_the_kl_of_the_weights_that_it_starts_with(
    inputs: dict[str, Input], examples: list[Example], tmp_path: Path
) -> None:
    """Of two steps that a rank is sent together, the second has the KL of the weights after the first."""
    settings = {"optimizer": {"learning_rate": 1e-2, "warmup_share": 0.0}, "reference": {}}
    (shard,) = divide(pack_unpaired(examples, 64), 1, 1000)
    first, second = worker(tmp_path / "0", inputs, **settings).train([shard, shard])
    one = worker(tmp_path / "1", inputs, **settings)
    one.train([shard])
    assert first.means["kl"] == 0.0
    assert second.means["kl"] == one.validate(shard)["kl"]


def test_the_next_completion_follows_the_prompt_up_to_the_longest(inputs: dict[str, Input]) -> None:
    tokenizer = load_tokenizer(inputs["model"].folder)
    batch = pack_unpaired(examples_of(inputs, ["a", "bcdefgh"]), max_length=8)
    texts = [
        "".join(tokenizer.convert_ids_to_tokens(ids)) for ids in batch.input_ids.split(batch.sequence_lengths.tolist())
    ]
    assert texts == [
        "<bos><user>q<assistant>a<eos>", "<bos><user>q<assistant>bcde",
        "<bos><user>qq<assistant>bcdefgh<eos>", "<bos><user>qq<assistant>a<eos>",
    ]  # fmt: skip
    trained = [sum(mask) for mask in batch.loss_mask.split(batch.sequence_lengths.tolist())]
    assert trained == [2, 4, 8, 2]
    assert batch.desirable is not None
    assert batch.desirable.tolist() == [True, False]


def test_an_example_keeps_its_label_where_it_is_cut(examples: list[Example]) -> None:
    from rlhf_core.supervised.examples import truncated

    cut = truncated(replace(examples[2], desirable=False), 12)
    assert cut is not None
    assert (len(cut.sequences[0]), cut.desirable) == (12, False)
