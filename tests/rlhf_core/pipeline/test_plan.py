"""The plan of a node, with its reasons."""

import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deployments.cli.main import app
from rlhf_core.artifacts.checkpoints import Checkpoint, Checkpoints
from rlhf_core.artifacts.manifest import Kind, Manifest
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.config.stages.language_models import SFTConfig
from rlhf_core.config.stages.preference import PreferenceConfig
from rlhf_core.config.stages.sampled import GenerateConfig
from rlhf_core.errors import RecipeError, StoreError
from rlhf_core.graph.graph import build_graph
from rlhf_core.graph.rerun import Rerun
from rlhf_core.models import logprobs
from rlhf_core.pipeline.estimates import Known, estimates
from rlhf_core.pipeline.expectations import Range
from rlhf_core.pipeline.memory import HEAD_CHUNK, KEPT_CHUNKS, Shape, memory
from rlhf_core.pipeline.plan import PlannedNode, plan
from rlhf_core.preflight.look import Seen, look
from rlhf_core.recipe.loading import LoadedRecipe, load_recipe
from rlhf_core.stages.key import computing_libraries
from tests.rlhf_core.recipes import planned
from tests.services import S3Server

pytestmark = pytest.mark.parts

README = Path(__file__).parents[3] / "README.md"
RECIPE = """
name: planned
data: {talks: {format: conversations, source: {type: files, paths: [talks.jsonl]}}}
base: {source: {type: scratch}}
sft: {dataset: talks, batch_size: 2, max_length: 64, optimizer: {learning_rate: 1e-3}}
report: null
"""


@pytest.fixture
def repository(tmp_path: Path, store_url: str) -> ArtifactRepository:
    (tmp_path / "talks.jsonl").write_text("{}", encoding="utf-8")
    (tmp_path / "planned.yaml").write_text(RECIPE, encoding="utf-8")
    return ArtifactRepository(open_store(store_url))


def load(tmp_path: Path, *overrides: str) -> LoadedRecipe:
    return load_recipe(str(tmp_path / "planned.yaml"), overrides)


def publish_all(
    loaded: LoadedRecipe, repository: ArtifactRepository, folder: Path, recipe: str = "", **metrics: int
) -> None:
    """What a finished run leaves in the store."""
    folder.mkdir()
    (folder / "file").write_text("content", encoding="utf-8")
    for node in build_graph(loaded, computing_libraries()).values():
        now = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
        manifest = Manifest(
            kind=Kind.DATASET, name=node.name, recipe=recipe, stage=node.stage.name, key=node.ref.key, files=(),
            parents=dict(node.input_refs), user_files=dict(node.user_files), config=node.config.model_dump(mode="json"),
            seed=node.seed, code_revision="0", libraries=dict(node.libraries), device_seconds=0.0,
            device="cpu", started_at=now, finished_at=now + timedelta(seconds=30), metrics=dict(metrics),
        )  # fmt: skip
        repository.publish(manifest, folder)


def said(loaded: LoadedRecipe, repository: ArtifactRepository | None) -> dict[str, str]:
    return {node.name: f"{node.action}: {node.why}" for node in planned(loaded, repository)}


def test_nothing_is_there_then_everything_is_reused(tmp_path: Path, repository: ArtifactRepository) -> None:
    loaded = load(tmp_path)
    assert said(loaded, None) == dict.fromkeys(["base", "data.talks", "sft"], "compute: no store is set")
    assert said(loaded, repository) == dict.fromkeys(["base", "data.talks", "sft"], "compute: never computed")
    assert list(repository.store.list("")) == []
    publish_all(loaded, repository, tmp_path / "files")
    assert said(loaded, repository) == dict.fromkeys(["base", "data.talks", "sft"], "reuse: made 2026-01-02 03:04")


