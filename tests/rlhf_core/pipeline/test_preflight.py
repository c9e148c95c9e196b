from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from rlhf_core.config.loading import load_recipe, shipped_recipes
from rlhf_core.data.tokenizers import word_level_tokenizer
from rlhf_core.errors import RecipeError
from rlhf_core.pipeline.preflight import preflight

QUESTION = "What is two and two?"  # 20 characters; as a prompt 20 + <bos> <user> <assistant>
OPTIMIZER = {"learning_rate": 1e-3}
RECIPE: dict[str, Any] = {
    "name": "check",
    "data": {
        "text": {"format": "text", "source": {"type": "files", "paths": ["text.jsonl"]}},
        "talks": {"format": "conversations", "source": {"type": "files", "paths": ["talks.jsonl"]}},
        "pairs": {"format": "preferences", "source": {"type": "files", "paths": ["pairs.jsonl"]}},
        "prompts": {"format": "prompts", "source": {"type": "files", "paths": ["prompts.jsonl"]}},
        "unused": {"format": "text", "source": {"type": "files", "paths": ["nowhere.jsonl"]}},
    },
    "base": {"source": {"type": "scratch", "context_length": 64}},
    "pretrain": {"dataset": "text", "batch_size": 1, "max_length": 64, "optimizer": OPTIMIZER},
    "sft": {"dataset": "talks", "batch_size": 1, "max_length": 64, "optimizer": OPTIMIZER},
    "reward_model": {"dataset": "pairs", "batch_size": 1, "max_length": 64, "optimizer": OPTIMIZER},
    "rl": {
        "algorithm": "ppo",
        "dataset": "prompts",
        "steps": 1,
        "prompts_per_step": 1,
        "sampling": {"max_tokens": 8},
        "rollout": {"max_length": 64},
        "ppo": {
            "rewards": {"own": {"type": "function", "path": "rewards.py"}},
            "optimizer": OPTIMIZER,
            "critic_optimizer": OPTIMIZER,
        },
    },
    "evaluation": {
        "dataset": "prompts",
        "scorers": {"exact": {"type": "verifier"}},
        "sampling": {"max_tokens": 8},
        "rollout": {"max_length": 64},
    },
}
FILES = {
    "text.jsonl": [{"text": "x" * 500}],
    "talks.jsonl": [{"prompt": QUESTION, "completion": "four"}],
    "pairs.jsonl": [{"prompt": QUESTION, "chosen": "four", "rejected": "five"}],
    "prompts.jsonl": [{"prompt": QUESTION, "answer": "four"}],
}

Change = Callable[[dict[str, Any], Path], None]


@pytest.fixture
def problems(tmp_path: Path) -> Callable[[Change | None], list[str]]:
    """What preflight says of the good recipe after a change to it, or to its files."""
    for name, rows in FILES.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text("def reward(completions, prompts, rows):\n    return [0.0] * len(prompts)\n")

    def check(change: Change | None) -> list[str]:
        recipe = copy.deepcopy(RECIPE)
        if change is not None:
            change(recipe, tmp_path)
        with (tmp_path / "recipe.yaml").open("w") as file:
            YAML(typ="safe").dump(json.loads(json.dumps(recipe)), file)
        loaded = load_recipe(str(tmp_path / "recipe.yaml"))
        try:
            preflight(loaded)
        except RecipeError as error:
            return str(error).splitlines()
        return []

    return check


def put(*keys: str, value: Any) -> Change:
    """Sets recipe[key][key]... to `value`."""

    def change(recipe: dict[str, Any], root: Path) -> None:
        for key in keys[:-1]:
            recipe = recipe[key]
        recipe[keys[-1]] = value

    return change


def file(name: str, content: str) -> Change:
    def change(recipe: dict[str, Any], root: Path) -> None:
        (root / name).write_text(content)

    return change


def gym(**source: Any) -> Change:
    settings = {"type": "reasoning_gym", "size": 5, "seed": 1, "tasks": {"spell_backward": {}}} | source
    return put("data", "prompts", "source", value=settings)


