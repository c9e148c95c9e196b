"""Stages without effect: rejected, or noted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.errors import RecipeError
from rlhf_core.pipeline.prepare import check
from tests.rlhf_core.recipes import Change, Problems, both, file, put, write

pytestmark = pytest.mark.parts


def without(*sections: str) -> Change:
    def change(recipe: dict[str, Any], root: Path) -> None:
        for section in sections:
            recipe.pop(section)

    return change


def notes(folder: Path, change: Change | None = None) -> list[str]:
    return list(check(write(folder, change), []).notes)


def test_what_is_allowed_and_probably_not_meant_is_told(tmp_path: Path) -> None:
    by_heart = (
        "`prompts` is trained on (rl.dataset) and tested on (evaluation.dataset): the scores will measure memorisation"
    )
    unused = "no stage reads data.unused"
    assert notes(tmp_path) == [by_heart, unused]
    few = put("sft", "batch_size", value=4)
    assert "sft: `talks` has 1 rows, fewer than batch_size=4: each epoch is one smaller step" in notes(tmp_path, few)
    few = put("rl", "prompts_per_step", value=4)
    assert "rl: `prompts` has 1 rows, fewer than prompts_per_step=4: a step has prompts more than once" in notes(
        tmp_path, few
    )
    from_base = both(put("rl", "model", value="base"), put("reward_model", "model", value="base"))
    unread = both(without("evaluation"), from_base)
    assert notes(tmp_path, unread) == [
        unused,
        "nothing reads the result of `sft`, and it is not the last model of the recipe",
        "no stage `evaluation`: no model of this recipe is evaluated",
    ]


PAIR = {"prompt": "What?", "chosen": "a", "rejected": "b"}
DPO = {"stage": "preference", "dataset": "pairs", "model": "sft", "batch_size": 1, "max_length": 64,
       "optimizer": {"learning_rate": 1e-3}, "losses": {"dpo": {"type": "dpo"}}}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            put("data", "talks", "source", "paths", value=["talks.jsonl", "./talks.jsonl"]),
            ["data.talks: talks.jsonl is named 2 times, so its rows are read as often"],
        ),
        (
            both(
                file("pairs.jsonl", "".join(json.dumps({**PAIR, "prompt": p, "margin": 1}) + "\n" for p in "ab")),
                put("dpo", value=DPO),
                put("evaluation", "models", value=["sft"]),
            ),
            ["dpo.dataset: no loss of this stage reads the `margin` of rows"],
        ),
    ],
)
def test_what_is_said_of_settings_that_are_probably_not_meant(
    tmp_path: Path, change: Change, expected: list[str]
) -> None:
    said = [note for note in notes(tmp_path, change) if "`prompts`" not in note and "unused" not in note]
    said = [note for note in said if not note.startswith("nothing reads the result")]
    assert len(said) == len(expected), said
    assert all(note.startswith(begin) for note, begin in zip(said, expected, strict=True)), said


def test_a_loss_that_reads_margins_needs_them(problems: Problems) -> None:
    rebel = both(
        put("dpo", value={**DPO, "losses": {"rebel": {"type": "rebel"}}}), put("evaluation", "models", value=["sft"])
    )
    having, lacking = (json.dumps({**PAIR, "margin": 1.5}), json.dumps({**PAIR, "prompt": "Who?"}))
    (problem,) = problems(both(file("pairs.jsonl", f"{having}\n{lacking}\n"), rebel))
    assert problem.startswith("dpo.dataset: pairs.jsonl line 2: losses.rebel reads how much better the chosen")
    other = json.dumps({**PAIR, "prompt": "Who?", "margin": 0.5})
    assert problems(both(file("pairs.jsonl", f"{having}\n{other}\n"), rebel)) == []


def test_a_single_pair_cannot_be_held_out(problems: Problems) -> None:
    pair = json.dumps({"prompt": "What?", "chosen": "a", "rejected": "b"})
    (problem,) = problems(file("pairs.jsonl", pair))
    assert problem.startswith(
        "reward_model.dataset: `pairs` has the rows of one prompt, and of the prompts some are held out"
    )


def conditional(**asked: Any) -> Change:
    """Conversations that say their rewards, and prompts that ask for one."""

    def change(recipe: dict[str, Any], root: Path) -> None:
        source = {"type": "files", "paths": ["rewarded.jsonl"]}
        recipe["data"]["rewarded"] = {"format": "completions", "source": source}
        said = {"stage": "conditional", "dataset": "rewarded", "decimals": 2}
        ask = {"stage": "conditional_prompts", "dataset": "prompts", "reward": 2, **asked}
        stages = {name: recipe.pop(name) for name in ("sft", "reward_model", "rl", "evaluation")}
        recipe |= {"said": said, "ask": ask, **stages}

    return change


def test_a_reward_is_asked_for_as_it_was_trained(tmp_path: Path) -> None:
    otherwise = "ask: its `text` or `decimals` is not that of said: the model is asked for a reward in another way"
    assert any(note.startswith(otherwise) for note in notes(tmp_path, conditional()))
    assert not any(note.startswith("ask:") for note in notes(tmp_path, conditional(decimals=2)))


LOGPROBS = {"stage": "logprobs", "model": "sft", "max_length": 64}


@pytest.mark.parametrize(("read", "missing"), [("pairs", False), ("others", True)])
def test_rows_need_the_log_probs_that_are_stored(problems: Problems, read: str, missing: bool) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        (root / "others.jsonl").write_text(json.dumps(PAIR))
        recipe["data"]["others"] = {"format": "preferences", "source": {"type": "files", "paths": ["others.jsonl"]}}
        recipe["stored"] = {**LOGPROBS, "dataset": read}
        recipe["dpo"] = {**DPO, "reference": {"logprobs": ["stored"]}}
        recipe["evaluation"]["models"] = ["rl"]

    said = "dpo.dataset: pairs.jsonl line 1 of `pairs` has no log-probs of the reference: stored has read other rows"
    found = problems(change)
    assert [problem.startswith(said) for problem in found] == [True] * missing, found


PROCESS = {"stage": "process_reward_model", "dataset": "steps", "model": "base", "batch_size": 2, "max_length": 64,
           "optimizer": {"learning_rate": 1e-3}}  # fmt: skip


def stepwise(*labels: list[float]) -> Change:
    """A process reward model of rows with these labels."""

    def change(recipe: dict[str, Any], root: Path) -> None:
        rows = [{"prompt": f"q{i}", "steps": ["a"] * len(each), "labels": each} for i, each in enumerate(labels)]
        (root / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipe["data"]["steps"] = {"format": "stepwise", "source": {"type": "files", "paths": ["steps.jsonl"]}}
        recipe["judge"] = dict(PROCESS)
        recipe["rl"]["ppo"]["rewards"]["judge"] = {"type": "process_reward_model", "model": "judge"}
        for below in ("rl", "evaluation"):
            recipe[below] = recipe.pop(below)
        recipe["evaluation"]["models"] = ["rl"]

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (stepwise([1, 0], [1, 1]), []),
        (stepwise([0.5], [0.25], [0.5]), []),
        (stepwise([1, 0]), ["judge.dataset: `steps` has the rows of one prompt, and of the prompts some are held out"]),
        (both(stepwise([1, 0], [1, 1]), put("judge", "separator", value="a"),
              put("rl", "ppo", "rewards", "judge", "separator", value="a")),
         ["judge.dataset: steps.jsonl line 1: steps[0] holds the separator 'a', so it would be read as several"]),
        (both(stepwise([1, 0], [1, 1]), put("judge", "separator", value="\n\n")),
         ["rl.ppo.rewards.judge: the model was trained on steps that end with '\\n\\n', and is to be read"]),
        (both(stepwise([1, 0], [1, 1]), put("judge", "max_length", value=6)),
         ["judge.dataset: steps.jsonl line 1 in `data.steps` has 9 tokens, more than judge.max_length=6: raise it"]),
    ],
)  # fmt: skip
def test_step_labels_are_looked_at_before_a_job(problems: Problems, change: Change, expected: list[str]) -> None:
    said = problems(change)
    assert len(said) == len(expected), said
    assert all(sentence.startswith(begin) for sentence, begin in zip(said, expected, strict=True)), said


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 2, 3], []),
        ([1, None, 2], ["judge.dataset: steps.jsonl line 2: a completion has no `reward` to learn"]),
    ],
)
def test_rewards_are_looked_at_before_a_job(problems: Problems, rewards: list[Any], expected: list[str]) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        stepwise()(recipe, root)
        rows = [{"prompt": f"q{i}", "completion": "a", "reward": reward} for i, reward in enumerate(rewards)]
        (root / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipe["data"]["steps"]["format"] = "completions"
        recipe["judge"]["stage"] = "reward_regression"

    said = problems(change)
    assert len(said) == len(expected), said
    assert all(sentence.startswith(begin) for sentence, begin in zip(said, expected, strict=True)), said


def test_rows_that_are_not_at_hand_are_tested_on_what_they_train(problems: Problems) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        (root / "rows.py").write_text("def rows():\n    return []\n")
        source = {"type": "function", "path": "rows.py", "function": "rows"}
        recipe["data"]["prompts"] = {"format": "prompts", "source": source}

    (problem,) = problems(change)
    assert problem.startswith("evaluation.dataset: rl.dataset trains on `prompts`, so the scores would")


def test_an_evaluation_needs_a_model(tmp_path: Path) -> None:
    only = without("base", "pretrain", "sft", "reward_model", "rl")
    with pytest.raises(RecipeError, match=r"^evaluation.models: no stage above `evaluation` makes a model"):
        check(write(tmp_path, only), [])
