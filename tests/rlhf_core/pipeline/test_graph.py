"""Which nodes a recipe becomes, and what each reads."""

from pathlib import Path

import pytest

from rlhf_core.config.loading import LoadedRecipe, load_recipe
from rlhf_core.config.stages import ReportConfig
from rlhf_core.errors import RecipeError
from rlhf_core.pipeline.graph import build_graph, skipped_sections

TRAIN = "{dataset: d, batch_size: 2, max_length: 64, optimizer: {learning_rate: 1e-3}}"
RL = (
    "{algorithm: grpo, dataset: d, steps: 1, prompts_per_step: 1, sampling: {max_tokens: 8}, "
    "rollout: {max_length: 64}, "
    "grpo: {rewards: {exact: {type: verifier}}, optimizer: {learning_rate: 1e-4}}, "
    "ppo: {rewards: {preference: {type: reward_model}}, optimizer: {learning_rate: 1e-4}, "
    "critic: {optimizer: {learning_rate: 1e-4}}}}"
)
EVALUATION = "{dataset: d, scorers: {exact: {type: verifier}}, sampling: {max_tokens: 8}, rollout: {max_length: 64}}"
DATA = "{format: prompts, source: {type: hub, repository: some/set}}"
FULL = ("pretrain=" + TRAIN, "sft=" + TRAIN, "reward_model=" + TRAIN, "rl=" + RL, "evaluation=" + EVALUATION)


def load(folder: Path, *overrides: str) -> LoadedRecipe:
    path = folder / "recipe.yaml"
    path.write_text(f"name: r\ndata: {{d: {DATA}}}\nbase: {{source: {{type: scratch}}}}\n", encoding="utf-8")
    return load_recipe(str(path), overrides)


def edges(folder: Path, *overrides: str) -> dict[str, dict[str, str]]:
    graph = build_graph(load(folder, *overrides), {})
    seen: set[str] = set()
    for node in graph.values():
        assert seen.issuperset(node.inputs.values()), "a node comes after those it reads"
        assert node.input_refs == {name: graph[other].ref for name, other in node.inputs.items()}
        seen.add(node.name)
    return {name: dict(node.inputs) for name, node in graph.items() if name != "report"}


def test_the_whole_graph_of_grpo(tmp_path: Path) -> None:
    assert edges(tmp_path, *FULL) == {
        "base": {},
        "data.d": {},
        "pretrain": {"model": "base", "dataset": "data.d"},
        "sft": {"model": "pretrain", "dataset": "data.d"},
        "rl": {"model": "sft", "dataset": "data.d"},
        "evaluation.base": {"model": "pretrain", "dataset": "data.d"},
        "evaluation.sft": {"model": "sft", "dataset": "data.d"},
        "evaluation.rl": {"model": "rl", "dataset": "data.d"},
    }
    skipped = skipped_sections(load(tmp_path, *FULL).recipe)
    assert skipped == {"reward_model": "rl.grpo does not use a reward model"}


def test_rl_reads_the_prompts_that_it_is_validated_with(tmp_path: Path) -> None:
    validation = "rl.validation={dataset: held, every_steps: 1, scorers: {exact: {type: verifier}}}"
    found = edges(tmp_path, "rl=" + RL, validation, f"data.held={DATA}")
    assert found["rl"] == {"model": "base", "dataset": "data.d", "validation.dataset": "data.held"}
    with pytest.raises(RecipeError, match=r"rl\.validation\.dataset: there is no dataset `held` in `data`; it has d"):
        edges(tmp_path, "rl=" + RL, validation)


def test_the_report_is_titled_with_the_recipe_s_name_unless_told(tmp_path: Path) -> None:
    assert build_graph(load(tmp_path), {})["report"].config == ReportConfig(title="Alignment run r")
    assert build_graph(load(tmp_path, "report.title=mine"), {})["report"].config == ReportConfig(title="mine")


def test_ppo_reads_the_reward_model(tmp_path: Path) -> None:
    graph = edges(tmp_path, *FULL, "rl.algorithm=ppo")
    assert graph["reward_model"] == {"model": "sft", "dataset": "data.d"}
    preference = {"ppo.rewards.preference.model": "reward_model"}
    assert graph["rl"] == {"model": "sft", "dataset": "data.d", **preference}


def test_adapters_are_merged_before_anything_builds_on_them(tmp_path: Path) -> None:
    graph = edges(tmp_path, *FULL, "sft.lora={rank: 4}", "rl.lora={rank: 4}")
    assert graph["merge.sft"] == {"adapter": "sft", "model": "pretrain"}
    assert graph["rl"]["model"] == "merge.sft"
    assert graph["merge.rl"] == {"adapter": "rl", "model": "merge.sft"}
    assert (graph["evaluation.sft"]["model"], graph["evaluation.rl"]["model"]) == ("merge.sft", "merge.rl")


def test_the_report_reads_every_node(tmp_path: Path) -> None:
    graph = build_graph(load(tmp_path, *FULL), {})
    assert set(graph["report"].inputs.values()) == graph.keys() - {"report"}
    assert "report" not in build_graph(load(tmp_path, *FULL, "report=null"), {})


def test_excluded_datasets_are_read_first_and_only_used_ones_run(tmp_path: Path) -> None:
    graph = edges(tmp_path, "sft=" + TRAIN, f"data.test={DATA}", f"data.unused={DATA}", "data.d.exclude=[test]")
    assert graph == {
        "base": {},
        "data.test": {},
        "data.d": {"exclude.test": "data.test"},
        "sft": {"model": "base", "dataset": "data.d"},
    }


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("sft=" + TRAIN, "sft.dataset=e"), "sft.dataset: there is no dataset `e` in `data`; it has d"),
        (("sft=" + TRAIN, "data.d.exclude=[d]"), "data.d: `exclude` goes in a circle: d -> d"),
        (("rl=" + RL, "rl.algorithm=ppo"), "rl.ppo uses a reward model: give the section `reward_model`"),
        (("sft=" + TRAIN, "sft.lora={rank: 4}", "merge=null"), "sft writes a LoRA adapter, and later stages need full"),
        (("evaluation=" + EVALUATION,), "evaluation.models: no stage `sft` makes a model; there are base"),
    ],
)  # fmt: skip
def test_sections_that_name_what_is_not_there(tmp_path: Path, overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(RecipeError) as caught:
        build_graph(load(tmp_path, *overrides), {})
    assert str(caught.value).startswith(sentence)
