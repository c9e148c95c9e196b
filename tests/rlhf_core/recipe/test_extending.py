from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from deployments.stack.environment import RECIPES
from rlhf_core.config.data.sources import FilesSource
from rlhf_core.errors import RecipeError
from rlhf_core.graph.graph import build_graph
from rlhf_core.recipe.extending import merged
from rlhf_core.recipe.loading import load_recipe
from tests.rlhf_core.recipes import write

LIBRARIES = {"torch": "1"}


def write_child(folder: Path, text: str) -> str:
    write(folder)
    (folder / "child.yaml").write_text(text)
    return str(folder / "child.yaml")


@pytest.mark.parametrize(
    ("base", "own", "expected"),
    [
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 3, "d": 4}}, {"a": {"b": 1, "c": 3, "d": 4}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": {"b": 1}}, {"a": None}, {"a": None}),
        ({"a": {"type": "x", "b": 1}}, {"a": {"type": "y", "c": 1}}, {"a": {"type": "y", "c": 1}}),
        ({"a": {"type": "x", "b": 1}}, {"a": {"type": "x", "c": 1}}, {"a": {"type": "x", "b": 1, "c": 1}}),
        ({"a": {"b": 1}}, {"a": {"stage": "sft"}}, {"a": {"stage": "sft"}}),
    ],
)
def test_what_counts(base: dict[str, Any], own: dict[str, Any], expected: dict[str, Any]) -> None:
    assert merged(base, own) == expected


def test_a_recipe_extends_another(tmp_path: Path) -> None:
    child = write_child(tmp_path, "extends: recipe\nname: child\nrl: null\nsft: {epochs: 7}\nevaluation: null\n")
    loaded = load_recipe(child, ["sft.batch_size=3"]).recipe
    base = load_recipe(str(tmp_path / "recipe.yaml")).recipe
    assert loaded.name == "child"
    assert list(loaded.blocks) == [name for name in base.blocks if name not in ("rl", "evaluation")]
    assert (loaded.blocks["sft"].epochs, loaded.blocks["sft"].batch_size) == (7, 3)
    assert loaded.blocks["sft"].max_length == base.blocks["sft"].max_length
    assert loaded.data == base.data


def test_new_stages_stand_where_they_are_written(tmp_path: Path) -> None:
    added = "{stage: sft, dataset: talks, batch_size: 1, max_length: 8, optimizer: {learning_rate: 1e-3}}"
    text = f"extends: recipe\nfirst: {added}\nsecond: {added}\nevaluation: {{models: [second]}}\nthird: {added}\n"
    loaded = load_recipe(write_child(tmp_path, text)).recipe
    above = [name for name in load_recipe(write(tmp_path)).recipe.blocks if name != "evaluation"]
    assert list(loaded.blocks) == [*above, "first", "second", "evaluation", "third"]


def test_an_extension_may_be_extended(tmp_path: Path) -> None:
    write_child(tmp_path, "extends: recipe.yaml\nname: child\nsft: {epochs: 7}\n")
    (tmp_path / "grandchild.yaml").write_text("extends: child\nseed: 5\n")
    loaded = load_recipe(str(tmp_path / "grandchild.yaml")).recipe
    assert (loaded.name, loaded.seed, loaded.blocks["sft"].epochs) == ("child", 5, 7)


