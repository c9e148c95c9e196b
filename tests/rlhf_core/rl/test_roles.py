"""Models by role: which a run has and what each starts from; a whole stage with several reward models, or a toy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from rlhf_core.algorithms import build_algorithm
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.tokenizers import word_level_tokenizer
from rlhf_core.config.engines.placement import Placement
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.rl.algorithm_table import ALGORITHMS
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.contract import Input, Output
from rlhf_core.errors import StageError
from rlhf_core.rl.hybrid import OwnDevices
from rlhf_core.rl.ranks import PolicyTrainer
from rlhf_core.rl.reward_models import rank_scores
from rlhf_core.rl.roles import Role, reward_roles, roles
from rlhf_core.rl.worker import RLWorker
from rlhf_core.stages import rl
from rlhf_core.stages.in_process import InProcessCluster
from rlhf_core.testing.stage import without_times
from rlhf_core.training.group import InlineGroup
from rlhf_core.types import PackedBatch
from tests.rlhf_core.rl.one_rank import trajectories
from tests.rlhf_core.rl.torch_engine import torch_engine
from tests.rlhf_core.stages.context import LocalContext, local_input
from tests.rlhf_core.stages.supervised_runs import base_model, context_of, dataset, reward_model

pytestmark = pytest.mark.parts

OPTIMIZER = {"learning_rate": 1e-2}
CRITIC = {"optimizer": OPTIMIZER}
EXACT = {"exact": {"type": "verifier"}}
A_AND_B = {"b": {"type": "reward_model"}, "a": {"type": "process_reward_model"}}
KL = {"coefficient": 0.1}


def config(algorithm: str, rl: dict[str, Any] | None = None, **block: Any) -> RLConfig:
    settings = {"rewards": EXACT, "optimizer": OPTIMIZER, "group_size": 2, **block}
    if algorithm in ("ppo", "critic-grpo"):
        settings["critic"] = {**CRITIC, **block.get("critic", {})}
    return RLConfig.model_validate({
        "algorithm": algorithm, ALGORITHMS[algorithm].block: settings, "dataset": "d",
        "steps": 3, "prompts_per_step": 2,
        "sampling": {"max_tokens": 3}, "rollout": {"max_length": 24},
        "engine": {"dtype": "float32", "zero_stage": 0}, **(rl or {}),
    })  # fmt: skip


def made(settings: RLConfig, *others: str) -> tuple[dict[str, Role], dict[str, str]]:
    """The roles by name, and the input that each starts from. others: inputs beside the policy's model."""
    inputs = {name: local_input(Path(name), Kind.POLICY) for name in ("model", *others)}
    names = {given.manifest.ref: name for name, given in inputs.items()}
    found = {role.name: role for role in roles(settings, inputs)}
    return found, {name: names[role.start] for name, role in found.items()}


OF_A, OF_B = "ppo.rewards.a.model", "ppo.rewards.b.model"


@pytest.mark.parametrize(
    ("settings", "others", "starts"),
    [
        (config("grpo"), [], {}),
        (config("grpo", kl=KL), [], {"reference": "model"}),
        (config("grpo", kl={**KL, "reference": "x"}), ["grpo.kl.reference"], {"reference": "grpo.kl.reference"}),
        (config("grpo", kl={"reference": "x"}), [], {}),
        (config("ppo"), [], {"critic": "model"}),
        (config("ppo", rewards=A_AND_B), [OF_A, OF_B], {"critic": OF_A, "reward:b": OF_B, "reward:a": OF_A}),
        (config("ppo", rewards={"b": A_AND_B["b"]}, critic={"start": "policy"}), [OF_B],
         {"critic": "model", "reward:b": OF_B}),
        (config("ppo", critic={"start": "x"}), ["ppo.critic.start"], {"critic": "ppo.critic.start"}),
    ],
)  # fmt: skip
def test_the_models_are_those_that_the_settings_ask_for(
    settings: RLConfig, others: list[str], starts: dict[str, str]
) -> None:
    assert made(settings, *others)[1] == {"policy": "model", **starts}


def test_what_trains_has_an_optimizer_and_a_schedule() -> None:
    ppo = config("ppo", epochs=2, minibatches=2, kl=KL, critic={"warmup_steps": 1})
    found, _ = made(ppo)
    assert {name: role.total_steps for name, role in found.items()} == {"policy": 8, "reference": 0, "critic": 12}
    assert [role.name for role in found.values() if role.optimizer is None] == ["reference"]
    assert {name: role.head for name, role in found.items()} == {
        "policy": "causal", "reference": "causal", "critic": "scalar",
    }  # fmt: skip


