"""The loop with a real trainer and a scripted engine: what a step measures, and what stops it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.algorithms import build_algorithm
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.tokenizers import word_level_tokenizer
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.data.prompts import to_prompts
from rlhf_core.episodes.rollouter import Rollouter
from rlhf_core.errors import RewardError, StageError, WeightSyncError
from rlhf_core.packing import pack
from rlhf_core.rewards.base import RewardResult, checked_result
from rlhf_core.rewards.text import RewardOfText
from rlhf_core.rl import publisher as rl_publisher
from rlhf_core.rl.collector import SyncCollector
from rlhf_core.rl.experience import pack_trajectories, require_finite
from rlhf_core.rl.hybrid import turns_of
from rlhf_core.rl.loop import Loop
from rlhf_core.rl.prompts import PromptSampler
from rlhf_core.rl.publisher import Publisher
from rlhf_core.rl.ranks import PolicyTrainer
from rlhf_core.rl.rewarding import RewardPipeline
from rlhf_core.rl.roles import roles
from rlhf_core.rl.rollouts import RolloutSampler
from rlhf_core.rl.stored import StoredGroups
from rlhf_core.rl.worker import RLWorker
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.scripted import Script, ScriptedEngine
from rlhf_core.training.checkpointing import Checkpointing
from rlhf_core.training.group import InlineGroup
from rlhf_core.types import Prompt, TrainingBatch, Trajectory
from tests.rlhf_core.rl.published import published
from tests.rlhf_core.stages.context import LocalContext, local_input

pytestmark = pytest.mark.parts

TOKENIZER = word_level_tokenizer([], context_length=64)
ROWS = [{"id": str(i), "prompt": [{"role": "user", "content": f"{i}?"}]} for i in range(4)]
CONFIG = RLConfig.model_validate({
    "algorithm": "grpo", "dataset": "p", "steps": 3, "prompts_per_step": 2, "sampling": {"max_tokens": 3},
    "rollout": {"max_length": 16}, "engine": {"dtype": "float32", "zero_stage": 0}, "probe_tolerance": 100.0,
    "grpo": {
        "rewards": {"own": {"type": "function", "path": "own.py"}}, "group_size": 2,
        "optimizer": {"learning_rate": 1e-3},
    },
})  # fmt: skip


class FunctionOf:
    """A reward made of a function of one completion."""

    def __init__(self, function: Callable[[str], Any]) -> None:
        self._function = function

    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> RewardResult:
        return checked_result([self._function(c) for c in completions], len(completions), "test")

    def close(self) -> None: ...


def script(prompt: Sequence[int], number: int) -> Sequence[int]:
    """Odd requests answer "a", even ones "bb"; both end."""
    return [*TOKENIZER("a" if number % 2 else "bb", add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]


def numbered(script: Callable[[Sequence[int], int], Sequence[int]]) -> Script:
    """What an engine runs: `script` with the numbers of the requests in place of their seeds."""
    numbers = itertools.count()
    return lambda prompt, seed: script(prompt, next(numbers))


def loop(folder: Path, reward: FunctionOf, config: RLConfig = CONFIG, engine: ScriptedEngine | None = None) -> Loop:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(TOKENIZER), **shape)).save_pretrained(folder / "model")
    model = local_input(folder / "model", Kind.POLICY)
    context = LocalContext(folder / "work", artifacts={model.manifest.ref.path: model})
    workers = InlineGroup(RLWorker, config, context, roles(config, {"model": model}))
    engines = InlineEngines(engine or ScriptedEngine(numbered(script), max_length=16))
    turns = turns_of(config, workers, engines)
    algorithm = build_algorithm(config)
    prompts = to_prompts(ROWS, TOKENIZER, max_tokens=13)
    trainer = PolicyTrainer(config, algorithm, workers, seed=0)
    collector = SyncCollector(
        config,
        PromptSampler(prompts, 0),
        RolloutSampler(config, Rollouter(engines, TOKENIZER, config.rollout), 0),
        RewardPipeline(config.settings, config.sampling.max_tokens, {"own": RewardOfText(reward)}, TOKENIZER),
        {"long": RewardOfText(FunctionOf(lambda c: float(len(c) > 1)))},
        StoredGroups(),
    )
    publisher = Publisher(config, trainer, engines, prompts[:2], turns)
    checkpoints = Checkpointing(config.checkpoint, context, workers, {"collector": collector, "trainer": trainer})
    return Loop(config, algorithm, collector, trainer, publisher, context, checkpoints, turns)


def test_a_step_measures_what_happened(tmp_path: Path) -> None:
    ours = loop(tmp_path, FunctionOf(lambda c: {"reward": float(c == "a"), "score": 0.25}))
    last = ours.run()
    assert isinstance(ours.context, LocalContext)
    assert [step for step, _ in ours.context.logs] == [0, 1, 2]
    assert (last["reward"], last["reward_std"], last["score"], last["monitor/long"]) == (0.5, 0.5, 0.25, 0.5)
    assert last["reward/own"] == 0.5
    assert last["completion_length"] == 2.5  # "a" and "bb", each with its EOS
    assert last["entropy"] == 1.0  # the scripted log-prob of every token is -1
    assert (last["distinct"], last["truncated_share"]) == (1.0, 0.0)
    phases = {name for name in last if name.startswith("seconds/")}
    assert phases == {f"seconds/{p}" for p in ("rollout", "score", "reward", "advantage", "update", "publish")}
    assert ours.context.progresses[-1][:3] == (3, 3, "rl")


def test_a_step_counts_the_prompts_that_are_solved_mixed_and_hopeless(tmp_path: Path) -> None:
    ours = loop(tmp_path, FunctionOf(lambda c: {"reward": 1.0, "score": float(c == "a")}))
    shares = ("solved_share", "mixed_share", "hopeless_share")
    last = ours.run()
    assert [last[name] for name in shares] == [0.0, 1.0, 0.0]
    last = loop(tmp_path / "always", FunctionOf(lambda c: {"reward": 0.0, "score": 1.0})).run()
    assert [last[name] for name in shares] == [1.0, 0.0, 0.0]


def test_the_rewarded_completion_becomes_likelier(tmp_path: Path) -> None:
    ours = loop(tmp_path, FunctionOf(lambda c: float(c == "a")))
    prompt = to_prompts(ROWS, TOKENIZER, max_tokens=13)[0].token_ids
    probe = pack([[*prompt, *script(prompt, 1)]], [[True] * (len(prompt) + 2)])
    before = sum(ours.trainer.probe(probe)[len(prompt) :])
    ours.run()
    assert sum(ours.trainer.probe(probe)[len(prompt) :]) > before


def test_rewards_of_steps_train(tmp_path: Path) -> None:
    ours = loop(tmp_path, FunctionOf(lambda c: {"reward": 0.0, "steps": [float(c == "a")]}))
    prompt = to_prompts(ROWS, TOKENIZER, max_tokens=13)[0].token_ids
    probe = pack([[*prompt, *script(prompt, 1)]], [[True] * (len(prompt) + 2)])
    before = sum(ours.trainer.probe(probe)[len(prompt) :])
    last = ours.run()
    assert sum(ours.trainer.probe(probe)[len(prompt) :]) > before
    assert (last["reward"], last["reward_std"], last["reward/own"], last["reward/own/steps"]) == (0.5, 0.5, 0.5, 1.0)


def test_rewards_of_steps_train_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = loop(tmp_path, FunctionOf(lambda c: {"reward": 0.25, "steps": [float(c == "a")]}))
    given: list[tuple[list[float], float]] = []
    advantages = ours.algorithm.advantages

    def seen(_: Any, experience: Any, rewards: torch.Tensor, *others: Any) -> Any:
        given.append((rewards.tolist(), float(experience.process_rewards.sum())))
        return advantages(experience, rewards, *others)

    monkeypatch.setattr(type(ours.algorithm), "advantages", seen)
    ours.run()
    assert given[0] == ([0.25] * 4, 2.0)


def test_each_reward_reaches_the_algorithm_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was given: neither weighted nor shaped."""
    plain = CONFIG.model_dump(exclude_unset=True)
    own = {**plain["grpo"], "rewards": {"own": {**plain["grpo"]["rewards"]["own"], "weight": 3.0}}}
    config = RLConfig.model_validate({**plain, "algorithm": "gdpo", "gdpo": own})
    ours = loop(tmp_path, FunctionOf(lambda c: 0.5 * len(c)), config)
    given: list[tuple[list[float], dict[str, list[float]]]] = []
    advantages = ours.algorithm.advantages

    def seen(_: Any, experience: Any, rewards: torch.Tensor, *others: Any) -> Any:
        given.append((rewards.tolist(), {name: values.tolist() for name, values in others[-1].items()}))
        return advantages(experience, rewards, *others)

    monkeypatch.setattr(type(ours.algorithm), "advantages", seen)
    ours.run()
    assert given[0] == ([3.0, 1.5, 3.0, 1.5], {"own": [1.0, 0.5, 1.0, 0.5]})


