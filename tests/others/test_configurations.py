"""Scripts and settings of TRL, OpenRLHF and verl become recipes that load and can be planned."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deployments.cli.main import app
from deployments.translation import openrlhf, trl, verl
from deployments.translation.settings import Origin, Setting
from rlhf_core.config.rewards.rewards import FunctionReward, VerifierReward
from rlhf_core.errors import RecipeError
from rlhf_core.pipeline.prepare import check
from rlhf_core.recipe.loading import load_recipe
from rlhf_core.rewards import build_text_reward
from rlhf_core.system.yaml_text import read_yaml
from tests.rlhf_core.recipes import model_folder
from tests.rlhf_core.stages.context import LocalContext

pytestmark = pytest.mark.parts

HERE = Path(__file__).parent


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of somebody's project, in which a command is given."""
    for framework in ("trl", "openrlhf", "verl"):
        shutil.copytree(HERE / framework, tmp_path / framework)
        shutil.copy(HERE / "prompts.jsonl", tmp_path / framework)
    model_folder(tmp_path, context=1024)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def translated(framework: str, file: str, *arguments: str) -> list[str]:
    done = CliRunner().invoke(app, ["init", "--from", framework, file, "mine", "--model", "model", *arguments])
    assert done.exit_code == 0, done.output
    return done.output.splitlines()


def test_a_script_of_trl(folder: Path) -> None:
    printed = translated("trl", "trl/train_grpo.py")
    loaded = load_recipe("mine/recipe.yaml")
    rl = loaded.recipe.stages["rl"].model_dump()
    # 8 rows x 8 micro-batches are 64 completions of 16 prompts, in two updates; 200 updates in two passes are 50 steps.
    assert (rl["steps"], rl["prompts_per_step"]) == (50, 16)
    grpo = rl["grpo"]
    assert (grpo["group_size"], grpo["minibatches"], grpo["epochs"]) == (4, 2, 2)
    assert (grpo["clip_low"], grpo["clip_high"], grpo["aggregation"]) == (0.2, 0.28, "sequence")
    assert grpo["kl"]["coefficient"] == 0.04
    optimizer = grpo["optimizer"]
    assert (optimizer["learning_rate"], optimizer["warmup_share"], optimizer["schedule"]) == (2e-5, 0.1, "linear")
    assert optimizer["max_gradient_norm"] == 0.5  # as it was assigned later
    assert optimizer["betas"] == (0.9, 0.999)  # TRL's default
    assert (rl["sampling"]["max_tokens"], rl["sampling"]["temperature"]) == (64, 0.9)
    assert (rl["lora"]["rank"], rl["lora"]["target_modules"]) == (8, ("q_proj", "v_proj"))
    assert {name: (reward["form"], reward["weight"]) for name, reward in grpo["rewards"].items()} == {
        "accuracy": ("trl_conversational", 1.0),
        "brevity": ("trl_conversational", 0.2),
    }
    for setting in ("top_p = 0.95", "log_completions = True", "seed = torch.initial_seed()", "GRPOTrainer.callbacks"):
        assert any(line.startswith(f"not translated: {setting}") for line in printed)
        assert f"#   {setting}" in Path("mine/recipe.yaml").read_text()
    checked = check("mine/recipe.yaml", [])
    assert {"data.train", "base", "rl"} <= checked.graph.keys()
    checked.call_functions(None)  # with the functions' own code, without the imports of TRL


def _sft(kind: str, arguments: str) -> str:
    return f"t = {kind}Trainer(model='a/b', train_dataset=load_dataset('a/b'), args={kind}Config({arguments}))\n"


@pytest.mark.parametrize(
    ("script", "context", "place", "length", "assumed"),
    [
        (_sft("SFT", ""), None, "sft.max_length", 1024, ["sft.max_length: 1024; SFTConfig's default is 1024"]),
        (_sft("SFT", "max_length=99"), None, "sft.max_length", 99, []),
        (
            _sft("SFT", "max_length=None"), 4096, "sft.max_length", 4096,
            ["sft.max_length: 4096; max_length=None truncates nothing there, the model's context 4096"],
        ),
        (
            _sft("DPO", ""), 512, "preference.max_length", 512,
            ["preference.max_length: 512; DPOConfig's default is 1024, the model's context 512"],
        ),
        (
            "GRPO", None, "rl.rollout.max_length", 1536,
            [
                "rl.sampling.max_tokens: 512; GRPOConfig's default of max_completion_length",
                "rl.rollout.max_length: 1536; max_completion_length 512 and 1024 for prompts, which GRPOConfig does "
                "not limit",
            ],
        ),
        (
            "GRPO max_completion_length=32", 1000, "rl.rollout.max_length", 1000,
            [
                "rl.rollout.max_length: 1000; max_completion_length 32 and 1024 for prompts, which GRPOConfig does "
                "not limit, at most the model's context 1000"
            ],
        ),
        (
            "GRPO max_completion_length=32, max_prompt_length=64", None, "rl.rollout.max_length", 96,
            [
                "rl.rollout.max_length: 96; max_prompt_length 64 and max_completion_length 32; a longer prompt is an "
                "error here"
            ],
        ),
        ("GRPO max_completion_length=32, vllm_max_model_length=80", None, "rl.rollout.max_length", 80, []),
    ],
)  # fmt: skip
def test_lengths_that_a_script_leaves_to_trl_are_named(
    tmp_path: Path, script: str, context: int | None, place: str, length: int, assumed: list[str]
) -> None:
    kind, _, arguments = script.partition(" ")
    (tmp_path / "a.py").write_text(_trl({}).replace("()", f"({arguments})") if kind == "GRPO" else script)
    translation = trl.translate(Origin(tmp_path / "a.py", tmp_path / "mine", context))
    setting: Any = translation.recipe
    for key in place.split("."):
        setting = setting[key]
    assert setting == length
    assert [each for each in translation.assumed if "max_length" in each or "max_tokens" in each] == assumed


