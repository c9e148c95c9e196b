"""Rows with images are rejected before a job starts if a stage or a model reads text only; their files have keys."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.data.dataset import DatasetConfig
from rlhf_core.errors import RecipeError
from rlhf_core.graph.user_files import user_files
from tests.rlhf_core.pictures import picture
from tests.rlhf_core.recipes import OPTIMIZER, Change, Problems, both, file, put

pytestmark = pytest.mark.endurance("architectures")

IMAGE = "data:image/png;base64," + base64.b64encode(picture("red")).decode()
TALKS = file("talks.jsonl", json.dumps({"prompt": "colour?", "completion": "red", "image": IMAGE}))
PAIRS = file("pairs.jsonl", json.dumps({"prompt": "colour?", "chosen": "red", "rejected": "blue", "image": IMAGE}))
PROMPTS = file("prompts.jsonl", json.dumps({"prompt": "colour?", "answer": "red", "image": IMAGE}))
SEES = put("base", "source", value={"type": "scratch", "context_length": 64, "vision": {}})
SAMPLED = {
    "stage": "generate", "dataset": "prompts", "rewards": {"exact": {"type": "verifier"}},
    "sampling": {"max_tokens": 8}, "rollout": {"max_length": 64},
}  # fmt: skip
LEARNS = {"stage": "preference", "batch_size": 1, "max_length": 64, "optimizer": OPTIMIZER,
          "losses": {"dpo": {"type": "dpo"}}}  # fmt: skip
GRPO = {"rewards": {"own": {"type": "function", "path": "rewards.py"}}, "optimizer": OPTIMIZER}


def seeing(*changes: Change) -> Change:
    """The recipe's model reads images, and is trained by GRPO."""

    def change(recipe: dict[str, Any], root: Path) -> None:
        for stage in ("pretrain", "reward_model"):
            del recipe[stage]
        recipe["rl"] |= {"algorithm": "grpo", "grpo": GRPO}
        del recipe["rl"]["ppo"]

    return both(SEES, TALKS, PROMPTS, change, *changes)


def test_stages_that_read_images_take_them(problems: Problems) -> None:
    dpo = {**LEARNS, "dataset": "pairs", "validation": {"dataset": "pairs", "every_steps": 1}}
    found = problems(seeing(PAIRS, put("dpo", value=dpo)))
    assert [each for each in found if "image" in each] == []
    assert problems(seeing()) == []


def test_flex_attention_is_for_text(problems: Problems) -> None:
    flex = both(
        put("sft", "engine", value={"attention": "flex"}), put("sft", "placement", value={"gpus_per_worker": 1})
    )
    sentence = "sft.engine.attention: flex was not tested with models that read images: set sdpa"
    assert sentence in problems(seeing(flex))
    assert not any("flex" in problem for problem in problems(flex))


def playing(kind: str, *, row: str | None = None, **settings: Any) -> Change:
    """A program of the user's plays the episodes; with `row` those of rows without images, beside rows with images,
    whose environment is `row`."""
    files = {
        "agent": "def run(row, base_url, api_key):\n    return 1.0\n",
        "executor": "def run(engine, row):\n    return 1.0\n",
        "openrlhf": "class Agent:\n    async def step(self, states, **kwargs):\n        return {}\n",
    }
    environment: Any = {"type": kind, "path": "plays.py"}
    if kind == "openrlhf":
        environment |= {"type": "executor", "form": kind, "function": "Agent"}
    if row is not None:
        environment = {"type": "by_row", "choices": {"single": {"type": "single_turn"}, "program": environment}}
    shows, tells = {"prompt": "colour?", "answer": "red"}, {"prompt": "1 + 1?", "answer": "2", "environment": "program"}
    return seeing(
        file("prompts.jsonl", "\n".join(map(json.dumps, [tells, {**shows, "environment": row, "image": IMAGE}]))),
        file("plays.py", files[kind]),
        put("rl", "environment", value=environment),
        put("rl", "rollout", "repeatable", value=False),
        put("rl", "grpo", "mismatch", value=None),
        *(put("rl", name, value=value) for name, value in settings.items()),
    )


@pytest.mark.parametrize("kind", ["agent", "executor"])
def test_programs_are_given_the_images_of_their_rows(problems: Problems, kind: str) -> None:
    assert problems(playing(kind)) == []
    assert problems(playing(kind, asynchronous={"max_lag": 1})) == []