def test_every_role_may_have_an_engine_of_its_own() -> None:
    own = {"dtype": "float32", "zero_stage": 3}
    rewards = {"b": {"type": "reward_model", "engine": {**own, "dtype": "bfloat16"}}}
    found, _ = made(config("ppo", rewards=rewards, kl={**KL, "engine": own}, critic={"engine": own}), OF_B)
    assert {name: role.engine.zero_stage for name, role in found.items()} == {
        "policy": 0, "reference": 3, "critic": 3, "reward:b": 3,
    }  # fmt: skip


@pytest.mark.parametrize(("reference", "shared"), [(None, True), ("x", False)])
def test_the_reference_of_a_lora_policy_is_its_base_unless_another_is_named(
    reference: str | None, shared: bool
) -> None:
    settings = config("grpo", rl={"lora": {"rank": 2}}, kl={**KL, "reference": reference})
    assert made(settings, "grpo.kl.reference")[0]["reference"].adapter_off is shared


@pytest.mark.parametrize(("engine", "loaded"), [(None, ["a"]), ({"dtype": "float32", "zero_stage": 3}, ["a", "b"])])
def test_rewards_of_one_model_share_it_if_they_run_it_alike(engine: dict[str, Any] | None, loaded: list[str]) -> None:
    rewards = {"a": {"type": "reward_model"}, "b": {"type": "reward_model", "engine": engine}}
    model, judge = local_input(Path("model"), Kind.POLICY), local_input(Path("judge"), Kind.REWARD_MODEL)
    inputs = {"model": model, "grpo.rewards.a.model": judge, "grpo.rewards.b.model": judge}
    settings = config("grpo", rewards=rewards)
    assert [role.name for role in roles(settings, inputs)] == ["policy", *(f"reward:{name}" for name in loaded)]
    assert reward_roles(settings, inputs) == {"a": "reward:a", "b": f"reward:{loaded[-1]}"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Input]:
    folder = tmp_path_factory.mktemp("inputs")
    prompts = [{"prompt": [{"role": "user", "content": f"say {letter}"}]} for letter in "abcd"]
    return {"model": base_model(folder / "base"), "dataset": dataset(folder / "data", prompts)}


def run(folder: Path, settings: RLConfig, inputs: Mapping[str, Input]) -> tuple[Output, LocalContext, RLWorker]:
    """The whole stage, with one rank and one engine in this process."""
    workers: list[RLWorker] = []  # the ranks that train come last

    class Cluster(InProcessCluster):
        @contextmanager
        def workers(
            self, placement: Placement, engine: EngineConfig, factory: Callable[..., Any], /, *args: Any
        ) -> Iterator[InlineGroup[Any]]:
            with super().workers(placement, engine, factory, *args) as group:
                workers.append(group._worker)
                yield group

    context = context_of(folder / "work", inputs)
    context.user_files_root = folder
    folder.mkdir(exist_ok=True)
    (folder / "reward.py").write_text(
        "def reward(completions, prompts, rows):\n    return [len(c) for c in completions]"
    )
    return rl.run(settings, inputs, context, Cluster(torch_engine)), context, workers[-1]


@pytest.mark.endurance("rl-matrix")
def test_each_of_several_reward_models_is_normalised_by_what_is_stored_with_it(
    inputs: dict[str, Input], tmp_path: Path
) -> None:
    helpful = reward_model(tmp_path / "helpful", inputs["model"], seed=1, mean=0.5, std=2.0)
    harmless = reward_model(tmp_path / "harmless", inputs["model"], seed=2, mean=-0.25, std=0.5)
    raw = {"type": "reward_model", "normalize": False}
    rewards = {
        "helpful": {"type": "reward_model"}, "harmless": {"type": "reward_model", "weight": 0.5},
        "raw_helpful": {**raw, "weight": 0.0}, "raw_harmless": {**raw, "weight": 0.0},
    }  # fmt: skip
    models = {"helpful": helpful, "harmless": harmless, "raw_helpful": helpful, "raw_harmless": harmless}
    given = {**inputs, **{f"ppo.rewards.{name}.model": model for name, model in models.items()}}
    _, context, worker = run(tmp_path, config("ppo", rewards=rewards), given)
    assert list(worker._engines) == ["policy", "critic", "reward:helpful", "reward:harmless"]
    for _, line in context.logs:
        assert line["reward/helpful"] == pytest.approx((line["reward/raw_helpful"] - 0.5) / 2.0, abs=1e-6)
        assert line["reward/harmless"] == pytest.approx((line["reward/raw_harmless"] + 0.25) / 0.5, abs=1e-6)
        assert line["reward"] == pytest.approx(line["reward/helpful"] + 0.5 * line["reward/harmless"], abs=1e-6)
        assert line["reward/raw_helpful"] != pytest.approx(line["reward/raw_harmless"], abs=1e-3)