def test_a_right_recipe_passes(problems: Callable[[Change | None], list[str]]) -> None:
    assert problems(None) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda r, root: (root / "talks.jsonl").unlink(),
            "data.talks: talks.jsonl: there is no such file (looked for /",
        ),
        (put("data", "talks", "source", "paths", value=["."]), "data.talks: .: files must end in .json"),
        (file("talks.jsonl", "\n"), "data.talks: talks.jsonl: the file has no rows"),
        (file("talks.jsonl", '{"prompt": "a", "completion": "b"}\noops\n'), "data.talks: talks.jsonl line 2: not JSON"),
        (
            file("prompts.jsonl", '{"promt": "a"}\n'),
            "data.prompts: prompts.jsonl line 1: no column `prompt`, did you mean `promt`?; it has promt",
        ),
        (
            put("data", "prompts", "columns", value={"prompt": "ask"}),
            "prompts.jsonl line 1: no column `ask`; it has answer",
        ),
        (put("data", "talks", "source", value=None), "data.talks: names neither `source` nor `mix`"),
        (put("data", "talks", "exclude", value=["talks"]), "data.talks.exclude: a dataset cannot exclude itself"),
        (
            put("data", "talks", "exclude", value=["unused"]),
            "data.unused: nowhere.jsonl: there is no such file",
        ),
        (
            put("sft", "dataset", value="prompts"),
            "sft.dataset: `prompts` has the format prompts, sft needs conversations",
        ),
        (put("rl", "dataset", value="pairs"), "rl.dataset: `pairs` has the format preferences, rl needs prompts"),
        (put("rl", "dataset", value="text"), "rl.dataset: `text` has the format text, rl needs prompts"),
        (
            put("data", "talks", "source", value={"type": "function", "path": "rewards.py", "function": "rewrad"}),
            "data.talks: rewards.py: there is no function `rewrad` in this file, did you mean `reward`?",
        ),
        (
            file("rewards.py", "def reward(\n"),
            "rl.ppo.rewards.own: rewards.py: syntax error in line 1: '(' was never closed",
        ),
        (file("rewards.py", "x = 1\n"), "rl.ppo.rewards.own: rewards.py: there is no function `reward`"),
        (put("rl", "ppo", "rewards", "own", "path", value="no.py"), "rl.ppo.rewards.own: no.py: cannot be read (No such file"),
        (
            put("evaluation", "scorers", "exact", "pattern", value="abc"),
            "evaluation.scorers.exact: pattern 'abc' has no group",
        ),
        (
            file("prompts.jsonl", json.dumps({"prompt": "a"})),
            "evaluation.scorers.exact: the verifier `exact` needs the column `answer`, "
            "which `data.prompts` lacks at prompts.jsonl line 1",
        ),
        (
            put("evaluation", "scorers", "exact", "kind", value="reasoning_gym"),
            "the verifier `reasoning_gym` needs the column `task`",
        ),
        (gym(tasks={"spell_bakward": {}}), "data.prompts: reasoning_gym has no task `spell_bakward`, did you mean"),
        (gym(tasks={"chain_sum": {"min_term": 1}}), "`chain_sum` has no option `min_term`, did you mean `min_terms`?"),
        (put("base", "source", "heads", value=3), "base.source: hidden_size=128 must be heads=3 times an even number"),
        (put("base", "source", "words", value=["<eos>"]), "base.source: words: <eos> is a special token already"),
        (put("sft", "max_length", value=65), "sft.max_length=65 is more than the model's context of 64 tokens"),
        (put("pretrain", "max_length", value=65), "pretrain.max_length=65 is more than the model's context of 64"),
        (
            put("rl", "rollout", "max_length", value=65),
            "rl.rollout.max_length=65 is more than the model's context of 64",
        ),
        (
            put("evaluation", "sampling", "max_tokens", value=64),
            "evaluation.sampling.max_tokens=64 leaves no room for a prompt in evaluation.rollout.max_length=64",
        ),
        (
            put("rl", "rollout", "max_length", value=30),
            "rl.dataset: the prompt of prompts.jsonl line 1 in `data.prompts` has 23 tokens; "
            "with rl.sampling.max_tokens=8 that is more than rl.rollout.max_length=30: raise it to 31, ",
        ),
        (
            put("sft", "max_length", value=27),
            "sft.dataset: talks.jsonl line 1 in `data.talks` has 28 tokens, more than sft.max_length=27",
        ),
        (
            put("reward_model", "max_length", value=27),
            "reward_model.dataset: pairs.jsonl line 1 in `data.pairs` has 28 tokens",
        ),
        (
            put("data", "prompts", "source", value={"type": "files", "paths": ["talks.jsonl", "text.jsonl"]}),
            "data.prompts: text.jsonl line 1: no column `prompt`",
        ),
        (
            file(
                "talks.jsonl",
                json.dumps({"messages": [{"role": "system", "content": "x"}, {"role": "assistant", "content": "y"}]}),
            ),
            "sft.dataset: `talks`: the chat template refuses a conversation: this model knows user",
        ),
    ],
)
def test_one_thing_wrong_is_one_sentence(
    problems: Callable[[Change | None], list[str]], change: Change, expected: str
) -> None:
    said = problems(change)
    assert any(expected in problem for problem in said), said