@pytest.mark.parametrize(
    ("kind", "arguments", "stage", "expected"),
    [
        (
            "KTO", "beta=0.2, desirable_weight=1.5", "kto",
            {"beta": 0.2, "desirable_weight": 1.5, "undesirable_weight": 1.0, "batch_size": 8, "dropout": False},
        ),
        (
            "Reward", "center_rewards_coefficient=0.01, num_train_epochs=1", "reward_model",
            {"centring_coefficient": 0.01, "epochs": 1, "max_length": 1024, "dropout": False},
        ),
        (
            "RLOO", "num_generations=4, reward_clip_range=(-1, 1), normalize_advantages=True", "rl",
            {"algorithm": "rloo", "prompts_per_step": 2},
        ),
    ],
)  # fmt: skip
def test_other_trainers_of_trl(tmp_path: Path, kind: str, arguments: str, stage: str, expected: dict[str, Any]) -> None:
    script = _sft(kind, arguments)
    if kind == "RLOO":
        script = _trl({}).replace("GRPO", "RLOO").replace("RLOOConfig()", f"RLOOConfig({arguments})")
    (tmp_path / "a.py").write_text(script)
    done = CliRunner().invoke(app, ["init", "--from", "trl", f"{tmp_path}/a.py", f"{tmp_path}/mine", "--model", "a/b"])
    assert done.exit_code == 0, done.output
    recipe = load_recipe(f"{tmp_path}/mine/recipe.yaml").recipe
    made = recipe.stages[stage].model_dump()
    assert {name: made[name] for name in expected} == expected
    optimizer = made["rloo"]["optimizer"] if kind == "RLOO" else made["optimizer"]
    assert optimizer["learning_rate"] == (1e-4 if kind == "Reward" else 1e-6)
    assert recipe.data["train"].format == {"KTO": "unpaired", "Reward": "preferences", "RLOO": "prompts"}[kind]
    if kind == "RLOO":
        block = made["rloo"]
        assert (block["group_size"], block["kl"]["place"], block["kl_per_token"]) == (4, "reward", False)
        assert (block["kl"]["coefficient"], block["shaping"]["clip"]) == (0.05, (-1, 1))
        assert made["sampling"]["max_tokens"] == 256
        assert "normalize_advantages = True: rloo does not divide by a deviation here" in done.output


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["init", "--from", "trl", str(tmp_path / "a.py"), str(tmp_path / "mine")])
    assert (done.exit_code, done.output) == (1, f"error: {tmp_path / 'a.py'}: there is no such file\n")


def test_an_argument_of_a_trainer_has_its_reason(tmp_path: Path) -> None:
    script = _trl({}).replace("GRPOTrainer(", "GRPOTrainer(processing_class=tokenizer, ")
    (tmp_path / "a.py").write_text(script)
    done = CliRunner().invoke(
        app, ["init", "--from", "trl", str(tmp_path / "a.py"), str(tmp_path / "mine"), "--model", "a/b"]
    )
    assert "GRPOTrainer.processing_class = tokenizer: the tokenizer is the model's\n" in done.output


def test_the_reward_functions_of_a_script_are_copied_without_the_rest(folder: Path) -> None:
    translated("trl", "trl/train_grpo.py")
    code = Path("mine/rewards.py").read_text()
    assert re.findall(r"^(?:import|from|def|[A-Z]+) ?\S*", code, re.MULTILINE) == [
        "import re", "PATTERN =", "def last_answer(text):", "def accuracy(completions,", "def brevity(completions,",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("framework", "file", "stage"),
    [("trl", "dpo.yaml", "preference"), ("trl", "train_sft.py", "sft"), ("openrlhf", "train_dpo.sh", "preference")],
)
def test_a_data_set_of_the_hub_is_planned_on_files(folder: Path, framework: str, file: str, stage: str) -> None:
    translated(framework, f"{framework}/{file}")
    talk = {"prompt": "one and one?", "completion": "two"}
    pair = {"prompt": "one and one?", "chosen": "two", "rejected": "ten"}
    renamed = {"prompt": "one and one?", "chosen_messages": "two", "rejected_messages": "ten"}
    row = talk if stage == "sft" else renamed if framework == "openrlhf" else pair
    Path("rows.jsonl").write_text("".join(json.dumps(row | {"prompt": f"{i}?"}) + "\n" for i in range(256)))
    source = f"data.train.source={{type: files, paths: [{folder}/rows.jsonl]}}"
    assert stage in check("mine/recipe.yaml", [source]).graph


