"""A gate in the graph of a recipe, and gates that are refused before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.errors import RecipeError
from rlhf_core.graph.graph import Node, build_graph
from rlhf_core.graph.outline import outline
from rlhf_core.preflight.look import look
from rlhf_core.recipe.loading import load_recipe
from tests.rlhf_core.graph.gate_recipe import write

pytestmark = pytest.mark.parts  # the preflight asks for model classes


def graph(folder: Path, *overrides: str) -> dict[str, Node]:
    loaded = load_recipe(write(folder), overrides)
    drafts = outline(loaded.recipe)
    look(loaded, drafts)
    return build_graph(loaded, {}, drafts)


def test_a_gate_reads_the_models_and_each_metric_s_evaluations_of_both(tmp_path: Path) -> None:
    nodes = graph(tmp_path)
    assert nodes["gate"].inputs == {
        "candidate": "merge.sft", "baseline": "base",
        "better.exact.evaluation.candidate": "evaluation.sft", "better.exact.evaluation.baseline": "evaluation.base",
        "not_worse.style.evaluation.candidate": "chat.sft", "not_worse.style.evaluation.baseline": "chat.base",
    }  # fmt: skip
    assert nodes["evaluation.sft"].inputs["model"] == "merge.sft"


def test_the_model_of_the_registry_is_no_part_of_the_key_and_what_is_judged_is(tmp_path: Path) -> None:
    key = graph(tmp_path)["gate"].ref
    assert graph(tmp_path, "gate.model=other-bot")["gate"].ref == key
    for change in ("gate.better.exact.by=0.02", "gate.approval=required", "gate.not_worse.style.evaluation=evaluation"):
        assert graph(tmp_path, change)["gate"].ref != key, change


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["gate={candidate: sft, baseline: base}"], "better and not_worse are empty"),
        (["gate.not_worse.exact={than: 0.1}"], "better and not_worse both have `exact`"),
        (["gate.baseline=sft"], "candidate and baseline are both `sft`"),
        (["gate.model=null", "gate.approval=required"], "approval: it is for the candidate of a model"),
        (["gate.model=Bot"], "is not the name of a model: lower-case letters"),
        (["gate.better.exact.by=-0.1"], "scores are|it is a share of 1"),
        (["gate.candidate=stf"], "gate.candidate: no stage `stf` makes a model .did you mean `sft`"),
        (["gate.better.exact.evaluation=evaluate"], "there is no stage `evaluation` called `evaluate` .did you mean"),
        (["evaluation.models=[base]"], "`evaluation` does not evaluate `sft`: add it to evaluation.models"),
        (["gate.better.exakt={}"], "gate.better.exakt.scorer: `evaluation` has no scorer `exakt`; it has exact, style"),
        (["gate.better.exact.completions=sampled"], "gate.better.exact.completions: `evaluation` samples none"),
        (["late={stage: evaluation, dataset: held_out, samples: 0, pass_at: [1], scorers: {exact: {type: verifier}}, "
          "sampling: {max_tokens: 8}, rollout: {max_length: 64}}", "gate.better.exact.evaluation=late"],
         "gate.better.exact.evaluation: `late` comes later in the recipe: move it above"),
    ],
)  # fmt: skip
def test_a_gate_that_could_not_judge(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        graph(tmp_path, *overrides)
