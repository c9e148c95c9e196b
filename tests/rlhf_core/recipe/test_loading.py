"""Every mistake in a recipe is one sentence that names the key and what to write."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_core.config.stages.preference_losses import PREFERENCE_LOSSES
from rlhf_core.errors import RecipeError
from rlhf_core.recipe.known_recipes import known_recipes
from rlhf_core.recipe.loading import load_recipe
from tests.rlhf_core.recipe_text import RECIPE


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return str(path)


def problem(recipe: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, overrides)
    return str(caught.value).removeprefix(f"{recipe}: ")


def test_a_file_becomes_one_frozen_recipe(recipe: str, tmp_path: Path) -> None:
    loaded = load_recipe(recipe)
    assert loaded.root == tmp_path.resolve()
    assert loaded.recipe.rl is not None
    assert loaded.recipe.rl.settings.optimizer.learning_rate == 1e-4  # YAML 1.1 would read 1e-4 as text
    with pytest.raises(Exception, match="frozen"):
        loaded.recipe.seed = 1  # type: ignore[misc]


def test_overrides_are_yaml_and_the_last_one_wins(recipe: str) -> None:
    loaded = load_recipe(recipe, ["rl.steps=20", "rl.steps=30", "rl.grpo.optimizer.learning_rate=2e-5",
                                  "rl.lora={rank: 4}", "sft.dataset=questions", "sft.batch_size=2",
                                  "sft.max_length=32", "sft.optimizer.learning_rate=1e-3"])  # fmt: skip
    assert loaded.recipe.rl is not None
    assert loaded.recipe.sft is not None
    assert (loaded.recipe.rl.steps, loaded.recipe.rl.settings.optimizer.learning_rate) == (30, 2e-5)
    assert loaded.recipe.rl.lora is not None
    assert loaded.recipe.rl.lora.rank == 4
    assert loaded.recipe.sft.optimizer.learning_rate == 1e-3


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("rl.stpes=3", "unknown key `rl.stpes` (did you mean `steps`?)"),
        ("seeed=3", "unknown key `seeed` (did you mean `seed`?)"),
        ("rl.grpo.optimizer.learnin_rate=1", "`rl.grpo.optimizer.learnin_rate` (did you mean `learning_rate`?)"),
        ("base.source.hiden_size=8", "unknown key `base.source.hiden_size` (did you mean `hidden_size`?)"),
        ("data.talks.source.pathz=[a]", "unknown key `data.talks.source.pathz` (did you mean `paths`?)"),
        ("rl.sampling.xyzzy=1", "unknown key `rl.sampling.xyzzy`"),
        ("RL.steps=1", "unknown key `RL` (did you mean `rl`?)"),
        ("''=1", "unknown key `''`"),
        ("rl.rollout.temperature=0.7", "key `rl.rollout.temperature` (did you mean `rl.sampling.temperature`?)"),
        ("rl.rollout.max_model_len=512", "unknown key `rl.rollout.max_model_len`: here it is `rollout.max_length`"),
        ("rl.max_prompt_length=512", "here it is `rollout.max_length`, of prompt and completion together; the dataset"),
        ("rl.grpo.num_generations=4", "unknown key `rl.grpo.num_generations`: here it is `group_size` of the"),
        ("sft.max_new_tokens=4", "unknown key `sft.max_new_tokens` (did you mean `max_length`?)"),
        ("rl.grpo.learning_rate=1e-4", "unknown key `rl.grpo.learning_rate` (did you mean `optimizer.learning_rate`?)"),
        # Keys that are the name of a type too.
        ("rl.grpo.rewards.own.function=3", "`rl.grpo.rewards.own.function` is 3: it must be text"),
        ("data.questions.source.function=[3]", "`data.questions.source.function` is the list [3]: it must be text"),
        (
            "rl.environment={type: tools, parser: hermes, tools: {tools: {type: python, timeout_secnds: 2}}}",
            "unknown key `rl.environment.tools.tools.timeout_secnds` (did you mean `timeout_seconds`?)",
        ),
        ("more={stage: [sft]}", "`more`: `stage` must be text, one of base, "),
        (".".join(["a"] * 51) + "=1", "write it as key.key=value"),
        ("rl.steps=0", "`rl.steps` is 0: it must be from 1 to 10000000"),
        ("rl.steps=-5", "`rl.steps` is -5: it must be from 1 to 10000000"),
        ("rl.steps=1000000000", "`rl.steps` is 1000000000: it must be from 1 to 10000000"),
        ("rl.steps=ten", "`rl.steps` is 'ten': it must be a whole number"),
        ("rl.steps=2.5", "`rl.steps` is 2.5: it must be a whole number"),
        ("rl.steps=1e3", "`rl.steps` is 1000.0: it must be a whole number: write 1000"),
        ("rl.steps='10'", "`rl.steps` is '10': it must be a whole number: write it without quotes"),
        ("rl.steps=true", "`rl.steps` is true: it must be a whole number"),
        ("rl.engine.zero_stage=true", "`rl.engine.zero_stage` is true: it must be a whole number"),
        ("rl.engine.gradient_checkpointing=1", "`rl.engine.gradient_checkpointing` is 1: it must not be a number"),
        ("rl.engine.gradient_checkpointing=yes", "is 'yes': it must be one of false, true, selective"),
        ("rl.steps=", "`rl.steps` is empty: it must be a whole number"),
        ("rl.grpo.clip_low=", "`rl.grpo.clip_low` is empty: it must be a number, or remove the key"),
        ("rl.grpo.clip_low=100", "is 100: it must be more than 0 and at most 1: no ratio is less than 0"),
        ("rl.grpo.optimizer.learning_rate=.nan", "learning_rate=.nan`: NaN is not valid JSON: write a number, or null"),
        ("rl.grpo.optimizer.betas=[0.9]", "`rl.grpo.optimizer.betas` has too few entries: entry 2 is missing"),
        ("rl.grpo.optimizer.betas=[0, 0, 0]", "is the list [0, 0, 0]: it must have 2 entries"),
        ("rl.dataset=[a]", "`rl.dataset` is the list ['a']: it must be text"),
        ("rl.rollout=5", "`rl.rollout` is 5: it must be a mapping with the keys type, max_length, engines"),
        ("rl.lora={rank: 4, target_modules: 5}", "is 5: it must be all-linear; or it must be a list, such as [a, b]"),
        ("rl.rollout.prefix_caching=yes", "is 'yes': it must be true or false: write true"),
        ("rl.grpo.optimizer.name=adam", "is 'adam': it must be one of adamw, muon (did you mean `adamw`?)"),
        ("none={stage: sft}", "`none`: `none` is a reserved word that means \"no stage\": choose another name"),
        ("rl.algorithm=gropo", "`rl.algorithm`: there is no algorithm `gropo` (did you mean `grpo`?); there are ppo,"),
        ("rl.algorithm=gpro", "`rl.algorithm`: there is no algorithm `gpro` (did you mean `grpo`?); there are ppo,"),
        ("rl.grppo={}", "unknown key `rl.grppo` (did you mean `grpo`?)"),
        (
            "base.source=Qwen/Qwen3-0.6B",
            "`base.source` is 'Qwen/Qwen3-0.6B': write {type: hub, repository: Qwen/Qwen3-0.6B} or {type: folder",
        ),
        ("base.source=model", "`base.source` is 'model': write {type: folder, path: model}"),
        ("data.talks.source=talks.jsonl", "`data.talks.source`: write {type: files, paths: [talks.jsonl]}"),
        ("data.talks.source=me/talks", "write {type: hub, repository: me/talks} or {type: files, paths: [me/talks]}"),
        ("data.talks.source=5", "`data.talks.source`: write a mapping with a key `type`, which chooses the source"),
        (
            "rl.sampling.max_tokens=64",
            "sampling.max_tokens=64 leaves no room for a prompt in rollout.max_length=64: raise the latter, or lower",
        ),
        ("rl.algorithm=ppo", "`rl`: algorithm is ppo, but there is no block `ppo` beside it; add one"),
        ("base.source={type: foldr}", "`base.source.type` is 'foldr' (did you mean `folder`?); it must be one of"),
        ("Sft={stage: sft}", "`Sft`: the name of a stage has up to 100 lower-case letters"),
        ("overlap={stage: sft}", "`overlap` is a reserved name of a node: choose another"),
        ("data={a.b: {format: text}}", "`data.a.b`: the name of a dataset has up to 100 letters, digits, `_` and `-`"),
        ("merge={adapter: sft}", "`merge`: true, false or null; a merge of your own is a stage with a name"),
        ("data.talks.stage=rl", "unknown key `data.talks.stage`"),
        ("report.stage=rl", "unknown key `report.stage`"),
        ("policy={stage: sft}", "`policy` is reserved: `critic.start` calls RL's starting model so; choose"),
        ("second={stage: rll}", "`second`: there is no stage `rll` to write here (did you mean `rl`?); there are"),
        ("evaluation.scorers.exact={type: verifier, pattern: abc}", "the regular expression has no group: put"),
        (
            "data.talks.columns={prompt: q, completion: q}",
            "`data.talks`: columns: `q` is read as prompt, completion: one column has one meaning",
        ),
        ("evaluation.scorers={a/b: {type: verifier}}", "'a/b' is not the name of a reward: up to 100 letters, digits"),
        ("name=Big Name", "`name`: 'Big Name' is not a name: write up to 100 lower-case letters"),
    ],
)  # fmt: skip
def test_a_mistake_names_its_key_and_the_remedy(recipe: str, override: str, sentence: str) -> None:
    assert sentence in problem(recipe, override)


PREFERENCE = "preference: {dataset: NAME, losses: "


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("rl.algorithm=dpo", "`rl.algorithm`: `dpo` is a loss of the stage `preference`: write `" + PREFERENCE),
        ("rl.algorithm=DPO", "`DPO` is a loss of the stage `preference`: write `" + PREFERENCE + "{dpo: {type: dpo}}"),
        ("rl.algorithm=kto", "`rl.algorithm`: `kto` is a stage of its own: write `kto: {…}` beside `base`"),
        ("rl.algorithm=gae", "`gae` is an algorithm of the stage `rl`: write `rl: {algorithm: ppo, ppo: {…}, …}`"),
        ("grpo={}", "unknown key `grpo`: `grpo` is an algorithm of the stage `rl`: write `rl: {algorithm: grpo, grpo:"),
        ("rl.dr-grpo={}", "write `rl: {algorithm: dr-grpo, dr_grpo: {…}, …}`"),
        ("rm={}", "unknown key `rm`: `rm` is a stage of its own: write `reward_model: {…}` beside `base`"),
        ("gkd.teacher=x", "unknown key `gkd`: `gkd` is a stage of its own: write `distillation: {…}` beside `base`"),
        ("sft.cdpo={}", "unknown key `sft.cdpo`: `cdpo` is a loss of the stage `preference`: write `" + PREFERENCE),
        ("mine={stage: simpo}", "`mine`: `simpo` is a loss of the stage `preference`: write `" + PREFERENCE),
        ("preference.losses.a={type: kto}", "`preference.losses.a.type`: `kto` is a stage of its own: write `kto: {"),
        *((f"{loss}={{}}", f"{PREFERENCE}{{{loss}: {{type: {loss}}}}}, …}}`") for loss in PREFERENCE_LOSSES),
    ],
)  # fmt: skip
def test_a_method_where_it_is_not_written_names_its_stage(recipe: str, override: str, sentence: str) -> None:
    assert sentence in problem(recipe, override)


def test_an_override_changes_one_place_of_what_yaml_aliases_share(tmp_path: Path) -> None:
    path = tmp_path / "shared.yaml"
    sft = (
        "sft: {dataset: questions, batch_size: 4, max_length: 64, optimizer: {learning_rate: 1e-4}, engine: *engine}\n"
    )
    path.write_text(RECIPE + "  engine: &engine {zero_stage: 1}\n" + sft, encoding="utf-8")
    loaded = load_recipe(str(path), ["rl.engine.zero_stage=3"]).recipe
    assert loaded.rl is not None
    assert loaded.sft is not None
    assert (loaded.rl.engine.zero_stage, loaded.sft.engine.zero_stage) == (3, 1)


def test_null_takes_a_stage_or_a_block_away(recipe: str) -> None:
    loaded = load_recipe(recipe, ["rl=null"]).recipe
    assert "rl" not in loaded.stages
    assert "sft" not in load_recipe(recipe, ["sft=null"]).recipe.stages


def test_a_missing_key_is_named(recipe: str) -> None:
    override = "sft={dataset: questions, batch_size: 2, max_length: 8}"
    said = "`sft.optimizer` is missing: add `optimizer: {learning_rate: …}` (optimizer of the weights)"
    assert problem(recipe, override) == f"override `{override}`: {said}"


def test_a_missing_mapping_is_shown_with_the_keys_that_it_needs(recipe: str) -> None:
    override = "rl={algorithm: grpo, dataset: questions, steps: 1, prompts_per_step: 1, sampling: {max_tokens: 8}}"
    assert "`rl.rollout` is missing: add `rollout: {max_length: …}` (engine settings)" in problem(recipe, override)


def test_all_mistakes_are_told_at_once(recipe: str) -> None:
    assert len(problem(recipe, "rl.stpes=1", "seed=-1").splitlines()) == 2
    assert len(problem(recipe, "rl.sampling={" + ", ".join(f"k{i}: 1" for i in range(5000)) + "}").splitlines()) == 50


def test_a_mistake_in_the_file_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    shared = "  lora: {<<: &lora {rank: 1000}, alpha: 1}\n"
    path.write_text(RECIPE.replace("steps: 10", "steps: ten") + shared, encoding="utf-8")
    lines = path.read_text(encoding="utf-8").splitlines()
    steps, lora = (next(i for i, line in enumerate(lines, 1) if word in line) for word in ("steps: ten", "lora"))
    assert problem(str(path)).splitlines() == [
        f"{path} line {steps}: `rl.steps` is 'ten': it must be a whole number",
        f"{path} line {lora}: `rl.lora.rank` is 1000: it must be from 1 to 512: the engines serve adapters up to this "
        "rank",
    ]


@pytest.mark.parametrize("word", ["none", "None", "null", "~", "''", '""', "", "'null'"])
def test_words_for_no_value_are_null_where_null_may_stand(recipe: str, word: str) -> None:
    loaded = load_recipe(recipe, [f"rl.lora={word}", f"rl.model={word}", f"report={word}"]).recipe
    assert loaded.stages["rl"].lora is None  # type: ignore[attr-defined]
    assert loaded.stages["rl"].model is None  # type: ignore[attr-defined]
    assert loaded.report is None
    assert "rl" not in load_recipe(recipe, [f"rl={word}"]).recipe.stages


def test_a_section_without_content_is_told(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text(RECIPE + "sft:\n", encoding="utf-8")
    assert load_recipe(str(path)).notes == ("sft is empty in the recipe, so it is not part of the run",)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("rl.steps", "override `rl.steps`: write it as key.key=value"),
        ("=3", "override `=3`: write it as key.key=value"),
        ("name.x=3", "override `name.x=3`: `name` is text, it has no keys below it"),
        ("rl\rsteps", r"override `rl\rsteps`: write it as key.key=value"),
        ("rl.st\udcffeps=1", r"override `rl.st\udcffeps=1`: it is not UTF-8"),
        ("rl.steps=[1", "override `rl.steps=[1`: line 1: not valid YAML"),
        ("extends=other", "override `extends=other`: what a recipe extends is read before overrides are: write it in"),
        ("rl.grpo.optimizer.betas.0=", "override `rl.grpo.optimizer.betas.0=`: `rl.grpo.optimizer.betas` is a mapping"),
        ("rl.validation.dataset=a", "override `rl.validation.dataset=a`: `rl.validation.scorers` is missing: add it"),
        ("second.batch_size=3", "override `second.batch_size=3`: unknown key `second`"),
    ],
)
def test_a_malformed_override_is_quoted(recipe: str, override: str, sentence: str) -> None:
    assert problem(recipe, override).startswith(sentence)


def test_a_section_that_overrides_change_inside_is_said_with_them(recipe: str) -> None:
    said = problem(recipe, "rl.steps=3", "rl.placement.workers=64", "seed=1")
    assert re.match(r".* line \d+ with override `rl.steps=3`, `rl.placement.workers=64`: `rl`: ", said), said


def test_an_unknown_key_is_one_mistake_although_the_key_that_is_meant_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE.replace("name: ", "nmae: ").replace("prompts_per_step: ", "prompts_per_stp: "))
    lines = problem(str(path)).splitlines()
    assert [re.sub(r".* line \d+: |;.*", "", line) for line in lines] == [
        "unknown key `nmae` (did you mean `name`?)",
        "unknown key `rl.prompts_per_stp` (did you mean `prompts_per_step`?)",
    ]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("small", "unknown recipe `small` (did you mean `small.yaml`?)"),
        ("mine", "unknown recipe `mine` (did you mean `mine/recipe.yaml`?)"),
        (".", ". is not a recipe: give the path of a .yaml file, or a name of `alignment recipes`"),
        ("rows.jsonl", "rows.jsonl is not a recipe: give the path of a .yaml file, or a name of `alignment recipes`"),
        ("no/recipe", "no/recipe is not a recipe: give the path of a .yaml file, or a name of `alignment recipes`"),
    ],
)
def test_a_path_that_is_no_recipe_names_the_file_beside_it(
    name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("small.yaml", "rows.jsonl", "mine/recipe.yaml"):
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_text(RECIPE)
    with pytest.raises(RecipeError, match=f"^{re.escape(sentence)}$"):
        load_recipe(name)


def test_unknown_recipes_name_the_nearest_and_the_shipped() -> None:
    with pytest.raises(RecipeError, match=r"^unknown recipe `tinny` \(did you mean `tiny`\?\); known by name are "):
        load_recipe("tinny")
    with pytest.raises(
        RecipeError, match=r"^nowhere/x.yaml: there is no such file; `alignment recipes` lists recipes$"
    ):
        load_recipe("nowhere/x.yaml")
    with pytest.raises(RecipeError, match=r"x.yaml: cannot be read \(File name too long\); "):
        load_recipe(f"{'x' * 300}.yaml")


def test_a_name_where_no_recipe_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALIGNMENT_RECIPES", raising=False)
    monkeypatch.chdir(tmp_path)
    remedy = "set ALIGNMENT_RECIPES to a folder of recipes, or give the path of a .yaml file"
    with pytest.raises(RecipeError, match=rf"^unknown recipe `tiny`; {remedy}$"):
        load_recipe("tiny")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("- a", "this is a list"), ("", "this is empty"), ("a: [", "not valid YAML")],
)
def test_a_file_that_is_no_recipe(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError, match=sentence):
        load_recipe(str(path))


@pytest.mark.parametrize("name", known_recipes())
def test_shipped_recipes_parse(name: str) -> None:
    assert load_recipe(name).recipe.name == name


@pytest.mark.parts
def test_parsing_loads_no_torch_and_is_quick() -> None:
    code = (
        "import sys, time; began = time.perf_counter()\n"
        "from rlhf_core.recipe.loading import load_recipe; load_recipe('tiny')\n"
        "import rlhf_core.artifacts.manifest, rlhf_core.graph.graph, rlhf_core.stages.table\n"
        "heavy = {'torch', 'ray', 'prefect', 'vllm', 'transformers', 'numpy'}\n"
        "print(sorted(heavy & sys.modules.keys()), time.process_time() < 2.0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[] True\n"


def test_a_wrong_entry_is_one_problem(tmp_path: Path) -> None:
    recipe = {"name": "a", "data": {"b": {"format": "text", "source": {"type": "files", "paths": [""]}}}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(tmp_path / "recipe.yaml"))
    expected = f"{tmp_path}/recipe.yaml line 1: `data.b.source.paths.0` is '': it must not be empty"
    assert str(caught.value) == expected
