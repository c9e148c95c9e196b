"""Which stages draw random numbers: their keys have the seed, and the others cannot read one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.spec import StageSpec
from rlhf_core.config.data.dataset import DatasetConfig
from rlhf_core.errors import RecipeError, StageError
from rlhf_core.graph.graph import Node, build_graph
from rlhf_core.recipe.loading import load_recipe
from rlhf_core.stages.job_context import JobContext
from rlhf_core.stages.key import stage_key
from rlhf_core.stages.table import STAGES

LIBRARIES = {"lm-eval": "1"}
# Recipes that have every stage between them.
TOP = "{stage: top_logprobs, dataset: conversations, max_length: 64}"
GATE = "gate={candidate: dpo, baseline: sft, better: {exact: {}}}"
SCORED = "scored={stage: score, dataset: sampled, rewards: {short: {type: verifier}}}"
JUDGE = "{type: rubric, url: 'http://127.0.0.1:9/v1', model: judge, path: tiny_tasks.py}"
CALIBRATED = f"calibration={{dataset: prompts, reward: {JUDGE}}}"
RECIPES = {
    "tiny": (CALIBRATED, "rl.algorithm=ppo", "data.prompts.shuffle=false"),
    "tiny-benchmark": (),
    "tiny-best-of-n": ("judged={stage: unpaired, dataset: sampled, threshold: 0.5}", SCORED),
    "tiny-conditional": (),
    "tiny-distillation": (f"top={TOP}",),
    "tiny-kto": (),
    "tiny-dpo": (GATE,),
    "tiny-loop": (),
    "tiny-merge": (),
    "tiny-online-dpo": (),
    "tiny-process": (),
    "tiny-ratings": (),
    "smollm2-dpo": ("dpo.lora.quantised=nf4",),
}
# True for stages whose nodes draw random numbers; both, where it depends on their settings.
DRAWS = {
    **{name: {True} for name in STAGES},
    **{name: {False} for name in (
        "overlap", "logprobs", "top_logprobs", "merge", "merge_models", "pairs", "unpaired", "best_of_n", "conditional",
        "conditional_prompts", "round_prompts", "round", "gate", "report", "artifact", "quantise", "calibration",
    )},
    "dataset": {True, False},  # whether it shuffles or mixes
    "score": {True, False},  # whether a model reads, or intervals are drawn
    "base": {True, False},  # random weights or those of a folder
}  # fmt: skip


def test_every_stage_has_the_seed_in_its_key_or_cannot_read_it(tmp_path: Path) -> None:
    found: dict[str, set[bool]] = {}
    for recipe, overrides in RECIPES.items():
        before, after = (build_graph(load_recipe(recipe, (*overrides, f"seed={seed}")), LIBRARIES) for seed in (3, 4))
        for name, node in before.items():
            draws = _own_key(node, node.seed) != _own_key(node, after[name].seed)
            found.setdefault(node.stage.name, set()).add(draws)
            context = JobContext(_spec(node), LocalStore(tmp_path))
            if draws:
                assert context.seed == 3
            else:
                with pytest.raises(StageError, match=f"^{node.stage.name}: its settings say that it draws no random"):
                    context.seed  # noqa: B018
    assert found == DRAWS


def test_the_sources_of_a_mix_are_drawn_where_its_rows_are_not_shuffled() -> None:
    one = {"source": {"type": "files", "paths": ("one.jsonl",)}}
    for mix in ({"mix": (one, one)}, one):
        config = DatasetConfig.model_validate({"format": "text", "shuffle": False, **mix})
        assert config.draws == ("mix" in mix)


def test_a_seed_where_nothing_is_drawn_is_an_error() -> None:
    with pytest.raises(RecipeError, match=r"`data\.prompts`: seed: nothing is drawn at random here; remove it"):
        load_recipe("tiny", ("data.prompts.shuffle=false", "data.prompts.seed=1"))
    with pytest.raises(RecipeError, match="seed"):
        load_recipe("tiny-online-dpo", ("own_pairs.seed=1",))


def _own_key(node: Node, seed: int | None) -> str:
    """The key of `node` with `seed`, after the same inputs."""
    return stage_key(
        node.stage, node.config,
        inputs=node.input_refs, user_files=node.user_files, pins=node.pins, seed=seed, libraries=LIBRARIES,
    )  # fmt: skip


def _spec(node: Node) -> StageSpec:
    return StageSpec(
        name=node.name, stage=node.stage.name, stage_version=node.stage.version, key=node.ref.key,
        config=node.config.model_dump(mode="json"), inputs=dict(node.input_refs), user_files=dict(node.user_files),
        pins=dict(node.pins), seed=node.seed, libraries={},
    )  # fmt: skip
