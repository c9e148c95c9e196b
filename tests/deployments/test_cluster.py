"""What `alignment cluster` prints: sizes of clusters, a script for Slurm, manifests that KubeRay's schemas allow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from deployments.cli.main import app
from deployments.cluster.kuberay import KubeRayOptions, ray_cluster, ray_job, yaml_text
from deployments.cluster.sizes import ClusterSize, cluster_size
from deployments.cluster.slurm import slurm_script
from rlhf_core.config.engines.placement import Reservation, of_each
from rlhf_core.errors import StageError
from rlhf_core.pipeline.estimates import Estimate
from rlhf_core.pipeline.memory import Memory

GIB = 2**30
RESERVED = {"data.d": of_each(1, 4.0, 0.0), "rl": of_each(12, 2.0, 1.0) + of_each(2, 8.0, 2.0)}
SIZE = ClusterSize(nodes=2, cpus=32, gpus=8, memory_gib=200)
OPTIONS = KubeRayOptions("My recipe", "registry/image:1", "s3://bucket/runs", ("s3-keys",), "team", ttl=60, grace=90)


@pytest.mark.parametrize(("given", "size"), [
    ({}, ClusterSize(nodes=2, cpus=20, gpus=8, memory_gib=80)),
    ({"gpus_per_node": 4}, ClusterSize(nodes=4, cpus=10, gpus=4, memory_gib=40)),
    ({"nodes": 5, "cpus_per_node": 16}, ClusterSize(nodes=5, cpus=16, gpus=8, memory_gib=64)),
    ({"cpus_per_node": 8}, ClusterSize(nodes=5, cpus=8, gpus=8, memory_gib=32)),
])  # fmt: skip
def test_the_largest_stage_fits_on_as_few_nodes_as_can_be(given: dict[str, int], size: ClusterSize) -> None:
    assert cluster_size(RESERVED, {}, **given) == size


def test_the_memory_of_a_node_is_that_of_the_models_if_known() -> None:
    estimated = {"rl": Estimate(memory=Memory(worker=50.0 * GIB, engine=20.0 * GIB))}
    assert cluster_size(RESERVED, estimated).memory_gib == 16 * 50 / 2
    assert cluster_size({"base": Reservation()}, {}) == ClusterSize(nodes=1, cpus=1, gpus=0, memory_gib=4)


def test_a_stage_that_does_not_fit_is_named() -> None:
    with pytest.raises(StageError, match=r"^rl: asked Ray for 1 times 8 CPUs and 2 GPUs, each on one node.*--nodes"):
        cluster_size(RESERVED, {}, gpus_per_node=1)
    with pytest.raises(StageError, match=r"^rl: asked Ray for 40 CPUs and 16 GPUs, the whole cluster has"):
        cluster_size(RESERVED, {}, nodes=1)


def test_the_script_of_slurm_has_its_options_first_and_quotes_what_the_user_gave() -> None:
    script = slurm_script(
        "r", ["r.yaml", "rl.tags=[a b]"], SIZE, store="/shared/my runs", time="2:00:00", notice=300,
        options=[("account", "lab")],
    )  # fmt: skip
    header, _, body = script.partition("\n\n")
    options = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in header.splitlines()[1:])
    assert header.startswith("#!/bin/bash\n#SBATCH --")
    assert (options["nodes"], options["gpus-per-node"], options["signal"]) == ("2", "8", "B:USR1@300")
    assert {"requeue", "exclusive"} <= options.keys()
    assert options["account"] == "lab"
    assert "export ALIGNMENT_STORE='/shared/my runs' " in body
    assert "export ALIGNMENT_STOP_SECONDS=240 " in body
    assert "recipe=(r.yaml 'rl.tags=[a b]')\n" in body


def schema(kind: str) -> Any:
    """Of KubeRay, with the fields that the manifests have; no others are allowed, as by `kubectl --validate=strict`."""
    found: Any = json.loads((Path(__file__).parent / "kuberay_v1.json").read_text())[kind]
    return found


@pytest.mark.parametrize(
    "manifest",
    [
        ray_job(["tiny", "rl.steps=5"], SIZE, OPTIONS),
        ray_job(["tiny"], ClusterSize(1, 2, 0, 8), KubeRayOptions("tiny", "i", "s3://b", queue="training")),
        ray_job(["tiny"], SIZE, KubeRayOptions("tiny", "i", "s3://b", keep_failed=3600)),
        ray_cluster(SIZE, OPTIONS),
    ],
    ids=["job", "queue", "rules", "cluster"],
)
def test_the_schemas_of_kuberay_allow_the_manifests(manifest: dict[str, Any]) -> None:
    read = yaml.safe_load(yaml_text(manifest))
    assert read == manifest
    jsonschema.validate(read, schema(manifest["kind"]))


def test_a_job_ends_with_its_cluster_and_has_credentials_by_reference_alone() -> None:
    spec = ray_job(["tiny", "rl.tags=[a b]"], SIZE, OPTIONS)["spec"]
    assert spec["entrypoint"] == "bash -c 'alignment up && alignment run tiny '\"'\"'rl.tags=[a b]'\"'\"''"
    assert (spec["shutdownAfterJobFinishes"], spec["ttlSecondsAfterFinished"]) == (True, 60)
    (workers,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    (container,) = pod["containers"]
    assert workers["replicas"] == 2
    assert container["resources"]["limits"] == {"cpu": "32", "memory": "200Gi", "nvidia.com/gpu": "8"}
    assert container["envFrom"] == [{"secretRef": {"name": "s3-keys"}}]
    assert {variable["name"] for variable in container["env"]} == {"ALIGNMENT_STORE", "ALIGNMENT_AUTOSCALING"}
    assert container["lifecycle"]["preStop"]["exec"]["command"][-1] == "90"
    assert pod["terminationGracePeriodSeconds"] > 90


def test_deletion_rules_take_the_place_of_a_ttl_which_kuberay_refuses_beside_them() -> None:
    spec = ray_job(["tiny"], SIZE, KubeRayOptions("tiny", "i", "s3://b", ttl=60, keep_failed=3600))["spec"]
    assert not {"shutdownAfterJobFinishes", "ttlSecondsAfterFinished"} & spec.keys()
    rules = spec["deletionStrategy"]["deletionRules"]
    assert [(rule["policy"], *rule["condition"].values()) for rule in rules] == [
        ("DeleteCluster", "SUCCEEDED", 60), ("DeleteWorkers", "FAILED", 60), ("DeleteCluster", "FAILED", 3600)
    ]  # fmt: skip


RECIPE = """
name: small
data: {words: {format: text, source: {type: files, paths: [words.jsonl]}}}
base:
  dtype: float32
  source:
    {type: scratch, words: [some], hidden_size: 16, intermediate_size: 32, layers: 1, heads: 2, context_length: 32}
