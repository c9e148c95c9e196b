"""`alignment cluster`: scripts and manifests by which a cluster's scheduler runs a recipe."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from deployments.cli import panels
from deployments.cli.cluster_room import reservations
from deployments.cli.run import OVERRIDES, RECIPE, absolute
from deployments.cluster.kuberay import KubeRayOptions, ray_cluster, ray_job, yaml_text
from deployments.cluster.sizes import ClusterSize, cluster_size
from deployments.cluster.slurm import slurm_script
from rlhf_core.errors import RecipeError
from rlhf_core.pipeline.estimates import Known, estimates
from rlhf_core.pipeline.prepare import Checked, check
from rlhf_core.system.variables import store_problem

app = typer.Typer()
cluster = typer.Typer(
    help="Print a script or manifest that runs a recipe on Slurm or Kubernetes.", no_args_is_help=True
)
app.add_typer(cluster, name="cluster", rich_help_panel=panels.SET_UP)

NODES = typer.Option(min=1, help="Number of nodes; defaults to what the largest stage needs.")
GPUS = typer.Option(min=0, help="GPUs of a node; defaults to what the largest stage reserves, at most 8.")
CPUS = typer.Option(min=1, help="CPUs of a node; defaults to what the largest stage reserves there.")
STORE = typer.Option(help="Store of the results: an s3:// URL, or a folder that all nodes share.")


@cluster.command()
def slurm(
    recipe: Annotated[str, RECIPE],
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    *,
    store: Annotated[str, STORE],
    nodes: Annotated[int | None, NODES] = None,
    gpus_per_node: Annotated[int | None, GPUS] = None,
    cpus_per_node: Annotated[int | None, CPUS] = None,
    time: Annotated[str, typer.Option(help="Time limit of one attempt, as sbatch reads it.")] = "24:00:00",
    notice: Annotated[
        int, typer.Option(min=90, help="Seconds before the limit at which stages write checkpoints.")
    ] = 600,
    partition: Annotated[str | None, typer.Option(help="Partition, passed to sbatch.")] = None,
    account: Annotated[str | None, typer.Option(help="Account, passed to sbatch.")] = None,
) -> None:
    """Print a batch script that runs a recipe: `alignment cluster slurm RECIPE | sbatch`."""
    checked = _checked(recipe, overrides, store)
    size = _size(checked, nodes, cpus_per_node, gpus_per_node)
    options = [(name, value) for name, value in (("partition", partition), ("account", account)) if value]
    script = slurm_script(
        checked.loaded.recipe.name, [absolute(recipe), *(overrides or [])], size,
        store=store, time=time, notice=notice, options=options,
    )  # fmt: skip
    typer.echo(script, nl=False)


@cluster.command()
def kuberay(
    recipe: Annotated[str, RECIPE],
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    *,
    store: Annotated[str, STORE],
    image: Annotated[str, typer.Option(help="Image of all pods, with this version of the code.")],
    secret: Annotated[list[str] | None, typer.Option(help="Secret whose keys become variables of the pods.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Namespace of the objects.")] = None,
    queue: Annotated[str | None, typer.Option(help="Local queue of Kueue.")] = None,
    ttl: Annotated[int, typer.Option(min=0, help="Seconds that the pods stay after the run.")] = 300,
    keep_failed: Annotated[
        int | None, typer.Option(min=0, help="Seconds that the head's pod stays after a failed run; not with --queue.")
    ] = None,
    grace: Annotated[int, typer.Option(min=30, help="Seconds that a pod has for checkpoints before it ends.")] = 120,
    nodes: Annotated[int | None, NODES] = None,
    gpus_per_node: Annotated[int | None, GPUS] = None,
    cpus_per_node: Annotated[int | None, CPUS] = None,
    memory_per_node: Annotated[
        int | None, typer.Option(min=1, help="Memory of a node in GiB; defaults to an estimate.")
    ] = None,
    only_cluster: Annotated[
        bool, typer.Option("--only-cluster", help="Print a RayCluster, which stays, instead of a RayJob.")
    ] = False,
) -> None:
    """Print the RayJob that runs a recipe: `alignment cluster kuberay RECIPE … | kubectl apply -f -`."""
    if queue and keep_failed is not None:
        raise RecipeError("--keep-failed needs deletion rules, which Kueue does not admit: remove one of them")
    checked = _checked(recipe, overrides, store)
    size = _size(checked, nodes, cpus_per_node, gpus_per_node)
    if memory_per_node is not None:
        size = replace(size, memory_gib=memory_per_node)
    options = KubeRayOptions(
        name=checked.loaded.recipe.name, image=image, store=store, secrets=secret or [], namespace=namespace,
        queue=queue, ttl=ttl, keep_failed=keep_failed, grace=grace,
    )  # fmt: skip
    manifest = ray_cluster(size, options) if only_cluster else ray_job([recipe, *(overrides or [])], size, options)
    typer.echo(yaml_text(manifest), nl=False)


def _checked(recipe: str, overrides: list[str] | None, store: str) -> Checked:
    if problem := store_problem(store):
        raise RecipeError(f"--store {store}: {problem}")
    return check(recipe, overrides or [], store=store)


def _size(checked: Checked, nodes: int | None, cpus: int | None, gpus: int | None) -> ClusterSize:
    facts = Known(checked.seen, checked.loaded.root, {}, [])
    return cluster_size(
        reservations(checked.graph.values()), estimates(checked.graph, facts),
        nodes=nodes, cpus_per_node=cpus, gpus_per_node=gpus,
    )  # fmt: skip