@pytest.mark.parametrize("kind", ["agent", "openrlhf"])
def test_what_cannot_show_images_plays_the_rows_without_beside_others_with_them(problems: Problems, kind: str) -> None:
    assert problems(playing(kind, row="single", asynchronous={"max_lag": 1})) == []


def test_rows_whose_environment_there_is_not_are_one_problem(problems: Problems) -> None:
    assert [each[:60] for each in problems(playing("openrlhf", row="singel"))] == [
        "rl.environment: `environment` is 'singel', an unknown environment (did you mean `single`?)"[:60]
    ]


def test_images_go_on_to_what_is_made_of_completions(problems: Problems) -> None:
    stages = {
        "sampled": SAMPLED,
        "better": {"stage": "pairs", "dataset": "sampled"},
        "dpo": {**LEARNS, "dataset": "better"},
        "best": {"stage": "best_of_n", "dataset": "sampled"},
        "labels": {"stage": "unpaired", "dataset": "sampled", "threshold": 0.5},
        "kto": {"stage": "kto", "dataset": "labels", "batch_size": 2, "max_length": 64, "optimizer": OPTIMIZER},
        "tuned": {"stage": "sft", "dataset": "best", "batch_size": 1, "max_length": 64, "optimizer": OPTIMIZER},
    }
    seeing_more = [put(name, value=value) for name, value in stages.items()]
    seeing_more.append(put("evaluation", "models", value=["rl"]))
    assert problems(seeing(*seeing_more)) == []
    top = {"stage": "top_logprobs", "dataset": "best", "k": 2, "max_length": 64}
    found = problems(seeing(*seeing_more, put("top", value=top)))
    assert len(found) == 1
    assert found[0].startswith(
        "top.dataset: prompts.jsonl line 1 in `data.prompts` has images, which `best` keeps, and top reads text alone"
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (TALKS, "sft.dataset: talks.jsonl line 1 in `data.talks` has images, and its model reads text alone: take a"),
        (PROMPTS, "rl.dataset: prompts.jsonl line 1 in `data.prompts` has images, and its model reads text alone"),
        (
            seeing(put("top", value={"stage": "top_logprobs", "dataset": "talks", "k": 2, "max_length": 64})),
            "top.dataset: talks.jsonl line 1 in `data.talks` has images, and top reads text alone: give it rows",
        ),
        (
            both(SEES, PROMPTS, put("sampled", value={**SAMPLED, "rewards": {"taste": {"type": "reward_model"}}})),
            "sampled.dataset: prompts.jsonl line 1 in `data.prompts` has images, and sampled.rewards.taste reads text",
        ),
        (
            playing("openrlhf"),
            "rl.dataset: prompts.jsonl line 2 in `data.prompts` has images, and rl.environment reads text alone: leave",
        ),
        (
            playing("openrlhf", row="program"),
            "rl.dataset: prompts.jsonl line 2 in `data.prompts` has images, and rl.environment reads text alone: leave",
        ),
        (
            seeing(put("base", "source", "vision", value={"image_size": 60})),
            "base.source: vision.image_size=60 must be a multiple of patch_size=14 times scale_factor=2",
        ),
        (
            seeing(put("base", "source", "words", value=["<image>"])),
            "base.source: words: <image> is a special token already",
        ),
        (
            seeing(put("data", "talks", "images", value={"max_pixels": 100})),
            "data.talks: talks.jsonl line 1: `image` has 40 x 30 pixels, more than images.max_pixels=100",
        ),
    ],
)
def test_what_cannot_be_read_is_one_sentence(problems: Problems, change: Change, expected: str) -> None:
    assert any(problem.startswith(expected) for problem in problems(change)), problems(change)


def test_the_files_that_rows_name_are_part_of_the_key(tmp_path: Path) -> None:
    (tmp_path / "pictures" / "a").mkdir(parents=True)
    config = DatasetConfig.model_validate_json(
        json.dumps({
            "format": "prompts", "source": {"type": "files", "paths": ["p.jsonl"]}, "images": {"folder": "pictures"},
        })
    )  # fmt: skip
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "x", "image": "a/red.png"}))
    with pytest.raises(RecipeError, match=r"images.folder: pictures: this folder has no file that ends in .png"):
        user_files(config, tmp_path)
    (tmp_path / "pictures" / "a" / "red.png").write_bytes(picture("red"))
    first = user_files(config, tmp_path)
    assert list(first) == ["p.jsonl", "pictures/a/red.png"]
    (tmp_path / "pictures" / "a" / "red.png").write_bytes(picture("blue"))
    assert user_files(config, tmp_path) != first
