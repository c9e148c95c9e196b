"""Mutated recipes through the steps of `alignment plan`: each is planned, or rejected with our message; the stages
accept all that is planned.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.stack.environment import RECIPES
from rlhf_core.algorithms import build_algorithm
from rlhf_core.config.base import configs_below, result_settings
from rlhf_core.config.engines.rollout import SamplingConfig
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.config.stages.trained import OptimizerConfig, SupervisedConfig
from rlhf_core.contract import Stage
from rlhf_core.errors import AlignmentError
from rlhf_core.pipeline.estimates import Known, estimates
from rlhf_core.pipeline.plan import plan
from rlhf_core.pipeline.prepare import Checked, check
from rlhf_core.rollout.engine import SamplingParameters
from rlhf_core.system.yaml_text import read_yaml_file
from rlhf_core.training.optimizers import learning_rate
from tests.mutations import PATIENCE, examples
from tests.rlhf_core.recipes import OPTIMIZER, RECIPE, validation, write

MOST_CALLS = 5_000_000  # of Python functions in one plan; a right recipe takes some tens of thousands
# What pydantic, Python and other libraries say.
FOREIGN = re.compile(
    r"[Ii]nput should|validation error|Traceback|pydantic|NoneType|object is not|object has no|unexpected keyword|"
    r"\[type=|KeyError|list index|must be str, not|Value error"
)

pytestmark = [pytest.mark.endurance("mutations"), PATIENCE]

SMALL = copy.deepcopy(RECIPE)
SMALL["sft"] |= {"lora": {"rank": 4}, "validation": {"dataset": "talks", "every_steps": 1}}
SMALL["rl"] |= {
    "validation": validation(),
    "keep": {"rollouts_every": 2, "policy_every": 3},
    "grpo": {
        "rewards": {"exact": {"type": "verifier"}},
        "optimizer": OPTIMIZER,
        "kl": {"coefficient": 0.1},
        "teacher": {"model": "base", "hint": " ({{ row.answer }})"},
        "cross_entropy": {"coefficient": 0.1, "least_reward": 1.0},
    },
    "lora": {"rank": 4},
    "engine": {"dtype": "float32"},
    "placement": {"workers": 1},
    "checkpoint": {"every_steps": 5},
}
PAIRS = {**RECIPE["sft"], "dataset": "pairs", "model": "sft"}
SMALL["seen"] = {"stage": "logprobs", "dataset": "pairs", "model": "sft", "max_length": 64}
SMALL["dpo"] = {**PAIRS, "stage": "preference", "reference": {"logprobs": ["seen"]},
                "losses": {"dpo": {"type": "dpo", "label_smoothing": 0.1}, "nll": {"type": "nll"}}}  # fmt: skip
SMALL["own"] = {
    "stage": "generate", "dataset": "prompts", "model": "sft", "samples": 4, "sampling": {"max_tokens": 8},
    "rollout": {"max_length": 64}, "rewards": {"exact": {"type": "verifier"}, "taste": {"type": "reward_model"}},
    "reference": {"model": "base"}, "keep_tokens": True, "engine": {"dtype": "float32"}, "placement": {"workers": 2},
}  # fmt: skip
SMALL["own-pairs"] = {"stage": "pairs", "dataset": "own", "select": "all", "margin": 0.5}
SMALL["own-labels"] = {"stage": "unpaired", "dataset": "own", "threshold": 0.5, "margin": 0.25}
SMALL["best"] = {"stage": "best_of_n", "dataset": "own", "least_reward": 1.0}
SMALL["told"] = {"stage": "conditional", "dataset": "own", "text": " [{reward}]", "decimals": 2}
SMALL["wanted"] = {"stage": "conditional_prompts", "dataset": "prompts", "reward": 1.0}
SMALL["again"] = {**RECIPE["sft"], "stage": "sft", "model": "sft", "dataset": "best"}
SMALL["orpo"] = {
    **PAIRS,
    "dataset": "own-pairs",
    "stage": "preference",
    "losses": {"orpo": {"type": "orpo"}},
    "lora": {"rank": 4},
}
SMALL["data"]["judged"] = {"format": "unpaired", "source": {"type": "files", "paths": ["judged.jsonl"]}}
SMALL["kto"] = {**PAIRS, "dataset": "judged", "batch_size": 2, "reference": {"model": "base"}}
SMALL["top"] = {"stage": "top_logprobs", "dataset": "talks", "model": "dpo", "max_length": 64, "k": 8}
STUDENT = {**RECIPE["sft"], "stage": "distillation", "model": "base"}
SMALL["student"] = {**STUDENT, "teacher": {"top_logprobs": ["top"]}, "cross_entropy_coefficient": 0.5}
SMALL["pupil"] = {**STUDENT, "teacher": {"model": "dpo"}, "divergence": "jensen_shannon", "temperature": 2.0}
SMALL["data"]["steps"] = {"format": "stepwise", "source": {"type": "files", "paths": ["steps.jsonl"]}}
SMALL["data"]["held-out-steps"] = {"format": "stepwise", "source": {"type": "files", "paths": ["held-out.jsonl"]}}
SMALL["data"]["rewarded"] = {"format": "completions", "source": {"type": "files", "paths": ["rewarded.jsonl"]}}
SMALL["letters"] = {**PAIRS, "stage": "process_reward_model", "dataset": "steps", "separator": "\n",
                    "validation": {"dataset": "held-out-steps", "every_steps": 1, "metric": "accuracy"}}  # fmt: skip
SMALL["scale"] = {**PAIRS, "stage": "reward_regression", "dataset": "rewarded"}
SMALL["merged"] = {"stage": "merge_models", "model": "sft", "method": "ties", "density": 0.5,
                   "others": [{"model": "dpo", "weight": 0.5}]}  # fmt: skip
SMALL["second"] = {**RECIPE["sft"], "stage": "sft", "model": "sft"}
SMALL["evaluation"] = SMALL.pop("evaluation")  # below all that it evaluates
SMALL["own"]["model"] = SMALL["again"]["model"] = "accepted"
SMALL["loop"] = {
    "start": "sft", "candidate": "again", "prompts": "prompts", "prompts_per_round": 2,
    "gate": {"evaluation": "evaluation", "scorer": "exact", "completions": "sampled", "margin": 0.1},
}  # fmt: skip
SHIPPED = {path.stem: read_yaml_file(path) for path in sorted(RECIPES.glob("*.yaml"))}
for shipped in SHIPPED.values():
    if (source := shipped.get("base", {}).get("source", {})).get("type") == "hub":
        source["revision"] = "f" * 40  # there is no hub to ask

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 0.5, -0.5, 1e-12, 1e30, 10**30, -(10**30), 1e9, 2**31, 2**63, 100, "", " ", "none",
    "null", "yes", "no", "0", "1e-4", "sft", "rl", "base", "data", "prompts", "text", "nowhere", "policy", "stage",
    "a/b", "../x", "/", "s3://b/x", "http://", "x" * 3000, "\n", "é漢", "\u202e", "{}", "--index-url=x", [], [[]],
    [None], [1], ["a"], ["prompts", "prompts"], {}, {"type": None}, {"type": "files"}, {"type": []}, {"a": {"b": {}}},
    {"stage": "sft"}, {"stage": None}, {"": 1},
]  # fmt: skip

CHANGES = ["odd", "odd", "odd", "remove", "rename", "move", "duplicate", "swap", "wrap", "scale"]
Path_ = tuple[Any, ...]


def places(value: Any, at: Path_ = ()) -> Iterator[Path_]:
    """Every place of a tree but its root."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*at, key)
        yield from places(item, (*at, key))


