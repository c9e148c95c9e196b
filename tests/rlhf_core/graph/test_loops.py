"""The graph of a loop's round, and loops without effect."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from rlhf_core.artifacts.manifest import ArtifactRef, Kind, Manifest
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.rounds import RoundStart
from rlhf_core.errors import RecipeError
from rlhf_core.graph.graph import Node, build_graph
from rlhf_core.graph.outline import outline
from rlhf_core.preflight.rounds import check_round
from rlhf_core.recipe.loading import load_recipe

pytestmark = pytest.mark.parts

RECIPE = """
name: bot
data:
  talks: {format: conversations, source: &source {type: function, path: tasks.py, function: rows}, on_overlap: allow}
  fresh: {format: prompts, source: *source, on_overlap: allow}
  held_out: {format: prompts, source: *source}
base: {source: {type: scratch}}
sft: {dataset: talks, batch_size: 2, max_length: 64, optimizer: {learning_rate: 1e-3}, lora: {rank: 4}}
sampled:
  stage: generate
  dataset: fresh
  model: accepted
  sampling: {max_tokens: 8}
  rollout: {max_length: 64}
  rewards: {exact: {type: verifier}}
pairs: {dataset: sampled}
dpo:
  stage: preference
  dataset: pairs
  model: accepted
  reference: {model: sft}
  losses: {dpo: {type: dpo}}
  batch_size: 2
  max_length: 64
  optimizer: {learning_rate: 1e-3}
evaluation:
  dataset: held_out
  models: [accepted, dpo]
  samples: 0
  pass_at: [1]
  scorers: {exact: {type: verifier}}
  sampling: {max_tokens: 8}
  rollout: {max_length: 64}