def test_a_mistake_is_told_where_it_was_written(tmp_path: Path) -> None:
    child = write_child(tmp_path, "extends: recipe\nsft:\n  epochs: many\n")
    with pytest.raises(RecipeError, match=r"child\.yaml line 3: `sft\.epochs`"):
        load_recipe(child)
    write(tmp_path, lambda recipe, folder: recipe["sft"].update(batch_size="many"))
    (tmp_path / "child.yaml").write_text("extends: recipe\nsft:\n  epochs: 2\n")
    with pytest.raises(RecipeError, match=r"recipe\.yaml line \d+: `sft\.batch_size`"):
        load_recipe(child)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: recpie\n", r"recpie\.yaml: there is no such file \(did you mean `recipe`\?\); there are recipe, "),
        (f"extends: {'x' * 300}\n", r"x\.yaml: cannot be read \(File name too long\); there are recipe, "),
        ("extends: tny\n", r"tny\.yaml: there is no such file \(did you mean `tiny`\?\); there are recipe, 1"),
        ("extends: ../recipe\n", "names a recipe of the same folder"),
        ("extends: [recipe]\n", "names a recipe of the same folder, or a shipped one"),
        ("extends: child\n", r"child\.yaml extends this file in turn"),
        ("extends: list\n", "but it is not a recipe"),
        ("extends: broken\n", r"broken\.yaml: line 1"),
    ],
)
def test_what_cannot_be_extended(tmp_path: Path, text: str, message: str) -> None:
    child = write_child(tmp_path, text)
    if "list" in text:
        (tmp_path / "list.yaml").write_text("[1]")
    if "broken" in text:
        (tmp_path / "broken.yaml").write_text("a: 'b")
    with pytest.raises(RecipeError, match=message):
        load_recipe(child)


def test_a_long_chain_is_cut(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"r{number}.yaml").write_text(f"extends: r{number + 1}\n")
    with pytest.raises(RecipeError, match=r"more than 20 recipes extend one another: join some of them$"):
        load_recipe(str(tmp_path / "r0.yaml"))


def test_two_that_extend_each_other(tmp_path: Path) -> None:
    child = write_child(tmp_path, "extends: other\n")
    (tmp_path / "other.yaml").write_text("extends: child\n")
    with pytest.raises(RecipeError, match=r"other\.yaml: `extends`: child\.yaml extends this file in turn"):
        load_recipe(child)


def test_a_shipped_recipe_is_extended_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def reward(completions, prompts, rows):\n    return [1.0] * len(prompts)\n")
    own = "extends: tiny\nname: mine\nrl: {steps: 3, grpo: {rewards: {own: {type: function, path: reward.py}}}}\n"
    (tmp_path / "mine.yaml").write_text(own)
    graph = build_graph(load_recipe(str(tmp_path / "mine.yaml")), LIBRARIES)
    shipped = build_graph(load_recipe("tiny"), LIBRARIES)
    same = [name for name in shipped if name in graph and graph[name].ref == shipped[name].ref]
    assert {"data.text", "data.prompts", "pretrain", "sft", "evaluation.sft"} <= set(same)
    assert graph["rl"].user_files.keys() == {"reward.py", "tiny_tasks.py"}


def test_a_file_of_the_own_folder_comes_before_one_of_the_extended_recipe(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text("extends: tiny\n")  # of its own name, too
    (tmp_path / "tiny_tasks.py").write_text("def conversations(seed, size):\n    return []\n")
    loaded = load_recipe(str(tmp_path / "tiny.yaml"))
    assert loaded.root / "tiny_tasks.py" == tmp_path / "tiny_tasks.py"
    assert loaded.root / "tiny_game.py" == RECIPES / "tiny_game.py"
    assert loaded.root / "nowhere.py" == tmp_path / "nowhere.py"
    assert pickle.loads(pickle.dumps(loaded.root)) / "tiny_game.py" == RECIPES / "tiny_game.py"


def test_a_pattern_of_an_extended_recipe_is_found_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shipped").mkdir()
    child = write_child(tmp_path / "shipped", "extends: recipe\n")
    change = "data: {talks: {source: {paths: ['talk*.jsonl']}}}\n"
    Path(child).write_text(f"extends: recipe\n{change}")
    monkeypatch.setenv("ALIGNMENT_RECIPES", str(tmp_path / "shipped"))
    (tmp_path / "mine.yaml").write_text("extends: child\n")
    source = load_recipe(str(tmp_path / "mine.yaml")).recipe.data["talks"].source
    assert isinstance(source, FilesSource)
    assert source.paths == ("talks.jsonl",)
