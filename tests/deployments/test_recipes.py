"""Every shipped recipe loads, and each of its mistakes would be named; without torch, so that it takes no time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from deployments.stack.environment import RECIPES as RECIPES_FOLDER
from rlhf_core.config.rewards.rewards import VerifierReward
from rlhf_core.errors import RecipeError
from rlhf_core.graph.graph import build_graph
from rlhf_core.processes.user_code import load_function
from rlhf_core.recipe.loading import known_recipes, load_recipe
from rlhf_core.rewards.verifier import Verifier
from tests.deployments.test_recipe_sizes import PLANS

pytestmark = pytest.mark.parts

RECIPES = [name for name in known_recipes() if name not in PLANS]  # test_recipe_sizes.py has the others
WITH_RL = [name for name in RECIPES if "rl" in load_recipe(name).recipe.blocks]
WITH_PPO = [
    name
    for name in WITH_RL
    if "reward_model" in (blocks := load_recipe(name).recipe.blocks) and "ppo" in getattr(blocks["rl"], "blocks", {})
]
LIBRARIES = {"torch": "1", "lm-eval": "1"}
# Of each section a setting, and the same with two letters changed places or one left out.
TYPOS = {
    "name": "nmae",
    "base.dtype": "base.dtyp",
    "base.source.type": "base.source.tpye",
    "data.held_out.format": "data.held_out.fromat",
    "pretrain.batch_size": "pretrain.batchsize",
    "sft.epochs": "sft.epoch",
    "sft.optimizer.learning_rate": "sft.optimizer.lerning_rate",
    "reward_model.max_length": "reward_model.max_lenght",
    "rl.steps": "rl.stpes",
    "rl.grpo.group_size": "rl.grpo.groupsize",
    "rl.ppo.critic.optimizer": "rl.ppo.critic.optimiser",
    "rl.sampling.temperature": "rl.sampling.temprature",
    "rl.rollout.max_length": "rl.rollout.max_lenght",
    "rl.engine.zero_stage": "rl.engine.zero_stag",
    "evaluation.samples": "evaluation.sampels",
    "report.samples": "report.sampels",
    "tracking.wandb": "tracking.wandbb",
}

# Of the stages of the other recipes.
OTHER_TYPOS = {
    "tiny-dpo": ("dpo.losses.dpo.label_smoothing", "dpo.losses.dpo.label_smothing"),
    "tiny-losses": ("simpo.losses.simpo.margin", "simpo.losses.simpo.margn"),
    "tiny-kto": ("kto.desirable_weight", "kto.desirable_wieght"),
    "tiny-distillation": ("distilled.temperature", "distilled.temprature"),
    "tiny-process": ("process_reward_model.separator", "process_reward_model.seperator"),
    "tiny-best-of-n": ("sampled.prompts_per_call", "sampled.prompts_percall"),
    "tiny-online-dpo": ("own_pairs.select", "own_pairs.slect"),
    "tiny-loop": ("loop.gate.margin", "loop.gate.margn"),
    "tiny-self-distillation": ("self_taught.steps", "self_taught.stpes"),
    "tiny-conditional": ("told.decimals", "told.decimls"),
    "tiny-game": ("rl.environment.max_turns", "rl.environment.max_truns"),
    "tiny-tools": ("rl.environment.parser", "rl.environment.praser"),
    "tiny-harbor": ("rl.environment.command_seconds", "rl.environment.comand_seconds"),
    "tiny-agent": ("evaluation.environment.path", "evaluation.environment.paht"),
    "tiny-ratings": ("reward_regression.lora", "reward_regression.loar"),
    "tiny-merge": ("agreed.density", "agreed.densty"),
    "tiny-difficulty": ("by_difficulty.select.forget_after", "by_difficulty.select.forget_afer"),
    "tiny-prolonged": ("second.select.rates", "second.select.rate"),
    "tiny-benchmark": ("benchmark.num_fewshot", "benchmark.num_fewshto"),
    "smollm2-dpo": ("after.reference", "after.refrence"),
    "smollm2-best-of-n": ("best.least_reward", "best.least_rewards"),
}

EVALUATED = {  # nodes beside evaluation.sft, of recipes that evaluate something else than `rl`
    "tiny-dpo": ("evaluation.dpo",), "tiny-online-dpo": ("evaluation.dpo",), "tiny-kto": ("evaluation.kto",),
    "tiny-merge": ("evaluation.rl", "evaluation.dpo", "evaluation.mean", "evaluation.agreed"),
    "tiny-losses": ("evaluation.cdpo", "evaluation.simpo", "evaluation.cpo"),
    "tiny-best-of-n": ("evaluation.again",), "tiny-process": ("evaluation.by_letters",),
    "tiny-loop": ("evaluation.accepted", "evaluation.dpo"), "tiny-distillation": ("evaluation.distilled",),
    "tiny-self-distillation": ("evaluation.reader", "evaluation.self_taught"),
    "tiny-conditional": ("asked_for_right.conditional_sft", "asked_for_wrong.conditional_sft"),
    "smollm2-dpo": ("evaluation.base", "evaluation.dpo", "before", "after"), "smollm2-best-of-n": ("evaluation.again",),
}  # fmt: skip
WITHOUT_SFT = ("tiny-loop", "smollm2-dpo")  # among what is evaluated

LOADING = """
import json, sys
from deployments.stack.environment import RECIPES as RECIPES_FOLDER
from rlhf_core.recipe.loading import load_recipe
from rlhf_core.graph.graph import build_graph
from rlhf_core.preflight.look import preflight
pinned = {"smolvlm": ["base.source.revision=" + "f" * 40]}  # there is no hub to ask
libraries = json.loads(sys.argv[1])
graphs = {name: list(build_graph(load_recipe(name, pinned.get(name, [])), libraries)) for name in sys.argv[2:]}
print(json.dumps({"graphs": graphs, "torch": "torch" in sys.modules}))
"""


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The nodes of each recipe's graph, in a process that does nothing else, and whether that has loaded torch."""
    command = [sys.executable, "-c", LOADING, json.dumps(LIBRARIES), *RECIPES]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    return dict(json.loads(done.stdout))