def test_settings_of_trl_dpo(folder: Path) -> None:
    translated("trl", "trl/dpo.yaml")
    recipe = load_recipe("mine/recipe.yaml").recipe
    stage = recipe.stages["preference"].model_dump()
    assert (stage["batch_size"], stage["epochs"], stage["max_length"], stage["dropout"]) == (16, 1, 128, False)
    assert {name: loss["weight"] for name, loss in stage["losses"].items()} == {"dpo": 1.0, "nll": 0.5}
    assert (stage["losses"]["dpo"]["beta"], stage["losses"]["dpo"]["label_smoothing"]) == (0.2, 0.1)
    assert (stage["lora"]["rank"], stage["lora"]["alpha"], stage["engine"]["gradient_checkpointing"]) == (32, 16, True)
    assert recipe.data["train"].on_long_row == "truncate"


def test_a_script_of_openrlhf(folder: Path) -> None:
    printed = translated("openrlhf", "openrlhf/train_ppo.sh")
    recipe = load_recipe("mine/recipe.yaml").recipe
    rl = recipe.stages["rl"].model_dump()
    ppo = rl["ppo"]
    assert (rl["algorithm"], rl["steps"], rl["prompts_per_step"]) == ("ppo", 4, 4)  # two passes over 8 rows
    assert (ppo["minibatches"], ppo["group_size"], ppo["gae_lambda"]) == (2, 2, 0.95)
    assert (ppo["clip_low"], ppo["clip_high"], ppo["kl"]["coefficient"], ppo["kl"]["place"]) == (
        0.2,
        0.27,
        0.02,
        "reward",
    )
    assert (ppo["optimizer"]["learning_rate"], ppo["critic"]["optimizer"]["learning_rate"]) == (5e-7, 9e-6)
    assert ppo["shaping"]["clip"] == (-5, 5)
    assert ppo["shaping"]["overlong"] == {"buffer": 16, "penalty": 1.0}
    assert (rl["engine"]["zero_stage"], rl["rollout"]["engines"], rl["rollout"]["max_length"]) == (3, 2, 256)
    assert recipe.data["train"].columns == {"answer": "solution"}
    assert "not translated: logger.wandb.key = …: trackers are in `tracking`" in printed  # and no secret in a recipe
    assert any(line.startswith("not translated: launcher = 'ray job submit --address=…'") for line in printed)
    check("mine/recipe.yaml", []).call_functions(None)


def test_an_agent_of_openrlhf_is_an_executor(folder: Path) -> None:
    shutil.copy(HERE / "agents" / "openrlhf_agent.py", "openrlhf/agent.py")
    settings = {
        "data.prompt_dataset": "prompts.jsonl", "data.input_key": "prompt", "data.max_len": 512,
        "rollout.max_new_tokens": 16,
    }  # fmt: skip
    Path("openrlhf/a.sh").write_text(_openrlhf(settings | {"train.agent_func_path": "agent.py"}))
    printed = translated("openrlhf", "openrlhf/a.sh")
    rl = load_recipe("mine/recipe.yaml").recipe.stages["rl"].model_dump()
    agent = {name: rl["environment"][name] for name in ("type", "form", "path", "function", "max_turns")}
    assert agent == {
        "type": "executor", "form": "openrlhf", "path": "../openrlhf/agent.py", "function": "AgentExecutor",
        "max_turns": 16,
    }  # fmt: skip
    assert rl["ppo"]["rewards"]["reward"]["type"] == "environment"
    assert (
        "not translated: reward.remote_url = 'f.py': the agent of train.agent_func_path returns the reward" in printed
    )
    assert any(line.startswith("assumed: rl.environment.max_turns: 16;") for line in printed)
    check("mine/recipe.yaml", []).call_functions(None)


@pytest.mark.parametrize(("file", "algorithm", "steps"), [("run_grpo.sh", "grpo", 30), ("ppo.yaml", "ppo", 40)])
def test_settings_of_verl(folder: Path, file: str, algorithm: str, steps: int) -> None:
    printed = translated("verl", f"verl/{file}")
    rl = load_recipe("mine/recipe.yaml").recipe.stages["rl"].model_dump()
    block = rl[algorithm]
    assert (rl["algorithm"], rl["steps"], rl["rollout"]["max_length"]) == (algorithm, steps, 96)
    assert (block["optimizer"]["learning_rate"], block["optimizer"]["weight_decay"]) == (1e-6, 0.01)
    if algorithm == "grpo":
        assert (block["group_size"], block["minibatches"], block["clip_high"], block["dual_clip"]) == (5, 2, 0.28, 3.0)
        assert (block["kl"]["coefficient"], block["kl"]["place"], block["kl"]["estimator"]) == (0.001, "loss", "k3")
        assert block["rewards"]["reward"]["options"] == {"penalty": 0.5}
        assert any(line.startswith("not translated: argument 30 = '$@'") for line in printed)
    else:
        assert (block["gae_lambda"], block["kl"]["coefficient"], block["kl"]["place"]) == (0.95, 0.002, "reward")
        assert (block["optimizer"]["warmup_share"], rl["lora"]["rank"]) == (0.1, 8)
    check("mine/recipe.yaml", []).call_functions(None)


def _verl(settings: Mapping[str, Any]) -> str:
    base = {"data.train_files": "x.jsonl", "reward.custom_reward_function.path": "score.py"}
    flags = " ".join(f"'{name}={value}'" for name, value in {**base, **settings}.items())
    return f"python3 -m verl.trainer.main_ppo {flags}"


