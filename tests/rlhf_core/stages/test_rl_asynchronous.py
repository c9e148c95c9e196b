"""RL whose rollouts are sampled while it trains: how far they are behind, and what a killed run makes of them."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_core.artifacts.checkpoints import Checkpoint
from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.contract import Input
from rlhf_core.errors import ActorDiedError, RewardError, StageError
from rlhf_core.rewards.verifier import Verifier
from rlhf_core.rl import loop
from rlhf_core.rl.loop import Loop
from rlhf_core.rl.prompts import PromptSampler
from rlhf_core.rl.stored import stored
from rlhf_core.rollout.engine import Request
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.scripted import ScriptedEngine
from rlhf_core.stages import rl
from rlhf_core.stages.in_process import InProcessCluster
from rlhf_core.training.checkpointing import DRIVER
from rlhf_core.types import Completion, Trajectory
from tests.rlhf_core.stages.context import LocalContext, wait_for_checkpoint
from tests.rlhf_core.stages.supervised_runs import base_model, context_of, dataset

pytestmark = pytest.mark.parts

SETTINGS: dict[str, Any] = {
    "algorithm": "grpo", "dataset": "questions", "steps": 6, "prompts_per_step": 2, "sampling": {"max_tokens": 3},
    "rollout": {"max_length": 40, "repeatable": False}, "engine": {"dtype": "float32", "zero_stage": 0},
    "probe_tolerance": 100.0, "asynchronous": {"max_lag": 1},
    "grpo": {
        "rewards": {"exact": {"type": "verifier"}}, "group_size": 2, "mismatch": None,
        "optimizer": {"learning_rate": 1e-2, "schedule": "constant", "warmup_share": 0.0},
    },
}  # fmt: skip


UNCORRECTED = {name: value for name, value in SETTINGS["grpo"].items() if name != "mismatch"}


class SlowEngine(ScriptedEngine):
    """Takes several calls of `advance` for a completion: as many as its prompt says."""

    def __init__(self, script: Any) -> None:
        super().__init__(script, max_length=40)
        self.left: dict[int, tuple[int, Request]] = {}
        self.lock = threading.Lock()

    def advance(self, requests: Mapping[int, Request], *, abandoned: Sequence[int] = ()) -> dict[int, Completion]:
        time.sleep(0.005)
        self.left |= {number: (self.calls(request), request) for number, request in requests.items()}
        self.left = {number: (calls - 1, request) for number, (calls, request) in self.left.items()}
        whole = {number: request for number, (calls, request) in self.left.items() if calls <= 0}
        for number in whole:
            del self.left[number]
        return dict(zip(whole, self.generate(list(whole.values())), strict=True))

    def calls(self, request: Request) -> int:
        return 1 + len(request.prompt) % 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Input:
    return base_model(tmp_path_factory.mktemp("base"))


def run(
    folder: Path,
    model: Input,
    engine: Any = SlowEngine,
    prompts: int = 6,
    engines: Any = InlineEngines,
    cluster: InProcessCluster | None = None,
    **settings: Any,
) -> LocalContext:
    """Prompts are answered `a` or `b`, by their seeds; or by the engines of `cluster`."""
    tokenizer = load_tokenizer(model.folder)

    def script(prompt: Sequence[int], seed: int | None) -> Sequence[int]:
        return [*tokenizer("ab"[(seed or 0) % 2], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    asked = [{"prompt": [{"role": "user", "content": f"{i}?"}], "answer": "a"} for i in range(prompts)]
    inputs = {"model": model, "dataset": dataset(folder / "questions", asked)}
    if "validation" in settings:
        inputs["validation.dataset"] = inputs["dataset"]
    context = replace(context_of(folder / "work", inputs), user_files_root=folder)
    config = RLConfig.model_validate({**SETTINGS, **settings})
    scripted = InProcessCluster(lambda *_: nullcontext(engines(engine(script))))
    rl.run(config, inputs, context, cluster or scripted)
    return context


@pytest.mark.parametrize("publish", ["in_flight", "between_replies"])
def test_steps_train_on_what_was_sampled_while_earlier_ones_trained(model: Input, tmp_path: Path, publish: str) -> None:
    held_out = {"dataset": "held_out", "every_steps": 2, "scorers": {"exact": {"type": "verifier"}}}
    context = run(tmp_path, model, asynchronous={"max_lag": 1, "publish": publish}, validation=held_out)
    lags = [metrics["asynchronous/largest_lag"] for _, metrics in context.logs]
    assert len(lags) == 6
    assert set(lags) <= {0, 1}
    assert 1 in lags
    assert context.logs[1][1]["validation/pass@1"] in (0.0, 1.0)


@pytest.mark.system
@pytest.mark.slow("RL with vLLM")
def test_what_vllm_samples_while_a_step_trains_is_trained_by_the_next(
    in_process: InProcessCluster, tmp_path: Path
) -> None:
    model = base_model(tmp_path / "base", hidden=64)  # heads of a size that vLLM serves on CPU
    rollout = {**SETTINGS["rollout"], "cpu_cache_gib": 0.05, "max_sequences": 16}
    context = run(tmp_path, model, cluster=in_process, steps=3, rollout=rollout, probe_tolerance=1e-3)
    metrics = [metrics for _, metrics in context.logs]
    assert [each["trained_completions"] for each in metrics] == [4, 4, 4]
    assert {each["asynchronous/largest_lag"] for each in metrics} <= {0, 1}
    assert metrics[0]["rollout_mismatch"] < 1e-4  # of the weights that sampled it
    assert all(each["weight_difference"] < 1e-4 for each in metrics)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[list[Trajectory]]:
    """What each step has trained on."""
    steps: list[list[Trajectory]] = []
    describe = loop.describe

    def seen(trajectories: Sequence[Trajectory], experience: Any) -> dict[str, float]:
        steps.append(list(trajectories))
        return describe(trajectories, experience)

    monkeypatch.setattr(loop, "describe", seen)
    return steps


def state(context: LocalContext) -> dict[str, Any]:
    """Of the collector, in the newest checkpoint."""
    wait_for_checkpoint()
    newest = next(iter(context.checkpoints.newest()))
    assert isinstance(newest, Checkpoint)
    collector: dict[str, Any] = json.loads(context.checkpoints.read(newest, DRIVER))["collector"]
    return collector


def prompts_of(step: Sequence[Trajectory]) -> list[str]:
    return [trajectory.prompt.text for trajectory in step[::2]]


def test_no_prompt_is_lost_or_trained_twice_by_a_run_that_is_killed(
    model: Input, tmp_path: Path, trained: list[list[Trajectory]], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, kept = Loop._step, []

    def killed(ours: Loop, number: int) -> dict[str, float]:
        wait_for_checkpoint()
        if number in (2, 3) and len(kept) < number - 1:
            kept.append(len(trained))
            raise KeyboardInterrupt
        return step(ours, number)

    monkeypatch.setattr(Loop, "_step", killed)
    settings = {"prompts": 40, "checkpoint": {"every_steps": 1}, "asynchronous": {"max_lag": 2}}
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, model, **settings)
    context = run(tmp_path, model, **settings)
    assert len(context.logs) == len(trained) == 6
    asked = [prompt for step in trained for prompt in prompts_of(step)]
    assert set(Counter(asked).values()) == {1}
    left = state(context)  # after five steps: the sixth needs none
    waiting = [number for number, _, _ in left["ready"]]
    assert left["prompts"]["drawn"] == 10 + len(left["begun"]) + len(waiting)
    assert len({*left["begun"], *waiting}) == len(left["begun"]) + len(waiting)


@pytest.mark.endurance("rl-matrix")
def test_what_waits_in_a_checkpoint_is_trained_on_as_it_was_sampled(
    model: Input, tmp_path: Path, trained: list[list[Trajectory]], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Loop._step

    def killed(ours: Loop, number: int) -> dict[str, float]:
        if number == 1 and not resumed:
            raise KeyboardInterrupt
        time.sleep(0.3)  # all that may be begun is sampled and judged by the end of the step
        return step(ours, number)

    monkeypatch.setattr(Loop, "_step", killed)
    settings = {"checkpoint": {"every_steps": 1}, "asynchronous": {"max_lag": 2}, "steps": 2}
    resumed = False
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, model, **settings)
    waiting = state(LocalContext(tmp_path / "work"))["ready"]
    assert len(waiting) >= 2
    resumed = True
    run(tmp_path, model, **settings)
    assert [stored(trajectory) for trajectory in trained[1]] == [t for _, _, group in waiting[:2] for t in group]


def test_one_slow_episode_holds_up_no_step(model: Input, tmp_path: Path, trained: list[list[Trajectory]]) -> None:
    class Stuck(SlowEngine):
        def calls(self, request: Request) -> int:
            return 10_000 if request.seed == self.stuck else 1

        def advance(self, requests: Mapping[int, Request], *, abandoned: Sequence[int] = ()) -> dict[int, Completion]:
            if not hasattr(self, "stuck"):
                self.stuck = next(iter(requests.values())).seed  # the first completion of all
            return super().advance(requests, abandoned=abandoned)

    context = run(tmp_path, model, Stuck, prompts=40, asynchronous={"max_lag": 1, "in_flight": 3})
    assert len(context.logs) == 6
    assert len({prompt for step in trained for prompt in prompts_of(step)}) == 12


@pytest.mark.endurance("rl-matrix")
@pytest.mark.parametrize("too_old", ["resample", "drop"])
def test_what_is_further_behind_is_answered_again_or_left_out(
    model: Input, tmp_path: Path, trained: list[list[Trajectory]], too_old: str
) -> None:
    class LateOnce(SlowEngine):
        """The first completion of all takes three steps."""

        def advance(self, requests: Mapping[int, Request], *, abandoned: Sequence[int] = ()) -> dict[int, Completion]:
            if not hasattr(self, "late"):
                self.late = next(iter(requests))
            whole = super().advance(requests, abandoned=abandoned)
            if self.late in whole and self.weight_version < 3:
                self.left[self.late] = (1, self.request)
                del whole[self.late]
            return whole

        def calls(self, request: Request) -> int:
            if not hasattr(self, "request"):
                self.request = request
            return 1

        def generate(self, requests: Sequence[Request], *, keep_prefixes: bool = False) -> list[Completion]:
            # By the weights that it was begun with.
            made = super().generate(requests)
            return [
                replace(c, weight_version=0) if r is self.request else c for r, c in zip(requests, made, strict=True)
            ]

    settings = {"max_lag": 1, "in_flight": 3, "too_old": too_old}
    # Steps enough that what is answered again, and queues behind others, is trained on.
    context = run(tmp_path, model, LateOnce, prompts=40, asynchronous=settings, steps=9)
    assert sum(metrics["asynchronous/too_old"] for _, metrics in context.logs) == 1
    assert all(metrics["asynchronous/largest_lag"] <= 1 for _, metrics in context.logs)
    first = PromptSampler(tuple(range(40)), 0).at(0)  # type: ignore[arg-type]  # numbers in place of prompts
    of_first = [step for step, part in enumerate(trained) for prompt in prompts_of(part) if prompt == f"{first}?"]
    assert len(of_first) == (1 if too_old == "resample" else 0)


@pytest.mark.endurance("rl-matrix")
def test_rewards_are_given_while_engines_sample(model: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge, sampled_meanwhile = Verifier.__call__, []

    def slow(self: Verifier, *arguments: Any) -> Any:
        before = len(engines[0].prompts)
        time.sleep(0.1)
        sampled_meanwhile.append(len(engines[0].prompts) - before)
        return judge(self, *arguments)

    class Noting(SlowEngine):
        def __init__(self, script: Any) -> None:
            super().__init__(script)
            self.prompts: list[Any] = []
            engines.append(self)

        def generate(self, requests: Sequence[Request], *, keep_prefixes: bool = False) -> list[Completion]:
            self.prompts += [request.prompt for request in requests]
            return super().generate(requests)

    engines: list[Noting] = []
    monkeypatch.setattr(Verifier, "__call__", slow)
    run(tmp_path, model, Noting, asynchronous={"max_lag": 4})
    assert any(sampled_meanwhile)


@pytest.mark.endurance("rl-matrix")
def test_a_prompt_whose_reward_fails_is_left_out(model: Input, tmp_path: Path, trained: list[list[Trajectory]]) -> None:
    """One completion of every third prompt fails; the other prompts keep their own rewards."""
    (tmp_path / "own.py").write_text(
        "def reward(completions, prompts, rows):\n"
        "    numbers = [float(prompt.rstrip('?')) for prompt in prompts]\n"
        "    return [None if n % 3 == 0 and i % 2 == 0 else n for i, n in enumerate(numbers)]\n"
    )
    rewards = {"own": {"type": "function", "path": "own.py", "function": "reward", "tolerated_failures": 0.5}}
    grpo = {**SETTINGS["grpo"], "rewards": rewards}
    context = run(tmp_path, model, prompts=40, asynchronous={"max_lag": 4}, grpo=grpo)
    # A step for which nothing was judged since the last one has no such metric.
    assert sum(metrics.get("reward/own/failures", 0) for _, metrics in context.logs) > 0
    for step in trained:
        assert prompts_of(step) == [trajectory.prompt.text for trajectory in step[1::2]]
        numbers = [float(trajectory.prompt.text.rstrip("?")) for trajectory in step]
        assert [trajectory.reward for trajectory in step] == numbers
        assert all(number % 3 for number in numbers)


def test_the_first_error_of_a_reward_or_an_engine_ends_the_run(model: Input, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def reward(completions, prompts, rows):\n    raise LookupError('no such row')\n")
    rewards = {"own": {"type": "function", "path": "own.py", "function": "reward"}}
    with pytest.raises(RewardError, match="no such row"):
        run(tmp_path, model, grpo={**SETTINGS["grpo"], "rewards": rewards})

    class Dies(SlowEngine):
        def advance(self, requests: Mapping[int, Request], *, abandoned: Sequence[int] = ()) -> dict[int, Completion]:
            if self.weight_version == 2:
                raise StageError("engine 0 died in generate")
            return super().advance(requests, abandoned=abandoned)

    with pytest.raises(StageError, match="engine 0 died"):
        run(tmp_path / "engine", model, Dies)
    assert not [thread for thread in threading.enumerate() if thread.name == "episodes"]


class Mortal(InlineEngines):
    """Its engine dies once, with the weights of version 2, when it is given replies of this `kind`, or weights."""

    kind: str
    deaths: list[str]  # of all instances of the class

    def _run(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not self.deaths and self._engine.weight_version == 2 and self.kind in self._kinds(method, args):
            self.deaths.append(self.kind)
        if self.deaths == [self.kind]:
            raise ActorDiedError("engine 0 died")
        return super()._run(method, args, kwargs)

    @staticmethod
    def _kinds(method: str, args: Sequence[Any]) -> set[str]:
        if method == "advance":
            return {"validation" if request.seed is None else "training" for request in args[0].values()}
        return {"publish"} if method == "load_weights" else set()

    def replace_dead(self) -> list[str]:
        assert isinstance(self._engine, SlowEngine)
        self._engine = SlowEngine(self._engine._script)  # of version 0
        self.deaths.append("replaced")
        return ["engine 0"]


@pytest.mark.parametrize("kind", ["training", "validation", "publish"])
@pytest.mark.parametrize("publish", ["in_flight", "between_replies"])
def test_a_dead_engine_is_replaced_and_no_prompt_is_lost_or_trained_twice(
    model: Input, tmp_path: Path, trained: list[list[Trajectory]], kind: str, publish: str
) -> None:
    engines = type("Once", (Mortal,), {"kind": kind, "deaths": []})
    held_out = {"dataset": "held_out", "every_steps": 1, "scorers": {"exact": {"type": "verifier"}}}
    settings = {"max_lag": 1, "publish": publish}
    context = run(tmp_path, model, prompts=40, engines=engines, asynchronous=settings, validation=held_out)
    assert engines.deaths == [kind, "replaced"]  # type: ignore[attr-defined]
    assert len(context.logs) == len(trained) == 6
    assert set(Counter(prompt for step in trained for prompt in prompts_of(step)).values()) == {1}
    assert all(metrics["asynchronous/largest_lag"] <= 1 for _, metrics in context.logs)
    assert not [thread for thread in threading.enumerate() if thread.name == "episodes"]


@pytest.mark.endurance("rl-matrix")
def test_without_lag_each_step_waits_for_its_own_rollouts(model: Input, tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", model, asynchronous=None)
    waits = run(tmp_path / "waits", model, asynchronous={"max_lag": 0})

    def measured(context: LocalContext) -> list[dict[str, float]]:
        return [{n: v for n, v in metrics.items() if "seconds" not in n} for _, metrics in context.logs]

    assert measured(plain) == measured(waits)
    assert RLConfig.model_validate(SETTINGS).unused_fields() == {"keep", "environment", "select", "replay"}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"rollout": {"max_length": 40}}, "asynchronous sampling is not reproducible: set rollout.repeatable: false"),
        ({"asynchronous": {"in_flight": 1}}, "in_flight is 1, less than the 2 prompts of a step"),
        ({"hybrid": True}, "engines sleep while the ranks train"),
        ({"lora": {"rank": 4}, "rollout": {**SETTINGS["rollout"], "serve_adapter": "adapter"}}, "between_replies"),
        ({"grpo": UNCORRECTED}, "nothing corrects for it: give grpo.mismatch, .* or, .* grpo.mismatch: null"),
        ({"asynchronous": {"max_lag": -1}}, "from 0 to 100"),
        ({"asynchronous": {"max_lag": 0, "publish": "between_replies"}}, "publish has no effect with max_lag: 0"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        RLConfig.model_validate({**SETTINGS, **settings})


@pytest.mark.parametrize("block", ["grpo", "gspo", "gmpo"])
def test_the_mismatch_that_is_proposed_can_be_given(block: str) -> None:
    asked = {**SETTINGS, "algorithm": block, "grpo": None, block: UNCORRECTED}
    with pytest.raises(ValueError, match=rf"give {block}\.mismatch, such as ") as raised:
        RLConfig.model_validate(asked)
    (proposed,) = re.findall(r"such as (\{.*?\})", str(raised.value))
    given = RLConfig.model_validate({**asked, block: {**UNCORRECTED, "mismatch": yaml.safe_load(proposed)}})
    assert given.settings.mismatch is not None


def test_a_ratio_to_the_probability_of_the_engine_needs_no_correction() -> None:
    RLConfig.model_validate({**SETTINGS, "algorithm": "dppo", "grpo": None, "dppo": UNCORRECTED})


def test_a_mismatch_of_null_is_one_that_a_job_reads_again() -> None:
    written = RLConfig.model_validate(SETTINGS).model_dump(mode="json")
    assert RLConfig.model_validate(written).settings.mismatch is None
    for given in ({"asynchronous": None}, {"asynchronous": {"max_lag": 0}}):
        RLConfig.model_validate({**SETTINGS, "grpo": UNCORRECTED, **given})