def holder(tree: Any, place: Path_) -> Any:
    for key in place[:-1]:
        tree = tree[key]
    return tree


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """A recipe that was right, and one to four changes of it."""
    written = json.dumps(draw(st.sampled_from([SMALL, SMALL, *SHIPPED.values()])))
    recipe: dict[str, Any] = json.loads(written)  # nothing of it in two places: moved into itself, it would be a circle
    for _ in range(draw(st.integers(1, 4))):
        change(draw, recipe)
    return recipe


def change(draw: st.DrawFn, recipe: dict[str, Any]) -> None:
    known = list(places(recipe))
    if not known:
        return
    place = draw(st.sampled_from(known))
    inside, key = holder(recipe, place), place[-1]
    match draw(st.sampled_from(CHANGES)):
        case "odd":
            inside[key] = copy.deepcopy(draw(st.sampled_from(ODD)))
        case "remove":
            del inside[key]
        case "rename" if isinstance(inside, dict):
            inside[f"{key}{draw(st.sampled_from(['s', '_', '-2', '.x', ' ', '']))}"] = inside.pop(key)
        case "move":
            moved, target = inside.pop(key), draw(st.sampled_from(known))
            try:
                there = holder(recipe, target)
                there[target[-1]] = moved
            except (KeyError, IndexError, TypeError):
                inside.insert(key, moved) if isinstance(inside, list) else inside.update({key: moved})
        case "duplicate" if isinstance(inside, dict):
            copied = copy.deepcopy(inside[key])
            if isinstance(copied, dict) and len(place) == 1:
                copied.setdefault("stage", key)
            inside[f"{key}-again"] = copied
        case "swap":
            other = draw(st.sampled_from(known))
            theirs = holder(recipe, other)[other[-1]]
            inside[key] = copy.deepcopy(theirs)
        case "wrap":
            inside[key] = draw(st.sampled_from([[inside[key]], {"value": inside[key]}, str(inside[key])]))
        case "scale" if isinstance(inside[key], int | float):
            inside[key] = inside[key] * draw(st.sampled_from([-1, 0, 10, 1000, 1e6, 1e-9]))