def test_the_recipes_of_the_readme_are_shipped() -> None:
    assert {"tiny", "smollm2"} <= set(RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_becomes_a_graph_without_torch(recipe: str, alone: dict[str, Any]) -> None:
    assert alone["torch"] is False
    nodes = alone["graphs"][recipe]
    evaluated = EVALUATED.get(recipe, ("evaluation.rl",)) + (("evaluation.sft",) if recipe not in WITHOUT_SFT else ())
    assert {"base", *evaluated, "report"} <= set(nodes)
    assert "reward_model" not in nodes


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in WITH_RL])
def test_siblings_share_what_they_do_not_change(recipe: str) -> None:
    graph, parent = (build_graph(load_recipe(name), LIBRARIES) for name in (recipe, recipe.partition("-")[0]))
    shared = {
        "tiny-process": ("base", "pretrain", "data.held_out"),  # it has demonstrations and scorers of its own
        "tiny-loop": ("base", "pretrain", "sft", "data.held_out"),
        "smollm2-dpo": ("base", "data.held_out", "evaluation.base"),
        "smollm2-best-of-n": ("base",),  # its held-out set is larger, and the demonstrations leave that out
    }.get(recipe, ("base", "pretrain", "sft", "data.held_out", "evaluation.sft"))
    assert [graph[name].ref for name in shared] == [parent[name].ref for name in shared]
    if recipe == "tiny-loop":
        assert graph["evaluation.accepted"].ref == parent["evaluation.sft"].ref


@pytest.mark.parametrize("recipe", WITH_PPO)
def test_ppo_is_one_override_away_and_brings_the_reward_model(recipe: str) -> None:
    graph = build_graph(load_recipe(recipe, ["rl.algorithm=ppo"]), LIBRARIES)
    assert graph["rl"].inputs["ppo.rewards.preference.model"] == "reward_model"
    assert "data.pairs" in graph
    before = build_graph(load_recipe(recipe), LIBRARIES)
    assert before["sft"].ref == graph["sft"].ref
    assert before["rl"].ref != graph["rl"].ref