def test_the_longest_row_is_found_wherever_it_is(problems: Callable[[Change | None], list[str]]) -> None:
    rows = [{"prompt": "a", "answer": "b"}] * 3000
    rows[2345] = {"prompt": "x" * 60, "answer": "b"}
    said = problems(file("prompts.jsonl", "\n".join(map(json.dumps, rows))))
    assert [problem.partition(" in `data.prompts` has")[0] for problem in said] == [
        "rl.dataset: the prompt of prompts.jsonl line 2346",
        "evaluation.dataset: the prompt of prompts.jsonl line 2346",
    ]


def test_generated_prompts_are_measured(problems: Callable[[Change | None], list[str]]) -> None:
    said = problems(gym(tasks={"word_sorting": {}}))
    assert said[0].startswith("rl.dataset: the prompt of word_sorting item ")
    assert "more than rl.rollout.max_length=64" in said[0]


def test_all_problems_are_said_at_once(problems: Callable[[Change | None], list[str]]) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        (root / "talks.jsonl").unlink()
        (root / "rewards.py").write_text("")
        recipe["base"]["source"]["heads"] = 3

    assert [problem.partition(":")[0] for problem in problems(change)] == ["data.talks", "rl.ppo.rewards.own", "base.source"]


def test_what_no_stage_uses_is_not_checked(problems: Callable[[Change | None], list[str]]) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        (root / "pairs.jsonl").unlink()
        recipe["rl"] |= {"algorithm": "grpo", "grpo": {"rewards": {"exact": {"type": "verifier"}}, "optimizer": OPTIMIZER}}
        recipe["rl"]["ppo"]["rewards"]["own"]["path"] = "no.py"

    assert problems(change) == []


def model_folder(root: Path) -> None:
    folder = root / "model"
    word_level_tokenizer((), 64).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 64}))
    (folder / "model.safetensors").write_bytes(b"weights")


@pytest.mark.parametrize(
    ("break_it", "expected"),
    [
        (
            lambda folder: (folder / "config.json").unlink(),
            "base.source.path: model: there is no config.json in this folder",
        ),
        (lambda folder: (folder / "config.json").write_text("{"), "model: config.json is not JSON"),
        (lambda folder: (folder / "config.json").write_text("{}"), "model: config.json does not name a model_type"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "model: model.safetensors is empty"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "model: there are no weights in this folder: model.safetensors, or model.safetensors.index.json with its "
            "shards (pytorch_model.bin cannot be used: convert to safetensors)",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "m-1.safetensors"}}'
            ),
            "model: of the weights, m-1.safetensors that model.safetensors.index.json names is missing",
        ),
        (lambda folder: (folder / "tokenizer.json").unlink(), "model: there is no tokenizer.json"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "model: the tokenizer has no chat template"),
        (lambda folder: folder.rename(folder.with_name("moved")), "model: there is no such folder (looked for /"),
    ],
)
def test_a_model_folder_that_is_not_whole(
    problems: Callable[[Change | None], list[str]], break_it: Callable[[Path], None], expected: str
) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        recipe["base"]["source"] = {"type": "folder", "path": "model"}
        model_folder(root)
        break_it(root / "model")

    said = problems(change)
    assert len(said) == 1
    assert expected in said[0]


def test_lengths_are_measured_with_a_folders_tokenizer(problems: Callable[[Change | None], list[str]]) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        recipe["base"]["source"] = {"type": "folder", "path": "model"}
        recipe["rl"]["rollout"]["max_length"] = 30
        recipe["sft"]["max_length"] = 100
        model_folder(root)

    said = problems(change)
    assert [problem.partition(":")[0] for problem in said] == [
        "sft.max_length=100 is more than the model's context of 64 tokens",
        "rl.dataset",
    ]


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_pass_without_torch(name: str) -> None:
    code = (
        "import sys\nfrom rlhf_core.config.loading import load_recipe\n"
        "from rlhf_core.pipeline.preflight import preflight\n"
        f"preflight(load_recipe({name!r}))\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