@pytest.mark.parametrize("store_url", ["local"], indirect=True)
def test_the_plan_on_the_first_page_is_that_of_tiny(tmp_path: Path, repository: ArtifactRepository) -> None:
    publish_all(load_recipe("tiny", []), repository, tmp_path / "files")
    nodes = planned(load_recipe("tiny", ["sft.epochs=4"]), repository)
    computed = [(node.name, node.action, node.why) for node in nodes if node.action == "compute"]
    page = README.read_text(encoding="utf-8")
    assert f"tiny: {len(computed)} to compute, {len(nodes) - len(computed)} to reuse\n" in page
    rows = re.findall(r"^│ (\S+) +│ (\w+) │ (.+)$", page, re.MULTILINE)
    assert [row for row in computed if row[0] in ("sft", "rl", "evaluation.sft")] == rows


@pytest.mark.parametrize("store_url", ["local"], indirect=True)
def test_the_reason_is_what_changed(tmp_path: Path, repository: ArtifactRepository) -> None:
    publish_all(load(tmp_path), repository, tmp_path / "files")
    changed = said(load(tmp_path, "sft.optimizer.learning_rate=2e-3", "sft.placement.workers=2"), repository)
    assert changed["sft"] == "compute: optimizer.learning_rate: 0.001 → 0.002"
    assert changed["base"].startswith("reuse")

    assert said(load(tmp_path, "base.dtype=float32"), repository)["sft"] == "compute: after base"
    assert said(load(tmp_path, "seed=5"), repository)["base"] == "compute: seed: 0 → 5"

    (tmp_path / "talks.jsonl").write_text("[]", encoding="utf-8")
    by_file = said(load(tmp_path), repository)
    assert by_file["data.talks"] == "compute: the file talks.jsonl changed"
    assert by_file["sft"] == "compute: after data.talks"


@pytest.mark.parametrize("store_url", ["local"], indirect=True)
def test_the_reason_names_the_first_cause_and_inputs_that_are_read_from_elsewhere(
    tmp_path: Path, repository: ArtifactRepository
) -> None:
    merged = "first: {stage: sft, dataset: talks, batch_size: 1, max_length: 64, optimizer: {learning_rate: 1e-3}}\n"
    recipe = RECIPE.replace("report: null\n", merged + "report: null\n")
    (tmp_path / "planned.yaml").write_text(recipe, encoding="utf-8")
    publish_all(load(tmp_path), repository, tmp_path / "files")
    assert said(load(tmp_path, "base.dtype=float32"), repository)["first"] == "compute: after sft, because of base"
    assert said(load(tmp_path, "first.model=base"), repository)["first"] == "compute: model: sft → base"
    both = said(load(tmp_path, "seed=5"), repository)["first"]
    assert both == "compute: after data.talks, sft; seed: 0 → 5", "each has a cause of its own"


@pytest.mark.parametrize("store_url", ["local"], indirect=True)
def test_a_node_that_is_run_again_has_another_key_and_what_reads_it_too(
    tmp_path: Path, repository: ArtifactRepository
) -> None:
    loaded = load(tmp_path)
    publish_all(loaded, repository, tmp_path / "files")

    def planned_again(text: str) -> dict[str, PlannedNode]:
        graph = build_graph(loaded, computing_libraries(), rerun=Rerun.parse(text, label="own"))
        return {node.name: node for node in plan(graph, repository)}

    again = planned_again("base")
    assert {name: f"{node.action}: {node.why}" for name, node in again.items()} == {
        "base": "compute: computed again on purpose: base@own",
        "data.talks": "reuse: made 2026-01-02 03:04",
        "sft": "compute: after base",
    }
    assert planned_again("base@own")["sft"].ref == again["sft"].ref, "its results are found by its name"
    assert planned_again("base@other")["sft"].ref != again["sft"].ref
    with pytest.raises(RecipeError, match=r"`bsae` cannot be run again \(did you mean `base`"):
        planned_again("bsae")
    with pytest.raises(RecipeError, match="write NODE@LABEL"):
        planned_again("base@a/b")


@pytest.mark.parametrize("store_url", ["local"], indirect=True)
def test_an_artifact_that_lost_its_files_is_computed_again(tmp_path: Path, repository: ArtifactRepository) -> None:
    loaded = load(tmp_path)
    publish_all(loaded, repository, tmp_path / "files")
    for path in list(repository.store.list("blobs")):
        repository.store.delete(path)
    assert said(loaded, repository)["base"] == "compute: its files are gone from the store"