@pytest.mark.parametrize(
    ("recipe", "right", "wrong"),
    [
        *((recipe, *typo) for recipe in WITH_RL for typo in TYPOS.items()),
        *((recipe, *typo) for recipe, typo in OTHER_TYPOS.items()),
    ],
)
def test_a_typo_in_any_section_names_the_right_key(recipe: str, right: str, wrong: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, [f"{wrong}=1"])
    assert f"unknown key `{wrong}` (did you mean `{right.rpartition('.')[2]}`?)" in str(caught.value)


def test_the_typos_cover_every_section() -> None:
    sections: set[str] = set()
    for recipe in {*RECIPES} - {"tiny-losses"}:  # whose stages are alike
        sections |= YAML(typ="safe", pure=True).load(known_recipes()[recipe].read_text()).keys()
    typos = [
        *TYPOS,
        *(right for right, _ in OTHER_TYPOS.values()),
        "best",
        "again",
        "by_letters",
        "on_policy",
        "third",
        "sampled",
        "dpo",
        "conditional_sft",
        "reader",
        "right",
        "wrong",
        "asked_for_right",
        "asked_for_wrong",
        "before",
        "mean",
        "arc",
        "changes",
        "gate",
        "preferred",
    ]  # which have settings of others
    assert sections - {"name", "description", "seed", "extends"} <= {right.partition(".")[0] for right in typos}


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("12", 1.0),
        ("5 + 7 = 12", 1.0),
        ("The answer is 12.", 1.0),
        ("Let us add.\nResult: 12\n", 1.0),
        ("123", 0.0),
        ("12 or 13", 0.0),
        ("12, because 5 + 7 = 13", 0.0),
        ("", 0.0),
    ],
)
def test_the_verifier_of_smollm2_reads_the_last_answer(completion: str, reward: float) -> None:
    assert smollm2_verifier()([completion], ["5 + 7 ="], [{"id": "a", "answer": "12"}]).rewards == [reward]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("Leave, firmly", 1.0), ("The sorted list is: Leave, firmly.", 1.0), ("firmly, Leave", 0.0)],
)
def test_the_verifier_of_smollm2_reads_lists_of_words(completion: str, reward: float) -> None:
    assert smollm2_verifier()([completion], ["sort"], [{"id": "a", "answer": "Leave, firmly"}]).rewards == [reward]


def smollm2_verifier() -> Verifier:
    rl = load_recipe("smollm2").recipe.rl
    assert rl is not None
    reward = rl.settings.rewards["exact"]
    assert isinstance(reward, VerifierReward)
    return Verifier(reward)


def test_the_made_pairs_of_smollm2_reject_a_wrong_answer() -> None:
    file = "smollm2_data.py"
    make = load_function(RECIPES_FOLDER / file, "task_pairs", file)
    tasks = {"chain_sum": {"min_terms": 2, "max_terms": 2}, "word_sorting": {"min_words": 2, "max_words": 3}}
    rows = make(tasks=tasks, seed=1, size=20)
    assert len(rows) == 40
    for row in rows[:20]:
        assert abs(int(row["chosen"]) - int(row["rejected"])) in (1, 2, 10)
    for row in rows[20:]:
        assert row["rejected"].split(", ") == row["chosen"].split(", ")[::-1] != row["chosen"].split(", ")
    assert rows == make(tasks=tasks, seed=1, size=20)


def test_people_s_pairs_are_in_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    file = "smollm2_data.py"
    pairs = load_function(RECIPES_FOLDER / file, "pairs_of_part", file)
    made = [{"conversations": [], "chosen": {"value": str(index)}, "rejected": {}} for index in range(7)]
    monkeypatch.setitem(pairs.__globals__, "_demonstration_pairs", lambda: made)
    found = {part: [row["chosen"]["value"] for row in pairs(part=part)] for part in ("training", "held_out")}
    assert found == {"training": ["1", "2", "4", "5"], "held_out": ["0", "3", "6"]}


def test_smollm2_says_how_to_go_on_where_pip_cannot_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    file = "smollm2_data.py"
    pairs = load_function(RECIPES_FOLDER / file, "human_pairs", file)
    with pytest.raises(RuntimeError, match=r"(?s)llamafactory==0\.9\.5, which pip cannot download.*rl\.algorithm=grpo"):
        pairs(max_characters=100)