def _openrlhf(settings: Mapping[str, Any]) -> str:
    base = {"data.prompt_dataset": "x.jsonl", "reward.remote_url": "f.py", "rollout.n_samples_per_prompt": 8}
    words = {name: " ".join(map(str, v)) if isinstance(v, list) else v for name, v in {**base, **settings}.items()}
    flags = " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in words.items())
    return f"python3 -m openrlhf.cli.train_ppo_ray {flags}"


def _trl(settings: Mapping[str, Any]) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    return (
        "def f(completions, **kwargs): return [1.0]\n"
        "trainer = GRPOTrainer(model='a/b', reward_funcs=f, train_dataset=load_dataset('a/b'),\n"
        f"                      args=GRPOConfig({arguments}))\n"
    )


def _overlong(longest: int) -> str:
    calls = f"[f, get_soft_overlong_punishment({longest}, soft_punish_cache=64)]"
    settings = {"max_completion_length": 256, "reward_weights": [1.0, 0.5]}
    return "from trl.rewards import get_soft_overlong_punishment\n" + _trl(settings).replace(
        "reward_funcs=f", f"reward_funcs={calls}"
    )


VALUES: dict[str, Any] = {
    "num_generations": 4,
    "lr_scheduler_type": "constant_with_warmup", "scale_rewards": "none", "bf16": False, "attn_implementation": "eager",
    "gradient_checkpointing": False, "mask_truncated_completions": True, "ds.attn_implementation": "eager",
    "actor.loss_agg_mode": "seq-mean-token-mean", "algo.kl.estimator": "k3", "reward.clip_range": [-3, 3],
    "actor.lr_scheduler": "constant", "critic.lr_scheduler": "constant", "actor.adam.betas": [0.8, 0.9],
    "critic.adam.betas": [0.8, 0.9], "actor.optim": "muon", "critic.optim": "muon", "optim": "sgd",
    f"{verl._ACTOR}.loss_agg_mode": "seq-mean-token-mean", f"{verl._ACTOR}.optim.lr_scheduler_type": "cosine",
    "critic.optim.lr_scheduler_type": "cosine", f"{verl._ACTOR}.optim.optimizer": "SGD",
    "critic.optim.optimizer": "SGD",
    "ds.param_dtype": "fp16", f"{verl._ROLLOUT}.enforce_eager": True,
}  # fmt: skip
CASES: list[tuple[str, str, Callable[[Mapping[str, Any]], str], Mapping[str, Setting]]] = [
    ("trl", "x.py", _trl, {**trl._RL, **trl._POLICY, **trl._OPTIMIZER}),
    ("openrlhf", "x.sh", _openrlhf, {**openrlhf._RL, **openrlhf._POLICY, **openrlhf._CRITIC}),
    ("verl", "x.sh", _verl, {**verl._RL, **verl._POLICY, **verl._CRITIC}),
]


@pytest.mark.parametrize(("framework", "file", "text", "table"), CASES, ids=["trl", "openrlhf", "verl"])
def test_no_setting_of_a_table_is_lost(
    tmp_path: Path, framework: str, file: str, text: Callable[..., str], table: Mapping[str, Setting]
) -> None:
    """Each changes the recipe, or is named."""
    translate = {"trl": trl.translate, "openrlhf": openrlhf.translate, "verl": verl.translate}[framework]

    def of(settings: Mapping[str, Any]) -> tuple[str, list[str]]:
        (tmp_path / file).write_text(text(settings))
        translation = translate(Origin(tmp_path / file, tmp_path / "mine"))
        return json.dumps(translation.recipe), translation.untranslated

    before, _ = of({})
    lost = []
    for name, setting in table.items():
        default = setting.default
        value = VALUES.get(name, default * 2 if isinstance(default, int | float) and default else 0.25)
        after, named = of({name: value})
        if after == before and not any(each.startswith(f"{name} = ") for each in named):
            lost.append(name)
    assert lost == []