def filtering(steps: int, **settings: Any) -> RLConfig:
    plain = CONFIG.model_dump(exclude_unset=True)
    return RLConfig.model_validate({**plain, "steps": steps, "grpo": {**plain["grpo"], "filtering": settings}})


def script_of_ends(prompt: Sequence[int], number: int) -> Sequence[int]:
    """Prompts 0 and 1 are answered by "a" alone, the others by "a" and "bb"."""
    asked = TOKENIZER.decode(prompt)
    return script(prompt, 1 if "0?" in asked or "1?" in asked else number)


def test_a_step_trains_on_the_prompts_that_filtering_kept(tmp_path: Path) -> None:
    reward = FunctionOf(lambda c: {"reward": float(c == "a"), "score": float(c == "a")})
    engine = ScriptedEngine(numbered(script_of_ends), max_length=16)
    last = loop(tmp_path, reward, filtering(steps=3, max_rounds=8), engine).run()
    assert (last["reward"], last["reward_std"]) == (0.5, 0.5)  # of those that train
    assert last["filtering/score"] > 0.5  # of all
    assert last["filtering/kept_share"] < 1


def test_a_step_with_fewer_prompts_trains(tmp_path: Path) -> None:
    reward = FunctionOf(lambda c: {"reward": float(c == "a"), "score": float(c == "a")})
    ours = loop(
        tmp_path, reward, filtering(steps=1, max_rounds=1), ScriptedEngine(numbered(script_of_ends), max_length=16)
    )
    easy = [prompt.id in "01" for prompt in PromptSampler(to_prompts(ROWS, TOKENIZER, max_tokens=13), 0).draw(12, 0)]
    start = next(i for i in range(11) if easy[i] != easy[i + 1])  # a step from here draws one easy prompt
    state = ours.collector.state_dict()
    counts = {**state["counts"], "drawn": start, "surplus": start}
    ours.collector.load_state_dict({**state, "prompts": {"drawn": start}, "counts": counts})
    before = published(ours.trainer)
    metrics = ours.run()
    assert (metrics["filtering/groups"], metrics["filtering/kept_share"]) == (2, 0.5)
    assert metrics["reward"] == 0.5
    assert published(ours.trainer) != before


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39, 10**400, None, "good"])
def test_a_bad_reward_stops_the_run_before_an_update(tmp_path: Path, value: object) -> None:
    engine = ScriptedEngine(numbered(script), max_length=16)
    ours = loop(tmp_path, FunctionOf(lambda c: value), engine=engine)
    before = published(ours.trainer)
    with pytest.raises(RewardError, match="completion 0"):
        ours.run()
    assert engine.loaded == []
    assert published(ours.trainer) == before