pretrain: {dataset: words, batch_size: 16, max_length: 16, optimizer: {learning_rate: 1e-3}}
"""


@pytest.mark.parts
def test_the_commands_print_what_a_recipe_reserves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNMENT_STACK_DIR", str(tmp_path / "no stack"))
    (tmp_path / "words.jsonl").write_text('{"text": "some words"}\n' * 4)
    recipe = tmp_path / "small.yaml"
    recipe.write_text(RECIPE)
    overrides = ["pretrain.placement.workers=16", "pretrain.placement.gpus_per_worker=1"]

    def printed(command: str, *arguments: str) -> str:
        done = CliRunner().invoke(app, ["cluster", command, str(recipe), *overrides, *arguments])
        return done.output if done.exit_code == 0 else f"{done.exit_code}: {done.output}"

    script = printed("slurm", "--store", "s3://bucket/runs", "--partition", "gpu")
    assert "#SBATCH --nodes=2\n" in script
    assert "#SBATCH --gpus-per-node=8\n" in script
    assert "#SBATCH --partition=gpu\n" in script
    assert f"recipe=({recipe} {' '.join(overrides)})\n" in script
    manifest = yaml.safe_load(printed("kuberay", "--store", "s3://bucket/runs", "--image", "i", "--gpus-per-node", "4"))
    assert manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 4
    assert manifest["spec"]["entrypoint"].endswith(f"alignment run {recipe} {' '.join(overrides)}'")
    refused = printed("kuberay", "--store", "s3://b", "--image", "i", "--queue", "q", "--keep-failed", "60")
    assert refused.startswith("1: error: --keep-failed needs deletion rules, which Kueue does not admit")
    assert printed("slurm", "--store", "runs").startswith("1: error: --store runs: it must be an absolute path")