@contextmanager
def few_calls() -> Iterator[None]:
    """Ends what calls functions without end."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        if event == "call":
            calls += 1
            if calls > MOST_CALLS:
                raise TimeoutError(f"more than {MOST_CALLS} calls")

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)


def planned_or_refused(path: str, overrides: list[str]) -> Checked | None:
    """As `alignment plan`; None: refused."""
    try:
        with few_calls():
            checked = check(path, overrides)
            plan(checked.graph, None)
            estimates(checked.graph, Known(checked.seen, checked.loaded.root, {}, []))
            return checked
    except AlignmentError as error:
        said = str(error)
        assert not FOREIGN.search(said), said
        assert all(len(line) > 10 for line in said.splitlines()), said
        return None


def taken(stage: Stage, config: Any) -> None:
    """What a job does first with its settings."""
    again = stage.config.model_validate_json(json.dumps(config.model_dump(mode="json")))
    assert again == config
    assert json.dumps(result_settings(again), allow_nan=False)
    again.reserves()
    for _, below in configs_below(config):
        if isinstance(below, SamplingConfig):
            SamplingParameters.of(below, (1,))
        if isinstance(below, OptimizerConfig):
            total = config.steps if isinstance(config, RLConfig) else 100
            rates = [learning_rate(below, step, total) for step in (0, total // 2, total - 1)]
            assert all(0 <= rate <= below.learning_rate for rate in rates)
            assert max(rates) > 0
    if isinstance(config, RLConfig):
        build_algorithm(config)
    if isinstance(config, SupervisedConfig | RLConfig):
        assert config.placement.workers >= 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the recipes name, those of the shipped ones among them."""
    folder = tmp_path_factory.mktemp("mutated")
    write(folder)
    return Path(shutil.copytree(RECIPES, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True))


@pytest.fixture(autouse=True)
def _no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ALIGNMENT_STORE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)


SETTINGS = examples(25)


@pytest.mark.slow("plans every recipe")
def test_the_recipes_are_right_before_they_are_changed_and_planned_without_torch(folder: Path) -> None:
    paths = []
    for name, recipe in {"small": SMALL, **SHIPPED}.items():
        paths.append(folder / f"right-{name}.yaml")
        paths[-1].write_text(json.dumps(recipe), encoding="utf-8")
    code = (
        "import sys\nfrom rlhf_core.pipeline.prepare import check\n"
        "for path in sys.argv[1:]:\n    print(path, flush=True)\n    check(path, [])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, *map(str, paths)], check=True)


@pytest.mark.slow("many examples")
@SETTINGS
@given(recipe=mutated())
def test_a_mutated_recipe_is_planned_or_refused_and_what_is_planned_is_taken(
    folder: Path, recipe: dict[str, Any]
) -> None:
    (folder / "mutated.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    checked = planned_or_refused(str(folder / "mutated.yaml"), [])
    for node in checked.graph.values() if checked is not None else ():
        taken(node.stage, node.config)


KEYS = sorted({".".join(map(str, place)) for place in places(SMALL) if not any(isinstance(k, int) for k in place)})


@SETTINGS
@given(
    overrides=st.lists(
        st.one_of(
            st.builds(
                lambda key, tail, value: f"{key}{tail}={value}",
                st.sampled_from(KEYS),
                st.sampled_from(["", "", "", ".x", "s", ".0", "."]),
                st.sampled_from([json.dumps(value) for value in ODD] + ["[1", "{a: 1", "*x", "&a 1", "!!int x", "'"]),
            ),
            st.text(max_size=20),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_odd_overrides_are_taken_or_refused(folder: Path, overrides: list[str]) -> None:
    (folder / "right.yaml").write_text(json.dumps(SMALL), encoding="utf-8")
    checked = planned_or_refused(str(folder / "right.yaml"), overrides)
    for node in checked.graph.values() if checked is not None else ():
        taken(node.stage, node.config)