def test_what_overflows_on_its_way_to_a_token_names_the_row() -> None:
    made = []
    for name in "pq":
        prompt = Prompt(name, "", (7, 7), {})
        mask = torch.tensor([False, False, True])
        made.append(Trajectory(prompt, torch.tensor([7, 7, 2]), mask, torch.zeros(3), 0, "stop", reward=3e38))
    advantages = torch.tensor([torch.inf, 0.0, 1.0, 0.0, torch.nan, 2.0])
    finite = TrainingBatch(**vars(pack_trajectories(made)), advantages=advantages)
    require_finite(finite, made)
    for name in ("rewards", "advantages", "returns"):
        values = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, -torch.inf])
        with pytest.raises(RewardError, match=rf"row q: of its {name}, one is -inf: its reward is 3e\+38"):
            require_finite(replace(finite, **{name: values}), made)


def test_truncated_completions_may_be_left_out_of_the_loss(tmp_path: Path) -> None:
    """The answer "aaa" is cut at three tokens: it counts in the baseline, so "bb" is rewarded, and trains nothing."""

    def cut(prompt: Sequence[int], number: int) -> Sequence[int]:
        return script(prompt, 0) if number % 2 else TOKENIZER("aaa", add_special_tokens=False)["input_ids"]

    def ran(name: str, masks: bool, script: Callable[[Sequence[int], int], Sequence[int]] = cut) -> dict[str, float]:
        plain = CONFIG.model_dump(exclude_unset=True)
        block = {**plain["grpo"], "mask_truncated_completions": masks}
        config = RLConfig.model_validate({**plain, "grpo": block, "steps": 1})
        engine = ScriptedEngine(numbered(script), max_length=16)
        return loop(tmp_path / name, FunctionOf(lambda c: float(c == "bb")), config, engine).run()

    unmasked, masked = ran("unmasked", False), ran("masked", True)
    assert (unmasked["trained_completions"], masked["trained_completions"]) == (4, 2)
    for name in ("reward", "completion_length", "truncated_share", "reward_std"):
        assert masked[name] == unmasked[name]
    assert masked["truncated_share"] == 0.5
    assert masked["policy_loss"] < 0 == pytest.approx(unmasked["policy_loss"], abs=1e-6), "advantages are not 0"
    metrics = ran("all", True, lambda prompt, number: cut(prompt, 0))
    assert (metrics["trained_completions"], metrics["truncated_share"]) == (0, 1)
    assert "policy_loss" not in metrics, "no update"