@pytest.mark.parametrize(
    ("framework", "file", "text", "sentence"),
    [
        ("trl", "a.py", "x = (", "it is no Python: '(' was never closed"),
        ("trl", "a.py", "print(1)", "it has 0 configs and 0 trainers of GRPO, RLOO, DPO, KTO, Reward, SFT; give a"),
        ("trl", "a.py", _trl({}).replace("GRPOConfig()", "parsed"), "it has 0 configs and 1 trainers of GRPO"),
        ("trl", "a.toml", "x = 1", "give a script of TRL (.py), or the .yaml file of its command"),
        ("trl", "a.yaml", "learning_rate: 1", "it has no dataset_name, so there is nothing to train on"),
        ("trl", "a.yaml", "dataset_name: a/b", "it does not say whether it is of `trl grpo`, `trl dpo` or `trl sft`"),
        ("trl", "a.yaml", "dataset_name: a/b\nbeta: 0.1\nloss_type: nca_pair", "loss_type nca_pair has no count"),
        ("trl", "a.yaml", "dataset_name: a/b\nbeta: 0.1\nmax_steps: many", "a value has not the type that trl"),
        (
            "trl", "a.py",
            _trl({}).replace("def f(completions, **kwargs): return [1.0]", "from rewards import f"),
            "reward_funcs has `f`, which is no function of this file: define it there, at the top level",
        ),
        (
            "trl", "a.py",
            _trl({}).replace("def f(completions, **kwargs): return [1.0]", "from trl.rewards import f"),
            "reward_funcs has `f` of TRL, which has no counterpart here; there are accuracy_reward, reasoning_accur",
        ),
        ("trl", "a.py", _overlong(1280), "(max_completion_len=1280, soft_punish_cache=64) is `shaping.overlong` here"),
        *[
            (
                "trl", "a.py", _trl({}).replace("GRPOTrainer(", f"GRPOTrainer({name}=mine, "),
                f"GRPOTrainer has {name}, whose counterpart is `rl.environment: {{type: {kind}",
            )
            for name, kind in (("environment_factory", "agent"), ("tools", "tools"), ("rollout_func", "executor"))
        ],
        ("trl", "a.py", _trl({"num_generations": 3}), "8 completions of a batch are not divisible by num_gen"),
        ("openrlhf", "a.sh", "echo", "it has 0 commands of openrlhf.cli.train_ppo_ray, openrlhf.cli.train_sft, "),
        ("openrlhf", "a.sh", _openrlhf({"x": "'"}), "its command cannot be split into words: No closing quotation"),
        ("openrlhf", "a.sh", _openrlhf({"algo.advantage.estimator": "flash_reinforce"}), "flash_reinforce has no"),
        (
            "openrlhf", "a.sh", _openrlhf({"actor.policy_loss_type": "gspo"}),
            "gspo with algo.advantage.estimator gae has no counterpart here, where gspo compares the completions",
        ),
        (
            "verl", "a.sh", _verl({f"{verl._ACTOR}.policy_loss.loss_mode": "gspo"}),
            "adv_estimator gae with the loss gspo has no counterpart here, where it compares the completions of a pro",
        ),
        ("verl", "a.sh", _verl({"algorithm.adv_estimator": "remax"}), "adv_estimator remax with the loss vanilla"),
        ("verl", "a.yaml", "a: 1", "it has none of actor_rollout_ref, algorithm and data, so it is not verl's"),
        ("verl", "a.yaml", "data: {val_files: x.jsonl}", "it has no data.train_files, so there is nothing to train"),
        (
            "verl", "a.sh",
            _verl({"reward_model.overlong_buffer.enable": True, "reward_model.overlong_buffer.len": 64,
                   "reward_model.max_resp_len": 99}),
            "reward_model.max_resp_len is 99, and the penalty of long completions ends at data.max_response_length",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_parsed_is_refused_in_one_sentence(
    tmp_path: Path, framework: str, file: str, text: str, sentence: str
) -> None:
    (tmp_path / file).write_text(text)
    done = CliRunner().invoke(
        app, ["init", "--from", framework, str(tmp_path / file), str(tmp_path / "mine"), "--model", "a/b"]
    )
    assert done.exit_code == 1
    assert sentence in done.output
    assert len(done.output.splitlines()) == 1
    assert not (tmp_path / "mine").exists()


def test_a_setting_out_of_its_limits_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(_verl({"data.train_batch_size": 0}))
    done = CliRunner().invoke(app, ["init", "--from", "verl", f"{tmp_path}/a.sh", f"{tmp_path}/mine", "--model", "a/b"])
    assert done.exit_code == 1
    assert "rl.prompts_per_step" in done.output
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("framework", "file", "text", "named"),
    [
        ("openrlhf", "a.sh", _openrlhf({"actor.lr_scheduler": "constant", "actor.min_lr_ratio": 0.5}),
         "actor.min_lr_ratio = 0.5: the schedule is constant, and never falls"),
        ("openrlhf", "a.sh", _openrlhf({"data.prompt_split": "test"}), "split = 'test': files have no splits"),
        ("verl", "a.sh", _verl({f"{verl._ACTOR}.optim.min_lr_ratio": 0.5}), "min_lr_ratio = 0.5: the schedule is"),
        ("verl", "a.sh", _verl({"reward_model.reward_kwargs.x": 1}), "kwargs.x = 1: what it adds to the rewards"),
        ("trl", "a.py", _trl({"scale_rewards": "other"}), "scale_rewards = 'other': here there are only"),
        ("trl", "a.py", _trl({"max_steps": 8, "num_train_epochs": 2}), "num_train_epochs = 2: max_steps is set, which"),
        ("trl", "a.py", _trl({"loss_type": "sapo", "delta": 2.0}), "delta = 2.0: sapo has none"),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_named(tmp_path: Path, framework: str, file: str, text: str, named: str) -> None:
    (tmp_path / file).write_text(text)
    arguments = ["init", "--from", framework, f"{tmp_path}/{file}", f"{tmp_path}/mine", "--model", "a/b"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert named in done.output


@pytest.mark.parametrize(
    ("framework", "file", "text", "divided"),
    [
        (
            "openrlhf", "a.sh",
            _openrlhf({"algo.advantage.estimator": "dr_grpo", "actor.policy_loss_type": "gspo",
                       "actor.loss_agg_mode": "token-mean"}),
            False,
        ),
        (
            "verl", "a.sh",
            _verl({"algorithm.adv_estimator": "grpo", f"{verl._ACTOR}.policy_loss.loss_mode": "gspo",
                   f"{verl._ACTOR}.loss_agg_mode": "token-mean", f"{verl._ROLLOUT}.n": 8}),
            True,
        ),
    ],
)  # fmt: skip
def test_gspo_is_a_mean_of_completions(tmp_path: Path, framework: str, file: str, text: str, divided: bool) -> None:
    (tmp_path / file).write_text(text)
    arguments = ["init", "--from", framework, f"{tmp_path}/{file}", f"{tmp_path}/mine", "--model", "a/b"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    rl = load_recipe(f"{tmp_path}/mine/recipe.yaml").recipe.stages["rl"].model_dump()
    gspo = rl["gspo"]
    assert (rl["algorithm"], gspo["aggregation"], gspo["divide_by_deviation"]) == ("gspo", "sequence", divided)
    assert gspo["dual_clip"] is None
    assert "loss_agg_mode = 'token-mean': gspo is a mean of completions" in done.output


_OF_GROUPS = {"algorithm.adv_estimator": "grpo", f"{verl._ROLLOUT}.n": 8}


@pytest.mark.parametrize(
    ("loss", "settings", "algorithm", "block"),
    [
        (
            "geo_mean", {"clip_ratio": 0.4, "loss_agg_mode": "token-mean"}, "gmpo",
            {"clip_low": 0.4, "clip_high": 0.4, "aggregation": "sequence", "dual_clip": None},
        ),
        (
            "dppo_tv", {"clip_ratio": 0.15, "clip_ratio_c": 20.0}, "dppo",
            {"clip_low": 0.15, "clip_high": 0.15, "max_ratio": 20.0, "mismatch": None, "aggregation": "token"},
        ),
    ],
)  # fmt: skip
def test_losses_of_verl(
    tmp_path: Path, loss: str, settings: dict[str, Any], algorithm: str, block: dict[str, Any]
) -> None:
    of_actor = {f"{verl._ACTOR}.{name}": value for name, value in settings.items()}
    correction = {"algorithm.rollout_correction.rollout_is": "token"} if loss == "dppo_tv" else {}
    chosen = {f"{verl._ACTOR}.policy_loss.loss_mode": loss}
    (tmp_path / "a.sh").write_text(_verl({**_OF_GROUPS, **chosen, **of_actor, **correction}))
    done = CliRunner().invoke(app, ["init", "--from", "verl", f"{tmp_path}/a.sh", f"{tmp_path}/mine", "--model", "a/b"])
    assert done.exit_code == 0, done.output
    rl = load_recipe(f"{tmp_path}/mine/recipe.yaml").recipe.stages["rl"].model_dump()
    assert (rl["algorithm"], {name: rl[algorithm][name] for name in block}) == (algorithm, block)
    assert ("rollout_is = 'token': the ratio of dppo is to the engine's probability" in done.output) == bool(correction)


@pytest.mark.parametrize(
    "place", ["reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg",
              "reward.reward_kwargs.overlong_buffer_cfg"],
)  # fmt: skip
def test_the_overlong_buffer_of_verl_is_shaping(tmp_path: Path, place: str) -> None:
    settings = {f"{place}.enable": True, f"{place}.len": 64, f"{place}.penalty_factor": 0.5, f"{place}.log": False}
    (tmp_path / "a.sh").write_text(_verl({**settings, f"{place.rpartition('.')[0]}.max_resp_len": 512}))
    translation = verl.translate(Origin(tmp_path / "a.sh", tmp_path / "mine"))
    assert translation.recipe["rl"]["ppo"]["shaping"] == {"overlong": {"buffer": 64, "penalty": 0.5}}
    assert translation.untranslated == []


def test_verls_own_score_of_a_data_set_is_equality(folder: Path) -> None:
    row = {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "2+2?"}]}
    rows = [{**row, "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"n": n}} for n in range(8)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = {"data.train_files": "rows.jsonl", "reward.custom_reward_function.path": "null"}
    sizes = {"data.train_batch_size": 4, f"{verl._ACTOR}.ppo_mini_batch_size": 4, "data.max_response_length": 16}
    Path("a.sh").write_text(_verl({**_OF_GROUPS, **file, **sizes}))
    printed = translated("verl", "a.sh")
    recipe = load_recipe("mine/recipe.yaml").recipe
    assert recipe.data["train"].columns == {"answer": "reward_model.ground_truth"}
    reward = recipe.stages["rl"].model_dump()["grpo"]["rewards"]["reward"]
    assert (reward["type"], reward["kind"]) == ("verifier", "math")
    assert any(line.startswith("assumed: the reward: verl has scores for some data sets") for line in printed)
    check("mine/recipe.yaml", []).call_functions(None)


@pytest.mark.parametrize(
    ("framework", "file", "text"),
    [
        (
            "trl", "a.py",
            _trl({"reward_weights": [1.0, 0.5]}).replace("reward_funcs=f", "reward_funcs=[f, 'me/judge']"),
        ),
        ("openrlhf", "a.sh", _openrlhf({"reward.model_name_or_path": "me/judge"}).replace(
            "--reward.remote_url f.py", "--reward.normalize_enable --critic.model_name_or_path me/judge")),
        ("verl", "a.sh", _verl({"reward_model.enable": True, "reward_model.model.path": "me/judge",
                                "reward.custom_reward_function.path": "null"})),
        ("verl", "a.sh", _verl({"reward.reward_model.enable": True, "reward.reward_model.model_path": "me/judge",
                                "reward.custom_reward_function.path": "null"})),
    ],
)  # fmt: skip
def test_a_reward_model_by_name_is_a_stage(tmp_path: Path, framework: str, file: str, text: str) -> None:
    (tmp_path / file).write_text(text)
    arguments = ["init", "--from", framework, f"{tmp_path}/{file}", f"{tmp_path}/mine", "--model", "a/b"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    stages = load_recipe(f"{tmp_path}/mine/recipe.yaml").recipe.stages
    judge, rl = stages["reward"].model_dump(), stages["rl"].model_dump()
    assert (judge["kind"], judge["source"]["repository"]) == ("reward_model", "me/judge")
    reward = rl[rl["algorithm"]]["rewards"]["reward"]
    weight = 0.5 if framework == "trl" else 1.0
    assert (reward["type"], reward["model"], reward["weight"]) == ("reward_model", "reward", weight)
    assert reward["normalize"] == (framework == "openrlhf")
    assert "me/judge" not in done.output  # nothing of it is named as not translated


def test_gpus_of_verl_are_shared(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(
        _verl({
            "trainer.n_gpus_per_node": 8, "trainer.nnodes": 2, f"{verl._ROLLOUT}.tensor_model_parallel_size": 4,
            f"{verl._MODEL}.path": "a/b",
        })
    )  # fmt: skip
    done = CliRunner().invoke(app, ["init", "--from", "verl", f"{tmp_path}/a.sh", f"{tmp_path}/mine"])
    assert done.exit_code == 0, done.output
    rl = load_recipe(f"{tmp_path}/mine/recipe.yaml").recipe.stages["rl"].model_dump()
    assert (rl["hybrid"], rl["placement"]["workers"], rl["rollout"]["engines"]) == (True, 16, 4)


def test_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(_verl({}))
    done = CliRunner().invoke(app, ["init", "--from", "verl", f"{tmp_path}/a.sh", f"{tmp_path}/mine"])
    assert (done.exit_code, done.output.endswith("it does not name its model by a text: give --model\n")) == (1, True)
    assert CliRunner().invoke(app, ["init", "grpo", f"{tmp_path}/mine"]).exit_code == 2


def test_the_json_document_names_what_was_not_translated(folder: Path) -> None:
    document = json.loads("\n".join(translated("trl", "trl/train_sft.py", "--json")))
    assert [Path(path).name for path in document["paths"]] == ["recipe.yaml"]
    assert document["untranslated"][1] == "packing = True: here it is always so"
    assert [text.partition(":")[0] for text in document["assumed"]] == [
        "a batch is per_device_train_batch_size x gradient_accumulation_steps = 8, of one process", "CPUs"
    ]  # fmt: skip


def test_a_script_is_never_run(folder: Path) -> None:
    script = Path("trl/train_sft.py")
    script.write_text(script.read_text() + "\nopen('ran', 'w')\n")
    translated("trl", str(script))
    assert not Path("ran").exists()


QUICK_START = """from datasets import load_dataset
from trl import GRPOTrainer
from trl.rewards import accuracy_reward

dataset = load_dataset("json", data_files="rows.jsonl", split="train")
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=accuracy_reward,
    train_dataset=dataset,
)
trainer.train()
"""


def test_the_quick_start_of_trl(folder: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{i}+1?"}], "solution": f"${i + 1}$"} for i in range(64)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("train.py").write_text(QUICK_START)
    translated("trl", "train.py")
    recipe = load_recipe("mine/recipe.yaml").recipe
    rl = recipe.stages["rl"].model_dump()
    assert recipe.data["train"].columns == {"answer": "solution"}
    assert (rl["prompts_per_step"], rl["steps"], rl["grpo"]["group_size"]) == (1, 192, 8)  # TRL's defaults
    assert (rl["grpo"]["optimizer"]["learning_rate"], rl["grpo"]["aggregation"]) == (1e-6, "token")
    reward = rl["grpo"]["rewards"]["accuracy_reward"]
    assert (reward["type"], reward["kind"], reward["pattern"]) == ("verifier", "math", None)
    assert "rl" in check("mine/recipe.yaml", []).graph


@pytest.mark.parametrize(
    ("name", "completion", "reward"),
    [
        ("accuracy_reward", r"so it is \boxed{4}", 1.0),
        ("reasoning_accuracy_reward", r"<think>2, no</think> It is \boxed{4}.", 1.0),
        ("reasoning_accuracy_reward", r"<think>4</think> It is \boxed{2}.", 0.0),
        ("reasoning_accuracy_reward", r"<think>so it is \boxed{4}", 0.0),
        ("think_format_reward", "<think>\nyes\n</think>\n4", 1.0),
        ("think_format_reward", "<think>yes 4", 0.0),
        ("think_format_reward", "<think>yes<think>no</think> 4", 0.0),
        ("think_format_reward", "yes <think>no</think> 4", 0.0),
    ],
)
@pytest.mark.parametrize("file", ["a.py", "a.yaml"])
def test_rewards_of_trl(tmp_path: Path, file: str, name: str, completion: str, reward: float) -> None:
    script = _trl({}).replace("def f(completions, **kwargs): return [1.0]", f"from trl.rewards import {name} as f")
    (tmp_path / file).write_text(script if file == "a.py" else f"dataset_name: a/b\nreward_funcs: [{name}]\n")
    translation = trl.translate(Origin(tmp_path / file, tmp_path))
    for path, text in translation.files.items():
        (tmp_path / path).write_text(text)
    settings = translation.recipe["rl"]["grpo"]["rewards"][name]
    config = (VerifierReward if settings["type"] == "verifier" else FunctionReward).model_validate(settings)
    built = build_text_reward(config, LocalContext(tmp_path / "work", user_files_root=tmp_path))
    assert built([completion], ["2+2?"], [{"answer": "4"}]).rewards == [reward]
    built.close()


def test_an_overlong_punishment_of_trl_is_shaping(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(_overlong(256))
    block = trl.translate(Origin(tmp_path / "a.py", tmp_path)).recipe["rl"]["grpo"]
    assert (list(block["rewards"]), block["shaping"]) == (["f"], {"overlong": {"buffer": 64, "penalty": 0.5}})


def test_arguments_of_a_trainer_by_position(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "def f(completions, **kwargs): return [1.0]\n"
        "t = GRPOTrainer('a/b', f, GRPOConfig(num_generations=4), load_dataset('c/d'), held_out)\n"
    )
    translation = trl.translate(Origin(tmp_path / "a.py", tmp_path))
    assert (translation.model, translation.recipe["data"]["train"]["source"]["repository"]) == ("a/b", "c/d")
    assert translation.recipe["rl"]["grpo"]["group_size"] == 4
    assert translation.untranslated == ["GRPOTrainer.argument 5 = held_out: it has no counterpart here"]


def test_a_reward_that_uses_trl_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        _trl({}).replace("def f(", "from trl.rewards import think\ndef f(").replace("[1.0]", "think()")
    )
    with pytest.raises(RecipeError, match=r"the reward f uses from trl\.rewards import think, which there is not here"):
        trl.translate(Origin(tmp_path / "a.py", tmp_path / "mine"))


@pytest.mark.parametrize(
    ("framework", "file", "text", "mismatch"),
    [
        ("trl", "a.py", _trl({"beta": 0.1}), None),
        ("trl", "a.py", _trl({"use_vllm": True}), ("mask", "sequence", 0.0, 3.0)),
        (
            "trl", "a.py",
            _trl({"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate",
                  "vllm_importance_sampling_clip_max": 2.0}),
            ("truncate", "token", 0.0, 2.0),
        ),
        (
            "openrlhf", "a.sh",
            _openrlhf({"algo.advantage.is_correction_level": "token", "algo.advantage.is_correction_mode": "clip"}),
            ("truncate", "token", 0.5, 5.0),
        ),
        ("openrlhf", "a.sh", _openrlhf({"algo.advantage.is_correction_level": "seq"}), None),
        (
            "verl", "a.sh", _verl({"algorithm.rollout_correction.rollout_is": "sequence"}),
            ("truncate", "sequence", 0.0, 2.0),
        ),
    ],
)  # fmt: skip
def test_corrections_of_the_mismatch(
    tmp_path: Path, framework: str, file: str, text: str, mismatch: tuple[str, str, float, float] | None
) -> None:
    (tmp_path / file).write_text(text)
    arguments = ["init", "--from", framework, f"{tmp_path}/{file}", f"{tmp_path}/mine", "--model", "a/b"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    rl = load_recipe(f"{tmp_path}/mine/recipe.yaml").recipe.stages["rl"].model_dump()
    given = rl["grpo" if framework == "trl" else "ppo"]["mismatch"]
    names = ("correction", "ratio_of", "low", "high")
    assert (given and tuple(given[name] for name in names)) == mismatch
    assert ("is_correction_level = 'seq': see `mismatch`" in done.output) == ("is_correction_level seq" in text)


PAGE = HERE.parents[1] / "docs" / "reference" / "other-frameworks.md"


@pytest.mark.parametrize(("framework", "index"), [("trl", 0), ("openrlhf", 1), ("verl", 2)])
def test_the_columns_of_the_page(tmp_path: Path, framework: str, index: int) -> None:
    """The right column is a part of the recipe that is made of the left one."""
    left, right = re.findall(r"<td><pre>\n(.*?)</pre></td>", PAGE.read_text(), re.DOTALL)[2 * index : 2 * index + 2]
    file = tmp_path / ("train.py" if framework == "trl" else "train.sh")
    file.write_text(left)
    done = CliRunner().invoke(app, ["init", "--from", framework, str(file), f"{tmp_path}/mine"])
    assert done.exit_code == 0, done.output
    made = read_yaml(Path(f"{tmp_path}/mine/recipe.yaml").read_text())
    assert missing(read_yaml(right), made) == []


def missing(part: Any, whole: Any, place: str = "") -> list[str]:
    """Return the places where `part` has what `whole` does not."""
    if not isinstance(part, Mapping):
        return [] if part == whole else [f"{place}: {part!r}, not {whole!r}"]
    if not isinstance(whole, Mapping):
        return [f"{place}: {whole!r}"]
    return [each for key in part for each in missing(part[key], whole.get(key), f"{place}.{key}")]
