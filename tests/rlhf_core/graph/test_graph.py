"""The nodes of a recipe, and their inputs."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from rlhf_core.artifacts.manifest import Kind, Manifest
from rlhf_core.config.stages.outputs import ReportConfig
from rlhf_core.errors import RecipeError
from rlhf_core.graph.graph import build_graph
from rlhf_core.graph.outline import outline
from rlhf_core.recipe.loading import LoadedRecipe, load_recipe

pytestmark = pytest.mark.parts

TRAIN = "{dataset: d, batch_size: 2, max_length: 64, optimizer: {learning_rate: 1e-3}}"
RL = (
    "{algorithm: grpo, dataset: d, steps: 1, prompts_per_step: 1, sampling: {max_tokens: 8}, "
    "rollout: {max_length: 64}, "
    "grpo: {rewards: {exact: {type: verifier}}, optimizer: {learning_rate: 1e-4}}, "
    "ppo: {rewards: {preference: {type: reward_model}}, optimizer: {learning_rate: 1e-4}, "
    "critic: {optimizer: {learning_rate: 1e-4}}}}"
)
EVALUATION = "{dataset: d, scorers: {exact: {type: verifier}}, sampling: {max_tokens: 8}, rollout: {max_length: 64}}"
DATA = "{format: prompts, source: {type: hub, repository: some/set, revision: " + "f" * 40 + "}, on_overlap: allow}"
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
        "evaluation.base": {"model": "base", "dataset": "data.d"},
        "evaluation.pretrain": {"model": "pretrain", "dataset": "data.d"},
        "evaluation.sft": {"model": "sft", "dataset": "data.d"},
        "evaluation.rl": {"model": "rl", "dataset": "data.d"},
    }
    assert outline(load(tmp_path, *FULL).recipe).left_out == {"reward_model": "rl could use it, but does not"}


def test_a_reward_model_alone_is_trained(tmp_path: Path) -> None:
    assert edges(tmp_path, "reward_model=" + TRAIN).keys() == {"base", "data.d", "reward_model"}


def test_two_sft_stages_in_a_row_and_two_rl_stages_with_other_rewards(tmp_path: Path) -> None:
    again = RL.replace("{exact: {type: verifier}}", "{own: {type: verifier, kind: reasoning_gym}}")
    graph = edges(tmp_path, "sft=" + TRAIN, _stage("maths", "sft"), "rl=" + RL, f"second={again[:-1]}, stage: rl}}")
    assert {name: inputs.get("model") for name, inputs in graph.items() if name not in ("base", "data.d")} == {
        "sft": "base", "maths": "sft", "rl": "maths", "second": "rl",
    }  # fmt: skip


def test_two_reward_models_serve_one_ppo(tmp_path: Path) -> None:
    rewards = "{a: {type: reward_model, model: helpful}, b: {type: reward_model, model: harmless}}"
    graph = edges(
        tmp_path, "sft=" + TRAIN, _stage("helpful", "reward_model"), _stage("harmless", "reward_model"), "rl=" + RL,
        "rl.algorithm=ppo", f"rl.ppo.rewards={rewards}",
    )  # fmt: skip
    assert graph["rl"] == {
        "model": "sft", "dataset": "data.d",
        "ppo.rewards.a.model": "helpful", "ppo.rewards.b.model": "harmless",
    }  # fmt: skip
    assert graph["harmless"] == {"model": "sft", "dataset": "data.d"}


def test_any_model_is_evaluated_on_several_datasets(tmp_path: Path) -> None:
    hard = f"hard={EVALUATION[:-1]}, stage: evaluation, models: [sft]}}"
    graph = edges(
        tmp_path, "sft=" + TRAIN, "evaluation=" + EVALUATION, hard, "hard.dataset=h", "hard.sampling.max_tokens=4",
        f"data.h={DATA}",
    )  # fmt: skip
    assert graph["evaluation.sft"] == {"model": "sft", "dataset": "data.d"}
    assert graph["hard.sft"] == {"model": "sft", "dataset": "data.h"}
    assert "hard.base" not in graph


def test_a_model_that_is_left_out_is_the_last_one_made_above(tmp_path: Path) -> None:
    after = "after={stage: merge, adapter: sft}"
    graph = edges(tmp_path, "rl=" + RL, "sft=" + TRAIN, "sft.lora={rank: 4}", after, _stage("more", "sft"))
    assert {name: inputs["model"] for name, inputs in graph.items() if "model" in inputs} == {
        "rl": "base", "sft": "rl", "merge.sft": "rl", "after": "rl", "more": "after",
    }  # fmt: skip


def test_a_reward_model_that_nothing_reads_is_left_out_also_where_another_exists(tmp_path: Path) -> None:
    judge = "judge={source: {type: scratch}, stage: base, kind: reward_model}"
    graph = edges(tmp_path, "sft=" + TRAIN, "reward_model=" + TRAIN, judge, "rl=" + RL, "rl.algorithm=ppo")
    assert graph["rl"]["ppo.rewards.preference.model"] == "judge"
    assert "reward_model" not in graph


def test_a_dataset_that_exists_is_trained_on_and_compared_with_what_is_held_out(tmp_path: Path) -> None:
    """Also where it stands below the stage that must not train on it."""
    recipe = (
        "old={stage: artifact, ref: old}",
        "sft=" + TRAIN,
        "sft.dataset=old",
        "test={stage: artifact, ref: test}",
        f"judged={{stage: evaluation, {EVALUATION[1:]}",
        "judged.dataset=test",
        "judged.models=[base]",
    )
    loaded = load(tmp_path, *recipe, "data.d.exclude=[test]", "rl=" + RL)
    found = {"old": stored_dataset("conversations", "c" * 64), "test": stored_dataset("prompts", "e" * 64)}
    nodes = outline(loaded.recipe, found.__getitem__).nodes
    assert dict(nodes["sft"].inputs) == {"model": "base", "dataset": "old"}
    assert dict(nodes["overlap.old"].inputs) == {"dataset": "old", "held_out.test": "test"}
    assert nodes["sft"].after == ("overlap.old",)
    assert dict(nodes["data.d"].inputs) == {"exclude.test": "test"}
    allowed = load(tmp_path, *recipe, "old.on_overlap=allow")
    assert "overlap.old" not in outline(allowed.recipe, found.__getitem__).nodes
    other = {**found, "old": found["test"]}
    with pytest.raises(RecipeError, match=r"^sft\.dataset: `old` is dataset/e{12}, of the format prompts; `sft` needs"):
        outline(loaded.recipe, other.__getitem__)


def stored_dataset(data_format: str, key: str) -> Manifest:
    return stored_manifest(Kind.DATASET, key).model_copy(update={"stage": "dataset", "config": {"format": data_format}})


GENERATE = "{stage: generate, dataset: d, sampling: {max_tokens: 8}, rollout: {max_length: 64}}"
DPO = ("{stage: preference, dataset: chosen, model: base, batch_size: 2, max_length: 64, losses: {dpo: {type: dpo}}, "
       "optimizer: {learning_rate: 1e-3}}")  # fmt: skip


def test_stages_that_make_datasets_are_read_by_those_below(tmp_path: Path) -> None:
    made = edges(tmp_path, "own=" + GENERATE, "chosen={stage: pairs, dataset: own}", "dpo=" + DPO)
    assert made == {
        "base": {}, "data.d": {}, "own": {"model": "base", "dataset": "data.d"}, "chosen": {"dataset": "own"},
        "dpo": {"model": "base", "dataset": "chosen"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("own=" + GENERATE, "dpo=" + DPO.replace("chosen", "own")),
         "dpo.dataset: `own` makes a dataset, of the format completions; `dpo` needs preferences"),
        (("dpo=" + DPO, "chosen={stage: pairs, dataset: d}"), "dpo.dataset: `chosen` comes later in the recipe"),
        (("d=" + GENERATE,), "`d` and data.d are two datasets of one name"),
        (("sft=" + TRAIN, "chosen={stage: pairs, dataset: sft}"), "chosen.dataset: `sft` makes no dataset"),
    ],
)  # fmt: skip
def test_datasets_of_stages_have_a_format_and_a_place(
    tmp_path: Path, overrides: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        outline(load(tmp_path, *overrides).recipe)
    assert sentence in str(caught.value)


def test_a_stage_names_its_model_instead_of_taking_the_last(tmp_path: Path) -> None:
    graph = edges(tmp_path, "sft=" + TRAIN, _stage("other", "sft"), "other.model=base")
    assert graph["other"]["model"] == "base"


def test_the_names_of_stages_are_in_no_key(tmp_path: Path) -> None:
    """Renamed stages are found again; what they read decides."""
    one = build_graph(load(tmp_path, "sft=" + TRAIN, _stage("second", "sft")), {})
    other = build_graph(load(tmp_path, _stage("first", "sft"), _stage("next", "sft")), {})
    assert (one["sft"].ref, one["second"].ref) == (other["first"].ref, other["next"].ref)


def test_the_names_of_datasets_are_in_no_key(tmp_path: Path) -> None:
    def key(*names: str) -> str:
        data = [f"data.{name}={DATA[:-1]}, limit: {index + 1}}}" for index, name in enumerate(names)]
        loaded = load(tmp_path, "sft=" + TRAIN, *data, f"data.d.exclude=[{', '.join(sorted(names))}]")
        return build_graph(loaded, {})["sft"].ref.key

    assert key("a", "b") == key("z", "b") == key("z", "c")
    assert key("a", "b") != key("a")


def test_an_artifact_is_pinned_to_its_key_and_serves_as_a_model(tmp_path: Path) -> None:
    loaded = load(tmp_path, "start={stage: artifact, ref: champion}", "sft=" + TRAIN)
    found = stored_manifest(Kind.POLICY)
    graph = build_graph(loaded, {}, outline(loaded.recipe, lambda ref: {"champion": found}[ref]))
    assert graph["start"].ref == found.ref
    assert graph["sft"].input_refs["model"] == found.ref


def test_an_adapter_that_exists_is_merged_into_the_model_it_was_trained_on(tmp_path: Path) -> None:
    loaded = load(tmp_path, "start={stage: artifact, ref: mine}", "sft=" + TRAIN)
    base, adapter = stored_manifest(Kind.POLICY, key="b" * 64), stored_manifest(Kind.ADAPTER)
    adapter = adapter.model_copy(update={"parents": {"model": base.ref}})
    graph = build_graph(loaded, {}, outline(loaded.recipe, {"mine": adapter, f"sft/{'b' * 64}": base}.__getitem__))
    assert graph["sft"].inputs["model"] == "merge.start"
    assert graph["merge.start"].input_refs == {"adapter": adapter.ref, "model": base.ref}


def test_an_artifact_that_no_stage_reads_is_refused(tmp_path: Path) -> None:
    loaded = load(tmp_path, "start={stage: artifact, ref: mine}")
    with pytest.raises(RecipeError, match=r"^start\.ref: sft/aaaaaaaaaaaa is a evaluation, which no stage reads"):
        outline(loaded.recipe, lambda ref: stored_manifest(Kind.EVALUATION))


def _stage(name: str, stage: str) -> str:
    return f"{name}={TRAIN[:-1]}, stage: {stage}}}"


def stored_manifest(kind: Kind, key: str = "a" * 64) -> Manifest:
    now = datetime(2026, 1, 2, tzinfo=UTC)
    return Manifest(
        kind=kind, name="n", stage="sft", key=key, files=(), parents={}, config={}, seed=0, code_revision="0",
        libraries={}, device_seconds=0.0, device="cpu", started_at=now, finished_at=now,
    )  # fmt: skip


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
    assert graph["rl"] == {"model": "sft", "dataset": "data.d", "ppo.rewards.preference.model": "reward_model"}


def test_adapters_are_merged_before_anything_builds_on_them(tmp_path: Path) -> None:
    graph = edges(tmp_path, *FULL, "sft.lora={rank: 4}", "rl.lora={rank: 4}")
    assert graph["merge.sft"] == {"adapter": "sft", "model": "pretrain"}
    assert graph["rl"]["model"] == "merge.sft"
    assert graph["merge.rl"] == {"adapter": "rl", "model": "merge.sft"}
    assert (graph["evaluation.sft"]["model"], graph["evaluation.rl"]["model"]) == ("merge.sft", "merge.rl")


def test_an_adapter_is_merged_even_if_nothing_reads_it_unless_merge_is_off(tmp_path: Path) -> None:
    lora = ("sft=" + TRAIN, "sft.lora={rank: 4}")
    assert "merge.sft" in edges(tmp_path, *lora)
    pretrain = ("pretrain=" + TRAIN, "pretrain.lora={rank: 4}")
    assert edges(tmp_path, *pretrain, *lora)["sft"]["model"] == "merge.pretrain"
    assert "merge.sft" not in edges(tmp_path, *lora, "merge=null")
    read = edges(tmp_path, *lora, "merge=false", "rl=" + RL)
    assert read["rl"]["model"] == "merge.sft"


def test_a_quantised_base_is_rounded_before_its_adapter_is_trained_and_merged(tmp_path: Path) -> None:
    overrides = (*FULL, "sft.lora={rank: 4, quantised: nf4}", "rl.lora={rank: 4, quantised: nf4}")
    graph = edges(tmp_path, *overrides)
    assert graph["quantised.sft"] == {"model": "pretrain"}
    assert graph["sft"]["model"] == graph["merge.sft"]["model"] == "quantised.sft"
    assert graph["quantised.rl"] == {"model": "merge.sft"}
    assert graph["rl"]["model"] == graph["merge.rl"]["model"] == "quantised.rl"
    drafts = build_graph(load(tmp_path, *overrides, "sft.engine.dtype=float32"), {})
    assert [drafts[f"quantised.{name}"].config.model_dtype for name in ("sft", "rl")] == ["float32", "bfloat16"]


def test_a_merge_of_one_s_own_takes_the_model_that_the_adapter_was_trained_on(tmp_path: Path) -> None:
    own = "merged={stage: merge, adapter: sft}"
    graph = edges(tmp_path, "pretrain=" + TRAIN, "sft=" + TRAIN, "sft.lora={rank: 4}", "merge=false", own)
    assert graph["merged"] == {"adapter": "sft", "model": "pretrain"}


def test_the_report_reads_every_node(tmp_path: Path) -> None:
    graph = build_graph(load(tmp_path, *FULL), {})
    assert set(graph["report"].inputs.values()) == graph.keys() - {"report"}
    assert "report" not in build_graph(load(tmp_path, *FULL, "report=null"), {})


def test_datasets_alone_are_no_recipe(tmp_path: Path) -> None:
    """Nothing reads them, so that a report of nothing was all that ran."""
    loaded = load(tmp_path, "base=null")
    with pytest.raises(RecipeError, match=r"^the recipe has no stage, .* add one, such as `sft`$"):
        build_graph(loaded, {})


def test_excluded_datasets_are_read_first_and_only_used_ones_run(tmp_path: Path) -> None:
    graph = edges(tmp_path, "sft=" + TRAIN, f"data.test={DATA}", f"data.unused={DATA}", "data.d.exclude=[test]")
    assert graph == {
        "base": {},
        "data.test": {},
        "data.d": {"exclude.test": "data.test"},
        "sft": {"model": "base", "dataset": "data.d"},
    }


def test_what_is_trained_on_is_compared_with_what_is_held_out_and_keeps_its_key(tmp_path: Path) -> None:
    data = (f"data.e={DATA}", f"data.f={DATA}", "data.d.on_overlap=error", "data.e.on_overlap=error")
    recipe = (*data, "data.e.exclude=[f]", "sft=" + TRAIN, "rl=" + RL, "rl.dataset=e", "evaluation=" + EVALUATION)
    one = build_graph(load(tmp_path, *recipe, "evaluation.dataset=f"), {})
    assert dict(one["overlap.d"].inputs) == {"dataset": "data.d", "held_out.f": "data.f"}
    assert (one["sft"].after, one["rl"].after) == (("overlap.d",), ())  # `e` has dropped the prompts of `f`
    more = build_graph(
        load(tmp_path, *recipe, "evaluation.dataset=f", f"again={{stage: evaluation, {EVALUATION[1:]}"), {}
    )
    assert dict(more["overlap.d"].inputs) == {"dataset": "data.d", "held_out.f": "data.f", "held_out.d": "data.d"}
    assert more["rl"].after == ("overlap.e",)
    assert (more["sft"].ref, more["rl"].ref) == (one["sft"].ref, one["rl"].ref)


def test_what_is_sampled_is_compared_where_it_is_trained_on(tmp_path: Path) -> None:
    sampled = "{stage: generate, samples: 2, sampling: {max_tokens: 4}, rollout: {max_length: 8}, dataset: "
    data = (f"data.e={DATA}", f"data.f={DATA}", "data.e.on_overlap=error", "data.f.on_overlap=error")
    stages = (
        "own=" + sampled + "e}", "drift=" + sampled + "f}", "best={stage: best_of_n, dataset: own}",
        "again={stage: sft, " + TRAIN[1:], "again.dataset=best", "evaluation=" + EVALUATION, "evaluation.dataset=f",
    )  # fmt: skip
    graph = build_graph(load(tmp_path, *data, *stages), {})
    overlaps = {name: dict(node.inputs) for name, node in graph.items() if name.startswith("overlap.")}
    assert overlaps == {"overlap.e": {"dataset": "data.e", "held_out.f": "data.f"}}
    assert graph["again"].after == ("overlap.e",)


def test_prompts_that_ask_for_a_reward_are_compared_as_they_were_before(tmp_path: Path) -> None:
    stages = [
        "sft=" + TRAIN,
        "wanted={stage: conditional_prompts, dataset: f, reward: 1.0}",
        "more={stage: conditional_prompts, dataset: e, reward: 1.0}",
        "rl=" + RL,
        "evaluation=" + EVALUATION,
    ]
    data = (f"data.e={DATA}", f"data.f={DATA}", "data.d.on_overlap=error", "data.e.on_overlap=error")
    graph = build_graph(load(tmp_path, *data, *stages, "rl.dataset=more", "evaluation.dataset=wanted"), {})
    overlaps = {name: dict(node.inputs) for name, node in graph.items() if name.startswith("overlap.")}
    assert overlaps == {
        "overlap.d": {"dataset": "data.d", "held_out.f": "data.f"},
        "overlap.e": {"dataset": "data.e", "held_out.f": "data.f"},
    }
    assert graph["rl"].after == ("overlap.e",)
    assert graph["wanted"].after == graph["more"].after == ()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("sft=" + TRAIN, "sft.dataset=e"), "sft.dataset: there is no dataset `e` in `data`; it has d"),
        (("sft=" + TRAIN, "data.d.exclude=[d]"), "data.d: `exclude` goes in a circle: d -> d"),
        (("sft=" + TRAIN, "data.d.exclude=[h, h]"), "data.d.exclude: names `h` twice: remove one"),
        (
            ("rl=" + RL, "rl.algorithm=ppo"),
            "rl.ppo.rewards.preference.model: no stage above `rl` makes a reward model: add one, such as",
        ),
        (
            ("sft=" + TRAIN, "evaluation=" + EVALUATION, "evaluation.models=[stf]"),
            "evaluation.models: no stage `stf` makes a model (did you mean `sft`?); there are base, sft",
        ),
        (
            ("sft=" + TRAIN, "sft.model=rl", "rl=" + RL),
            "sft.model: `rl` comes later in the recipe; above are base",
        ),
        (
            ("reward_model=" + TRAIN, "rl=" + RL, "rl.algorithm=ppo", "rl.model=reward_model"),
            "rl.model: `reward_model` makes no model; above are base",
        ),
        (
            ("evaluation=" + EVALUATION, "sft=" + TRAIN),
            "set evaluation.models: its default, all above, is ambiguous, since `sft` below makes a model too",
        ),
        (("merged={stage: merge, adapter: base}",), "merged.adapter: `base` makes no adapter; above are none"),
        (("start={stage: artifact, ref: champion}",), "start.ref: champion cannot be looked up, since no store is set"),
    ],
)  # fmt: skip
def test_sections_that_name_what_is_not_there(tmp_path: Path, overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(RecipeError) as caught:
        build_graph(load(tmp_path, *overrides), {})
    assert str(caught.value).startswith(sentence)
