"""Rewards that are told what to be: the step's gradient is that of its sequences one by one in float64, however it is
split; a step is trained at the token where it will be read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_core.chat.encoding import Tokenizer, encode_completion, load_tokenizer
from rlhf_core.config.rewards.rewards import ProcessRewardModelReward
from rlhf_core.config.stages.reward_models import ProcessRewardModelConfig, RewardRegressionConfig
from rlhf_core.contract import Input
from rlhf_core.data.formats.stepwise import encode_steps
from rlhf_core.errors import ConversationError
from rlhf_core.models.folders.readers import Scale
from rlhf_core.models.loading import load_scalar_model
from rlhf_core.rewards.model import ProcessModelReward, RewardReader
from rlhf_core.supervised.examples import Example, Shard, divide
from rlhf_core.supervised.targets import (
    ProcessRewardModelWorker,
    RewardRegressionWorker,
    labelled_steps,
    pack_targets,
    rewarded_completions,
)
from rlhf_core.training.distributed import join_group
from rlhf_core.types import PackedBatch, Prompt, Trajectory
from tests.rlhf_core.chat.test_steps import KINDS
from tests.rlhf_core.laid_out import Layout, use_layout
from tests.rlhf_core.stages.supervised_runs import ENGINE, base_model, context_of
from tests.rlhf_core.training.tiny_engine import GRADIENT, gradient

pytestmark = pytest.mark.parts

ASKED = [{"role": "user", "content": "q"}]
STEPWISE = [
    {"id": "a", "prompt": ASKED, "steps": ["one", "t", "three"], "labels": [1.0, 0.0, 0.25], "separator": "\n"},
    {"id": "b", "prompt": ASKED, "steps": ["a longer step than the others"], "labels": [1.0], "separator": "\n"},
    {"id": "c", "prompt": ASKED, "steps": ["x", "y"], "labels": [0.5, 0.0], "separator": "\n"},
]
REWARDED = [
    {"id": "a", "prompt": ASKED, "completions": [{"text": "one", "reward": 2.5}, {"text": "", "reward": -1.0}]},
    {"id": "b", "prompt": ASKED, "completions": [{"text": "a longer one than the others", "reward": 0.0}]},
    {"id": "c", "prompt": ASKED, "completions": [{"text": "x\ny", "reward": 4}]},
]
Loss = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Input]:
    join_group(rank=0, size=1)
    return {"model": base_model(tmp_path_factory.mktemp("model"))}


def worker(folder: Path, inputs: dict[str, Input], kind: str) -> Any:
    config, made = {
        "steps": (ProcessRewardModelConfig, ProcessRewardModelWorker),
        "completions": (RewardRegressionConfig, RewardRegressionWorker),
    }[kind]
    settings = {"dataset": "d", "batch_size": 5, "max_length": 64, "optimizer": GRADIENT, "engine": ENGINE}
    context = context_of(folder, inputs)
    return made(config.model_validate(settings), context, inputs["model"].manifest.ref, 4)


def examples_of(inputs: Mapping[str, Input], kind: str) -> list[Example]:
    tokenizer = load_tokenizer(inputs["model"].folder)
    if kind == "steps":
        return [labelled_steps(tokenizer, row) for row in STEPWISE]
    return [example for row in REWARDED for example in rewarded_completions(tokenizer, row)]


def cross_entropy(rewards: Tensor, labels: Tensor) -> Tensor:
    chance = 1 / (1 + (-rewards).exp())
    return -(labels * chance.log() + (1 - labels) * (1 - chance).log()).mean()


def squares(rewards: Tensor, targets: Tensor) -> Tensor:
    return ((rewards - targets) ** 2).mean()


def expected(inputs: Mapping[str, Input], kind: str) -> tuple[float, dict[str, Tensor]]:
    """In plain torch: each completion alone, as characters, each of which is a token."""
    model: Any = load_scalar_model(inputs["model"].folder, dtype=torch.float64, attention="eager")
    tokenizer = load_tokenizer(inputs["model"].folder)
    if kind == "steps":
        texts = [("\n".join(row["steps"]), row["labels"]) for row in STEPWISE]  # type: ignore[arg-type]
    else:
        texts = [(each["text"], [each["reward"]]) for row in REWARDED for each in row["completions"]]  # type: ignore[index]
    rewards = []
    for text, _ in texts:
        ids = tokenizer.convert_tokens_to_ids(["<bos>", "<user>", "q", "<assistant>", *text, "<eos>"])
        ends = [4 + index for index, letter in enumerate(text) if letter == "\n" and kind == "steps"]
        hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        rewards.append(model.score(hidden)[[*ends, len(ids) - 1], 0])
    loss: Loss = cross_entropy if kind == "steps" else squares
    value = loss(torch.cat(rewards), torch.tensor([y for _, found in texts for y in found], dtype=torch.float64))
    value.backward()  # type: ignore[no-untyped-call]
    return value.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["steps", "completions"])
@pytest.mark.parametrize(
    ("ranks", "tokens", "layout"), [(1, 1000, "tree"), (1, 30, "rows"), (5, 1, "tree"), (5, 1, "packed")]
)
def test_the_gradient_does_not_depend_on_the_split(
    inputs: dict[str, Input], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    ranks: int, tokens: int, layout: Layout, kind: str,
) -> None:  # fmt: skip
    use_layout(monkeypatch, layout)
    wanted_loss, wanted = expected(inputs, kind)
    shards = divide(pack_targets(examples_of(inputs, kind)), ranks, tokens)
    # Gradients of ranks add up, as those of micro-batches do.
    everything = Shard(
        [batch for shard in shards for batch in shard.micro_batches], shards[0].num_tokens, shards[0].num_examples
    )
    assert ranks == 1 or any(not batch.num_trained_tokens for batch in everything.micro_batches), "no filler"
    one = worker(tmp_path, inputs, kind)
    (metrics,) = one.train([everything])
    assert metrics.means["loss"] == pytest.approx(wanted_loss, rel=1e-5)
    found = gradient(one.engine)
    assert found.keys() == wanted.keys()
    whole = torch.stack([value.norm() for value in wanted.values()]).norm()
    distance = torch.stack([(found[name] - value).norm() for name, value in wanted.items()]).norm()
    assert distance <= 1e-5 * whole


TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% else %} b{% endif %}"
    "{% endfor %}"
)
TEXTS = [
    (["one.", "two", "one"], "\n"),
    (["aé", "€ a🙂", "b"], "\n"),  # the newline and the first byte of € are one token
    (["a", "", "a"], "\n\n"),
    (["one", "two.", "éa"], "xy"),
    (["a b", "a🙂"], ".\n"),
]


def with_template(kind: str, template: str) -> Any:
    tokenizer = copy.deepcopy(KINDS[kind])
    tokenizer.chat_template = template
    return tokenizer


def read_by_the_reward(tokenizer: Tokenizer, ids: list[int], mask: list[bool], separator: str) -> list[float]:
    """The places at which a reward `process_reward_model` reads what was sampled: of scores that say where they are."""
    settings = ProcessRewardModelReward(type="process_reward_model", normalize=False, separator=separator)
    trajectory = Trajectory(
        Prompt("p", "", (), {}), torch.tensor(ids), torch.tensor(mask), torch.zeros(len(ids)), 0, "stop"
    )

    def scores(batch: PackedBatch) -> Tensor:
        return batch.position_ids.float()

    reward = ProcessModelReward.of(RewardReader(settings, Scale(), tokenizer, None), settings, scores)
    (steps,) = reward([trajectory]).steps or ()
    return list(steps)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(("steps", "separator"), TEXTS)
def test_steps_are_trained_where_they_are_read(kind: str, steps: list[str], separator: str) -> None:
    tokenizer = with_template(kind, TEMPLATE)
    steps = [step or "b" for step in steps]
    row = {"id": "r", "prompt": ASKED, "steps": steps, "labels": [0.0] * len(steps), "separator": separator}
    example = labelled_steps(tokenizer, row)
    ids, mask = encode_completion(tokenizer, ASKED, separator.join(steps))
    trained = [float(place) for place, is_trained in enumerate(example.masks[0]) if is_trained]
    assert example.sequences[0] == ids
    assert trained == read_by_the_reward(tokenizer, ids, mask, separator)
    assert len(trained) == len(steps)
    assert example.targets == (0.0,) * len(steps)


def test_steps_that_nobody_judged_are_read_and_not_trained() -> None:
    tokenizer = with_template("words", TEMPLATE)
    row = {"id": "r", "prompt": ASKED, "steps": ["one", "two", "one"], "labels": [1.0, None, 0.0], "separator": "\n"}
    whole = labelled_steps(tokenizer, {**row, "labels": [1.0, 0.5, 0.0]})
    example = labelled_steps(tokenizer, row)
    assert example.sequences == whole.sequences
    places, judged = ([i for i, trained in enumerate(e.masks[0]) if trained] for e in (whole, example))
    assert judged == [places[0], places[2]]
    assert example.targets == (1.0, 0.0)


@pytest.mark.parametrize(
    ("steps", "separator", "message"),
    [
        (["one", "two\none"], "\n", r"steps\[1\] holds the separator '\\n', so it would be read as several"),
        (["a", "b", "c"], "\n", "two steps end in one token, which has one reward"),
    ],
)
def test_steps_that_could_not_be_read_apart_are_refused(steps: list[str], separator: str, message: str) -> None:
    tokenizer = KINDS["words"]  # with a token for the three lines a, b, c
    with pytest.raises(ConversationError, match=message):
        encode_steps(tokenizer, {"prompt": ASKED, "steps": steps, "separator": separator})


def test_separators_that_the_template_does_not_write_are_refused() -> None:
    tokenizer = with_template("bpe", TEMPLATE.replace("m.content", "m.content | replace('b\\n', 'b\\r')"))
    with pytest.raises(ConversationError, match="have 2 steps, and the row has 3: the tokenizer or the chat template"):
        encode_steps(tokenizer, {"prompt": ASKED, "steps": ["b", "a", "a"], "separator": "\n"})
