"""RL in an environment of the user's file: whole episodes train and validate, and failures count as the recipe says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.contract import Input
from rlhf_core.errors import EpisodeError, StageError
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.scripted import ScriptedEngine
from rlhf_core.stages import rl
from rlhf_core.stages.in_process import InProcessCluster
from tests.rlhf_core.stages.context import LocalContext
from tests.rlhf_core.stages.supervised_runs import base_model, context_of, dataset

pytestmark = pytest.mark.parts

# Tells the wrong letter; a row whose answer is `x` has no game.
GAME = """
class Game:
    def __init__(self, price):
        self.price = price

    def reset(self, row):
        if row["answer"] == "x":
            raise LookupError("there is no such game")
        self.letter = row["answer"]
        return row["prompt"]

    def step(self, reply):
        if reply == self.letter:
            return {"reward": 1.0, "done": True}
        return {"messages": [{"role": "user", "content": f"not {reply}"}], "reward": -self.price}
"""
SETTINGS: dict[str, Any] = {
    "algorithm": "grpo", "dataset": "questions", "steps": 2, "prompts_per_step": 2, "sampling": {"max_tokens": 3},
    "rollout": {"max_length": 40}, "engine": {"dtype": "float32", "zero_stage": 0}, "probe_tolerance": 100.0,
    "environment": {"type": "function", "path": "game.py", "function": "Game", "options": {"price": 0.25}},
    "grpo": {
        "rewards": {"game": {"type": "environment"}}, "group_size": 2,
        "optimizer": {"learning_rate": 1e-2, "schedule": "constant", "warmup_share": 0.0},
    },
}  # fmt: skip
BY_ROW = {
    "type": "by_row", "column": "task",
    "choices": {
        "game": SETTINGS["environment"],
        "retry": {"type": "retry", "feedback": "not so", "max_turns": 3},
        "plain": {"type": "single_turn"},
    },
}  # fmt: skip
VALIDATION = {"dataset": "held_out", "every_steps": 1, "scorers": {"exact": {"type": "verifier"}}}


def rows(*answers: str) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": f"{i}?"}], "answer": answer} for i, answer in enumerate(answers)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Input:
    return base_model(tmp_path_factory.mktemp("base"))


def run(
    folder: Path,
    model: Input,
    answers: str,
    environment: Mapping[str, Any] = {},
    tasks: Sequence[str] | None = None,
    cluster: InProcessCluster | None = None,
    **settings: Any,
) -> LocalContext:
    """Every prompt is answered `a`, by odd seeds `b`, and `b` once an `a` was wrong; or by the engines of `cluster`."""
    tokenizer = load_tokenizer(model.folder)

    def script(prompt: Sequence[int], seed: int | None) -> Sequence[int]:
        reply = "b" if "not" in tokenizer.decode(list(prompt)) or (seed or 0) % 2 else "a"
        return [*tokenizer(reply, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    questions = rows(*answers)
    if tasks is not None:
        questions = [{**row, "task": task} for row, task in zip(questions, tasks, strict=True)]
    inputs = {"model": model, "dataset": dataset(folder / "questions", questions)}
    if "validation" in settings:
        inputs["validation.dataset"] = dataset(folder / "held_out", rows(*"bbab"))
    folder.mkdir(exist_ok=True)
    (folder / "game.py").write_text(GAME)
    context = replace(context_of(folder / "work", inputs), user_files_root=folder)
    environment = environment if "choices" in environment else {**SETTINGS["environment"], **environment}
    config = RLConfig.model_validate({**SETTINGS, "environment": environment, **settings})
    scripted = InProcessCluster(lambda *_: nullcontext(InlineEngines(ScriptedEngine(script, max_length=40))))
    rl.run(config, inputs, context, cluster or scripted)
    return context


@pytest.mark.parametrize("repeatable", [True, False])
def test_episodes_of_the_users_environment_train_and_validate(model: Input, tmp_path: Path, repeatable: bool) -> None:
    rollout = {"max_length": 40, "repeatable": repeatable}
    first = {"first": {"type": "environment", "threshold": 1.0}}  # who is right at once pays nothing
    validation = {**VALIDATION, "scorers": {**VALIDATION["scorers"], **first}}
    context = run(tmp_path, model, "bb", validation=validation, monitors=first, rollout=rollout)
    assert len(context.logs) == 2
    for _, metrics in context.logs:
        turns = metrics["reward/game/turns"]
        assert 1 <= turns <= 2
        assert metrics["reward"] == pytest.approx(1.0 - 0.25 * (turns - 1))
        # Greedy: `a` is right once in four, and `b`, the second reply, three times.
        assert metrics["validation/pass@1"] == 1.0
        assert metrics["validation/first/pass@1"] == 0.25
        assert metrics["monitor/first"] == pytest.approx(2 - turns)
        assert "environment/failures" not in metrics


@pytest.mark.system
@pytest.mark.slow("RL with vLLM")
def test_turns_that_vllm_samples_are_trained(in_process: InProcessCluster, tmp_path: Path) -> None:
    model = base_model(tmp_path / "base", hidden=64)  # heads of a size that vLLM serves on CPU
    rollout = {"max_length": 60, "cpu_cache_gib": 0.05, "max_sequences": 16}
    environment = {**SETTINGS["environment"], "max_turns": 2}
    sampling = {"max_tokens": 8, "stop": [*"aeimnorst.,;:?!-"]}  # for the weights as drawn hardly end a reply
    context = run(tmp_path, model, "ab", environment, cluster=in_process, steps=1, rollout=rollout, sampling=sampling)
    ((_, metrics),) = context.logs
    assert metrics["trained_completions"] == 4
    assert 1 < metrics["reward/game/turns"] <= 2
    assert -0.5 <= metrics["reward"] <= 1
    assert 0 <= metrics["rollout_mismatch"] < 1e-4  # in all turns, the trainer's log-probs are the engine's


def test_a_failure_ends_the_run_and_is_named_with_row_and_turn(model: Input, tmp_path: Path) -> None:
    with pytest.raises(
        EpisodeError, match=r"environment game.py:Game, row \w+, turn 0: it raised LookupError: .+\nTraceback"
    ):
        run(tmp_path, model, "bx")


@pytest.mark.endurance("rl-matrix")
def test_tolerated_failures_leave_their_prompts_out_and_are_counted(
    model: Input, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout = {"max_length": 40, "repeatable": False}
    context = run(tmp_path, model, "bx", {"tolerated_failures": 0.5}, rollout=rollout)
    for _, metrics in context.logs:
        assert metrics["environment/failures"] == 2
        assert metrics["reward"] > 0.5
    assert "tolerated: environment game.py:Game, row" in capsys.readouterr().out
    with pytest.raises(EpisodeError, match=r"2 of 4 episodes failed, more than the `tolerated_failures` of 0.4 of the"):
        run(tmp_path / "less", model, "bx", {"tolerated_failures": 0.4})


@pytest.mark.slow("four runs of RL")
def test_each_row_is_played_in_the_environment_that_it_names(model: Input, tmp_path: Path) -> None:
    """`c` is never said: its row has as many turns as its environment allows, and what that gives for each."""
    game, retry, plain = (
        run(tmp_path / task, model, "cc", BY_ROW, tasks=[task, task], steps=1).logs[0][1]
        for task in ("game", "retry", "plain")
    )
    assert [of["reward/game/turns"] for of in (game, retry, plain)] == [4, 3, 1]
    assert [of["reward"] for of in (game, retry, plain)] == [-1.0, 0.0, 0.0]
    mixed = run(tmp_path / "mixed", model, "cc", BY_ROW, tasks=["game", "plain"], steps=1).logs[0][1]
    assert mixed["reward/game/turns"] == 2.5


def test_a_row_that_names_no_environment_is_refused_before_anything_is_sampled(model: Input, tmp_path: Path) -> None:
    for tasks, problem in (
        (["game", "gane"], r"row \w+: `task` is 'gane', an unknown environment \(did you mean `game`\?\)"),
        (None, r"row \w+: the column `task` is missing: it names the row's environment, one of game, retry, plain"),
    ):
        with pytest.raises(StageError, match=problem):
            run(tmp_path / str(tasks), model, "bb", BY_ROW, tasks=tasks)