def test_versions_are_published_one_after_the_other(tmp_path: Path) -> None:
    engine = ScriptedEngine(numbered(script), max_length=16)
    loop(tmp_path, FunctionOf(lambda c: 1.0), engine=engine).run()
    assert [version for _, version in engine.loaded] == [1, 2, 3]


def test_the_probe_has_the_last_tokens_of_long_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rl_publisher, "_PROBE_TOKENS", 3)
    probed = []

    class Recording(ScriptedEngine):
        def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
            probed.append([tuple(sequence) for sequence in sequences])
            return super().logprobs(sequences)

    loop(tmp_path, FunctionOf(lambda c: 1.0), engine=Recording(numbered(script), max_length=16)).run()
    prompts = [prompt.token_ids for prompt in to_prompts(ROWS, TOKENIZER, max_tokens=13)[:2]]
    assert min(map(len, prompts)) > 3
    assert probed == [[tuple(ids[-3:]) for ids in prompts]] * (1 + CONFIG.steps)


def test_trajectories_of_old_weights_are_refused(tmp_path: Path) -> None:
    class Forgetful(ScriptedEngine):
        def generate(self, requests: Any, *, keep_prefixes: bool = False) -> Any:
            self._version = 7
            return super().generate(requests)

    ours = loop(tmp_path, FunctionOf(lambda c: 1.0), engine=Forgetful(numbered(script), max_length=16))
    with pytest.raises(WeightSyncError, match=r"weights \[7\], published is 0"):
        ours.run()


def test_trajectories_of_the_weights_before_are_refused(tmp_path: Path) -> None:
    class Late(ScriptedEngine):
        def generate(self, requests: Any, *, keep_prefixes: bool = False) -> Any:
            return [replace(completion, weight_version=0) for completion in super().generate(requests)]

    ours = loop(tmp_path, FunctionOf(lambda c: 1.0), engine=Late(numbered(script), max_length=16))
    with pytest.raises(WeightSyncError, match=r"weights \[0\], published is 1"):
        ours.run()


def test_an_engine_that_does_not_serve_the_weights_stops_the_run(tmp_path: Path) -> None:
    strict = CONFIG.model_copy(update={"probe_tolerance": 1e-3})
    ours = loop(tmp_path, FunctionOf(lambda c: 1.0), config=strict)
    with pytest.raises(WeightSyncError, match="version 0"):
        ours.run()


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    runs = []
    for name in ("one", "two"):
        ours = loop(tmp_path / name, FunctionOf(lambda c: float(c == "a")))
        ours.run()
        runs.append(published(ours.trainer))
    assert runs[0] == runs[1]


def test_ranks_and_engines_that_turns_of_give_the_same_run(tmp_path: Path) -> None:
    runs = []
    for name, hybrid in (("own", False), ("shared", True)):
        config = CONFIG.model_copy(update={"hybrid": hybrid})
        ours = loop(tmp_path / name, FunctionOf(lambda c: float(c == "a")), config)
        ours.run()
        ours.turns.train()
        runs.append(published(ours.trainer))
    assert runs[0] == runs[1]


def test_a_prompt_too_long_for_the_context_is_refused() -> None:
    with pytest.raises(StageError, match=r"prompt 0 .* has 5 tokens"):
        to_prompts(ROWS, TOKENIZER, max_tokens=2)