def test_a_checkpoint_says_where_a_killed_stage_goes_on(tmp_path: Path, repository: ArtifactRepository) -> None:
    loaded = load(tmp_path)
    ref = build_graph(loaded, computing_libraries())["sft"].ref
    checkpoints = Checkpoints(repository.store, ref)
    name = checkpoints.new_name(40)
    checkpoints.commit(
        Checkpoint(name=name, step=40, ranks=1, files=(), libraries={}, created_at=datetime(2026, 1, 2, tzinfo=UTC))
    )
    assert said(loaded, repository)["sft"] == "compute: never computed; resumes from step 40"
    assert said(load(tmp_path, "sft.checkpoint.resume=false"), repository)["sft"] == "compute: never computed"


def test_a_user_who_may_only_read_the_store_can_plan(
    tmp_path: Path, s3_server: S3Server, s3_store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "talks.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 4, encoding="utf-8")
    (tmp_path / "planned.yaml").write_text(RECIPE, encoding="utf-8")
    publish_all(load(tmp_path), ArtifactRepository(open_store(s3_store_url)), tmp_path / "files")
    monkeypatch.setenv("ALIGNMENT_STORE", s3_store_url)
    for name, value in s3_server.reader().items():
        monkeypatch.setenv(name, value)
    shown = CliRunner().invoke(app, ["plan", str(tmp_path / "planned.yaml"), "sft.max_steps=1"])
    assert shown.exit_code == 0, shown.output
    assert "planned: 1 to compute, 2 to reuse" in shown.output
    with pytest.raises(StoreError, match="refuses these credentials the bucket `tests`: correct AWS_"):
        publish_all(load(tmp_path, "seed=1"), ArtifactRepository(open_store(s3_store_url)), tmp_path / "more")


@pytest.mark.parametrize("store_url", ["local"], indirect=True)
def test_results_of_another_recipe_are_reused_but_not_compared_with(
    tmp_path: Path, repository: ArtifactRepository
) -> None:
    publish_all(load(tmp_path), repository, tmp_path / "files", recipe="another")
    said_of = said(load(tmp_path, "sft.optimizer.learning_rate=2e-3"), repository)
    assert said_of["base"].startswith("reuse")
    assert said_of["sft"] == "compute: never computed"


@pytest.mark.parametrize("store_url", ["local"], indirect=True)
def test_what_a_stage_takes(tmp_path: Path, repository: ArtifactRepository) -> None:
    rows = [{"prompt": f"What is {i}?", "completion": "a number"} for i in range(40)]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    before = load(tmp_path)
    publish_all(before, repository, tmp_path / "files", steps=10, parameters=1_000_000)
    earlier = list(repository.list_artifacts())

    loaded = load(tmp_path, "sft.epochs=3", "sft.engine.dtype=float32", "sft.engine.zero_stage=0")
    seen, graph = look(loaded), build_graph(loaded, computing_libraries())
    of_base = next(manifest for manifest in earlier if manifest.stage == "base")
    known = Known(seen, loaded.root, {"base": of_base}, earlier)
    found = estimates(graph, known)
    assert list(found) == ["data.talks", "sft"]
    assert (found["data.talks"].rows, found["data.talks"].steps) == (40, None)
    sft = found["sft"]
    assert (sft.rows, sft.steps) == (40, 60), "20 batches of 2, three times"
    assert sft.tokens is not None
    assert 40 * 3 * 18 < sft.tokens < 40 * 3 * 30, "characters are tokens here"
    assert sft.time == Range(3.0 * 60, 90.0, 360.0, 1), "30 s for 10 steps before"
    # weights 4, gradients 4, AdamW 8 bytes a parameter; activations of 2048 tokens, 4 layers, 8 x 128 + 4 x 384, and of
    # their logits over 102 characters twice
    assert sft.memory.worker == 16 * 1_000_000 + 2048 * 4 * (8 * 128 + 4 * 384) * 4 + 2 * 2048 * 102 * 4
    assert estimates(graph, Known(Seen([], {}, {}, {}), loaded.root, {}, []))["sft"].time is None


def test_memory_by_hand() -> None:
    """7 billion parameters in bfloat16 on 8 workers: the 120 GB of arXiv:1910.02054's figure 1, sharded."""
    shape = Shape(7_500_000_000, 4096, 11008, 32, 32, 32, 128)
    shared = {"dtype": "bfloat16", "gradient_checkpointing": True, "tokens_per_micro_batch": 1}
    section = {"dataset": "x", "batch_size": 8, "max_length": 8, "optimizer": {"learning_rate": 1e-5}}
    needed = {
        stage: memory(
            SFTConfig.model_validate(
                {**section, "engine": {**shared, "zero_stage": stage}, "placement": {"workers": 8}}
            ),
            shape,
        ).worker
        / 1e9
        for stage in (2, 3)
    }
    # 2 bytes of weights; 4 of gradients (float32 here), 12 of the optimizer over 8
    assert needed[2] == pytest.approx(2 * 7.5 + (4 + 12) * 7.5 / 8, rel=1e-3)
    # a billion gathered weights, and a float32 bucket of half a billion
    assert needed[3] == pytest.approx((2 + 4 + 12) * 7.5 / 8 + 2 * 1 + 4 * 0.5, rel=1e-3)


def test_memory_of_what_deepspeed_gathers_is_that_of_its_settings() -> None:
    """Of 10 million parameters; of the two models on the ranks of preference learning one is gathered at a time."""
    passed = {"zero_optimization": {"reduce_bucket_size": 1_000_000, "stage3_max_live_parameters": 2_000_000}}
    shape = Shape(10_000_000, 16, 40, 3, 2, 2, 8)

    def worker(**engine: Any) -> float:
        settings = {"dtype": "float32", "zero_stage": 3, "tokens_per_micro_batch": 1, **engine}
        section = {"dataset": "x", "batch_size": 8, "max_length": 8, "optimizer": {"learning_rate": 1e-5}}
        config = PreferenceConfig.model_validate({**section, "losses": {"dpo": {"type": "dpo"}}, "engine": settings})
        return memory(config, shape).worker

    assert worker() - worker(deepspeed=passed) == 4 * (10e6 - 1e6) + 4 * (10e6 - 2e6)


def test_memory_of_a_quantised_base_by_hand() -> None:
    """Linear layers: of attention 2 x 16 x 8 x (2 + 2), of the feed-forward 3 x 16 x 40, in 3 layers; 1000 others."""
    linear = 3 * (1024 + 1920)
    shape = Shape(linear + 1000, 16, 40, 3, 2, 2, 8)
    section = {"dataset": "x", "batch_size": 8, "max_length": 8, "optimizer": {"learning_rate": 1e-5}}
    whole, packed = (
        memory(SFTConfig.model_validate({**section, "lora": {"rank": 2, **more}}), shape).worker
        for more in ({}, {"quantised": "nf4"})
    )
    assert whole - packed == (2 - 0.5 - 4 / 64) * linear


@pytest.mark.parametrize(
    ("checkpointing", "of_layers"),
    [(False, 3 * (8 * 16 + 4 * 40)), ("selective", 3 * (6 * 16 + 2 * 40) + 288), (True, 3 * 16 + 288)],
)
def test_memory_of_activations_by_hand(checkpointing: object, of_layers: int) -> None:
    """3 layers of width 16 and 40; one that is computed again is there whole for a while."""
    engine = {"dtype": "float32", "gradient_checkpointing": checkpointing, "tokens_per_micro_batch": 100}
    section = {"dataset": "x", "batch_size": 8, "max_length": 8, "optimizer": {"learning_rate": 1e-5}, "engine": engine}
    needed = memory(SFTConfig.model_validate(section), Shape(0, 16, 40, 3, 2, 2, 8)).worker
    assert needed == 4 * 100 * of_layers


@pytest.mark.parametrize(
    ("vocabulary", "chunks", "at_once"),
    [(1000, 1, 2), (100_000, 3, 4), (400_000, 12, 7)],
    ids=["one chunk", "all are kept", "some are computed again"],
)
def test_memory_of_the_head_by_hand(vocabulary: int, chunks: int, at_once: int) -> None:
    """500 rows of logits in float32, in chunks of 2^24: those kept, and the gradient of one."""
    engine = {"dtype": "float32", "tokens_per_micro_batch": 500}
    section = {"dataset": "x", "batch_size": 8, "max_length": 8, "optimizer": {"learning_rate": 1e-5}, "engine": engine}
    config, shape = SFTConfig.model_validate(section), Shape(0, 16, 40, 3, 2, 2, 8)
    head = memory(config, replace(shape, vocabulary=vocabulary)).worker - memory(config, shape).worker
    assert head == pytest.approx(4 * 500 * vocabulary / chunks * at_once)


def test_chunks_of_the_head_are_those_that_are_computed() -> None:
    assert (HEAD_CHUNK, KEPT_CHUNKS) == (logprobs.CHUNK_ELEMENTS, logprobs.KEPT_CHUNKS)


def test_memory_of_all_models_on_the_ranks_of_rl_by_hand() -> None:
    """The policy is trained, and so is its critic; the judge is frozen, and of its own size."""
    optimizer = {"learning_rate": 1e-5}
    judged = {"judge": {"type": "reward_model", "model": "rm"}}
    config = RLConfig.model_validate(
        {
            "algorithm": "ppo", "dataset": "x", "steps": 7, "prompts_per_step": 2, "sampling": {"max_tokens": 4},
            "rollout": {"max_length": 8, "gpus_per_engine": 1},
            "engine": {"dtype": "float32", "zero_stage": 0, "tokens_per_micro_batch": 100},
            "ppo": {"rewards": judged, "group_size": 2, "optimizer": optimizer,
                    "critic": {"start": "policy", "optimizer": optimizer}},
        }
    )  # fmt: skip
    policy, judge = Shape(1_000_000, 16, 40, 3, 2, 2, 8), Shape(3_000_000, 16, 40, 3, 2, 2, 8)
    trained = 16 * 1_000_000 + 4 * 100 * 3 * (8 * 16 + 4 * 40)
    needed = memory(config, policy, {"ppo.rewards.judge.model": judge})
    assert needed.worker == 2 * trained + 4 * 3_000_000
    assert needed.engine == 4 * 1_000_000 + 2 * 3 * 16 * 4 * 8, "weights in the policy's dtype, and one sequence"
    assert memory(config, policy).worker == 2 * trained + 4 * 1_000_000, "taken to be as large"
    assert config.num_steps(None) == 7


def test_parameters_of_an_adapter_by_hand() -> None:
    """Rank 2, in 3 layers of width 16 and 40, with 4 heads and 2 key-value heads of size 8: 328 rows and columns."""
    queries, keys, feed_forward = 2 * (16 + 32), 2 * (16 + 16), 3 * (16 + 40)
    assert Shape(0, 16, 40, 3, 4, 2, 8).trained(2) == 3 * 2 * (queries + keys + feed_forward)


def test_memory_of_an_engine_by_hand() -> None:
    """2 layers of 4 key-value heads of size 16, in bfloat16: 512 bytes a token."""
    config = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 10,
    }
    weights = 2 * 1_000_000

    def cache(settings: dict[str, Any], **changes: object) -> float:
        rollout = {"max_length": 1024, **settings}
        section = {"model": "base", "dataset": "x", "samples": 1, "sampling": {"max_tokens": 8}, "rollout": rollout}
        shape = Shape.of({**config, **changes}, 1_000_000)
        assert shape is not None
        return memory(GenerateConfig.model_validate(section), shape).engine - weights

    assert cache({"gpus_per_engine": 1}) == 1024 * 512, "one sequence"
    assert cache({"gpus_per_engine": 1}, head_dim=32) == 2 * 1024 * 512, "heads of a size of their own"
    assert cache({"cpu_cache_gib": 1, "max_sequences": 32}) == 32 * 1024 * 512, "what can be filled"
    assert cache({"cpu_cache_gib": 1, "max_sequences": 4096}) == 2**30
    assert cache({"cpu_cache_gib": 1, "max_sequences": 32}, sliding_window=128) == 2**30, "not known"