@pytest.mark.endurance("rl-matrix")
@pytest.mark.slow("RL in three placements")
def test_where_frozen_models_are_changes_nothing(inputs: dict[str, Input], tmp_path: Path) -> None:
    """Bit for bit, also what is drawn at random while models are loaded and later: the critic's adapter and dropout."""
    judge = reward_model(tmp_path / "judge", inputs["model"], seed=1, mean=0.5, std=2.0)
    given = {**inputs, "ppo.rewards.taste.model": judge, "ppo.critic.start": judge}
    lines, weights = [], []
    for number, placed in enumerate([{}, {"placement": {"workers": 2}}]):
        settings = config(
            "ppo", {"dropout": True}, rewards={"taste": {"type": "reward_model", **placed}}, kl={**KL, **placed},
            critic={"start": "judge", "lora": {"rank": 2, "dropout": 0.5}},
        )  # fmt: skip
        output, context, worker = run(tmp_path / str(number), settings, given)
        lines.append([without_times(line) for _, line in context.logs])
        weights.append((output.folder / "model.safetensors").read_bytes())
        assert sorted(worker._models()) == ["critic", "policy", *([] if placed else ["reference", "reward:taste"])]
        assert list(worker.parts()) == ["policy", "critic"]
    assert lines[0] == lines[1]
    assert len(lines[0]) == 3
    assert weights[0] == weights[1]


class Zeros:
    """A rank whose models score every token with 0."""

    def score(self, batches: Sequence[PackedBatch], names: Sequence[str]) -> list[dict[str, Tensor]]:
        return [{name: torch.zeros(batch.num_tokens) for name in names} for batch in batches]

    def shares_prompts(self, role: str) -> bool:
        return False


class Counted(OwnDevices):
    trains = 0

    def train(self, *, keep_weights: bool = False) -> None:
        self.trains += 1


def test_a_reward_model_that_is_placed_apart_waits_for_no_turn() -> None:
    rewards = {"apart": {"type": "reward_model", "placement": {}}, "beside": {"type": "reward_model"}}
    settings = config("grpo", rewards=rewards)
    judges = {f"grpo.rewards.{name}.model": local_input(Path("judge"), Kind.REWARD_MODEL) for name in rewards}
    apart, turns = {"reward:apart": InlineGroup(Zeros)}, Counted()
    asked = PolicyTrainer(settings, build_algorithm(settings), InlineGroup(Zeros), seed=0, apart=apart)
    scores = rank_scores(settings, judges, asked, turns)
    assert not scores["apart"](trajectories()).any()
    assert turns.trains == 0
    assert not scores["beside"](trajectories()).any()
    assert turns.trains == 1


@pytest.mark.usefixtures("example_plugin")
def test_an_algorithm_that_declares_a_critic_gets_one(inputs: dict[str, Input], tmp_path: Path) -> None:
    judge = reward_model(tmp_path / "judge", inputs["model"], seed=1, mean=0.0, std=1.0)
    rewards = {"length": {"type": "function", "path": "reward.py"}}
    settings = config("critic-grpo", rewards=rewards, critic={"start": "judge", "save": True})
    output, context, worker = run(tmp_path, settings, {**inputs, "critic_grpo.critic.start": judge})
    assert list(worker.parts()) == ["policy", "critic"]
    assert all({"value_loss", "critic_learning_rate"} <= line.keys() for _, line in context.logs)
    load = AutoModelForSequenceClassification.from_pretrained
    start, critic = (load(folder).score.weight.detach() for folder in (judge.folder, output.folder / "critic"))
    assert 0 < float((start - critic).abs().max()) < 0.1, "trained from the reward model's head, not from a fresh one"


def test_a_reference_with_another_tokenizer_is_refused_before_anything_starts(
    inputs: dict[str, Input], tmp_path: Path
) -> None:
    word_level_tokenizer(["say"], context_length=64).save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text("{}")
    given = {**inputs, "grpo.kl.reference": local_input(tmp_path / "other", Kind.POLICY)}
    with pytest.raises(StageError, match=r"^grpo\.kl\.reference: its tokenizer differs from the policy's"):
        run(tmp_path, config("grpo", kl={**KL, "reference": "x"}), given)


def test_a_reward_model_that_cannot_be_read_is_named_before_anything_starts(
    inputs: dict[str, Input], tmp_path: Path
) -> None:
    judge = reward_model(tmp_path / "judge", inputs["model"], seed=1, mean=0.0, std=0.0)
    given = {**inputs, "grpo.rewards.taste.model": judge}
    with pytest.raises(StageError, match=r"^grpo\.rewards\.taste: .* set normalize: false"):
        run(tmp_path, config("grpo", rewards={"taste": {"type": "reward_model"}}), given)