loop: {start: sft, candidate: dpo, prompts: fresh, prompts_per_round: 2}
report: null
"""
ACCEPTED, BEFORE, NOW = (
    ArtifactRef(stage=stage, key=digit * 64)
    for stage, digit in (("preference", "1"), ("round_prompts", "2"), ("round_prompts", "3"))
)
LATER = RoundStart(
    number=4, accepted=ACCEPTED, alias_sequence=2, previous_prompts=BEFORE, started_at=datetime.now(UTC), run_id="run"
)


def find(text: str) -> Manifest:
    stage, _, key = text.partition("/")
    if key == NOW.key:
        raise RecipeError("it was never computed")
    kind = Kind.DATASET if stage == "round_prompts" else Kind.POLICY
    return Manifest(
        kind=kind, name="", stage=stage, key=key, files=(), parents={}, config={"format": "prompts"}, seed=0,
        code_revision="", libraries={}, device_seconds=0, device="cpu",
        started_at=datetime.now(UTC), finished_at=datetime.now(UTC),
    )  # fmt: skip


def graph(folder: Path, *overrides: str, start: RoundStart | None = None) -> dict[str, Node]:
    (folder / "tasks.py").write_text("")
    (folder / "bot.yaml").write_text(RECIPE)
    loaded = load_recipe(str(folder / "bot.yaml"), overrides)
    return build_graph(loaded, {}, outline(loaded.recipe, find, start))


def test_the_first_round_starts_from_the_stage_that_the_loop_names(tmp_path: Path) -> None:
    nodes = graph(tmp_path)
    assert nodes["accepted"].ref == nodes["merge.sft"].ref
    assert nodes["round_prompts"].inputs == {"dataset": "data.fresh"}
    assert nodes["sampled"].inputs == {"dataset": "round_prompts", "model": "accepted"}
    assert nodes["dpo"].inputs == {"dataset": "pairs", "model": "accepted", "reference.model": "merge.sft"}
    assert nodes["round"].inputs == {
        "accepted": "accepted", "candidate": "dpo", "prompts": "round_prompts",
        "accepted_evaluation": "evaluation.accepted", "candidate_evaluation": "evaluation.dpo",
    }  # fmt: skip


def test_a_gate_with_a_bound_against_the_start_reads_its_evaluation(tmp_path: Path) -> None:
    bounded = "loop.gate.start_margin=0.1"
    with pytest.raises(RecipeError, match="`evaluation` does not evaluate `sft`: add it"):
        graph(tmp_path, bounded)
    models = "evaluation.models=[sft,accepted,dpo]"
    first, later = (graph(tmp_path, bounded, models, start=start) for start in (None, LATER))
    assert later["round"].inputs["start_evaluation"] == "evaluation.sft"
    assert first["evaluation.accepted"].ref == first["evaluation.sft"].ref == later["evaluation.sft"].ref


def test_a_later_round_starts_from_the_accepted_model_on_prompts_after_those_before(tmp_path: Path) -> None:
    first, nodes = graph(tmp_path), graph(tmp_path, start=LATER)
    assert nodes["accepted"].ref == ACCEPTED
    assert nodes["previous_prompts"].ref == BEFORE
    assert nodes["round_prompts"].inputs == {"dataset": "data.fresh", "previous": "previous_prompts"}
    assert nodes["dpo"].input_refs["reference.model"] == first["merge.sft"].ref
    assert nodes["data.fresh"].ref == first["data.fresh"].ref
    assert nodes["sampled"].ref != first["sampled"].ref


def test_a_round_keeps_prompts_that_it_has_and_computes_those_that_it_has_not(tmp_path: Path) -> None:
    has = LATER.model_copy(update={"prompts": BEFORE})
    more = "loop.prompts_per_round=3"
    assert graph(tmp_path, more, start=has)["round_prompts"].ref == BEFORE
    computed = graph(tmp_path, start=LATER)["round_prompts"].ref
    has_not = LATER.model_copy(update={"prompts": NOW})
    assert graph(tmp_path, start=has_not)["round_prompts"].ref == computed
    assert graph(tmp_path, more, start=has_not)["round_prompts"].ref not in (computed, NOW)


def test_an_alias_that_a_person_pointed_at_no_model_is_refused(tmp_path: Path) -> None:
    pairs = LATER.model_copy(update={"accepted": BEFORE})
    with pytest.raises(RecipeError, match=r"the alias bot/accepted points at round_prompts/2+, which is of the"):
        graph(tmp_path, start=pairs)


def test_a_round_without_enough_prompts_is_refused_before_its_first_job(tmp_path: Path, local_store_url: str) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "data.jsonl").write_text("{}")
    repository = ArtifactRepository(open_store(local_store_url))
    before = find(f"{BEFORE.stage}/{BEFORE.key}").model_copy(update={"metrics": {"rows": 2, "used_before": 2}})
    repository.publish(before, tmp_path / "made")
    nodes = graph(tmp_path, start=LATER)
    recipe = load_recipe(str(tmp_path / "bot.yaml")).recipe
    assert list(check_round(recipe, nodes, LATER, {"fresh": 6}, repository)) == [
        f"round 4 of bot: from {ACCEPTED}; 4 prompts were used before"
    ]
    with pytest.raises(RecipeError) as caught:
        list(check_round(recipe, nodes, LATER, {"fresh": 5}, repository))
    assert str(caught.value) == (
        "data.fresh: a round needs 2 prompts that no earlier one had, and 1 are left after 4 were used: add rows to "
        "the loop's dataset, or lower loop.prompts_per_round"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loop.start=stf"], "loop.start: there is no stage `stf` (did you mean `sft`?); there are base, sft, sampled"),
        (["loop.start=pairs", "sampled.model=sft", "dpo.model=sft"], "loop.start: `pairs` makes no model"),
        (["loop.candidate=dpp"], "loop.candidate: no stage `dpp` makes a model (did you mean `dpo`?)"),
        (["dpo.model=sft", "sampled.model=sft"], "loop.candidate: `dpo` is not made from `accepted`, so each round"),
        (["loop.prompts=frsh"], "loop.prompts: there is no dataset `frsh` in `data` (did you mean `fresh`?)"),
        (["loop.prompts=talks"], "loop.prompts: `talks` has the format conversations, and a round needs prompts"),
        (["loop.prompts=held_out"], "loop.prompts: `dpo` is made without `held_out`: name it as the dataset"),
        (["loop.start=dpo", "dpo.model=sft", "sampled.model=sft"], "loop.prompts: `dpo`, from which the first round"),
        (["loop.gate.evaluation=eval"], "loop.gate.evaluation: there is no stage `evaluation` called `eval` (did "),
        (["evaluation.models=[dpo]"], "loop.gate.evaluation: `evaluation` does not evaluate `accepted`: add it to"),
        (["loop.gate.scorer=exakt"], "loop.gate.scorer: `evaluation` has no scorer `exakt`; it has exact"),
        (["loop.gate.completions=sampled"], "loop.gate.completions: `evaluation` samples none: raise"),
        (["accepted={stage: artifact, ref: a/b}"], "`accepted` is reserved for the model that the loop accepted last"),
        (["loop="], "sampled.model: no stage `accepted` makes a model"),
    ],
)
def test_a_loop_that_would_not_do_what_it_is_there_for(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        graph(tmp_path, *overrides)
    assert str(caught.value).startswith(message)
