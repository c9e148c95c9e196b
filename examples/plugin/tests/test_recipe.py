"""The recipe of this plugin, as its users write it."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.pipeline.prepare import check

RECIPE = Path(__file__).parents[1] / "recipe.yaml"
VERSION = {"alignment-example": "1.0"}


def test_the_recipe_can_be_run_and_its_nodes_name_the_plugin() -> None:
    graph = check(str(RECIPE), []).graph
    plugins = {name: node.plugins for name, node in graph.items()}
    using = {"data.riddles", "data.questions", "measure", "far", "rl"}
    assert using <= plugins.keys()
    assert {name for name, versions in plugins.items() if versions} == using
    assert all(plugins[name] == VERSION for name in using)
