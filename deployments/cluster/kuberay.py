"""Manifests of KubeRay (ray.io/v1) for a recipe: a RayJob with a cluster of its own, or a RayCluster that stays."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from io import StringIO
from typing import Any

from ruamel.yaml import YAML

from deployments.cluster.sizes import ClusterSize

Manifest = dict[str, Any]

_HEAD = {"cpu": "2", "memory": "8Gi"}  # drivers, Prefect's server and a worker; stages compute on the other pods
_RETRIES = 3  # each with a new cluster, when the head's pod is lost
_AFTER_HOOK_SECONDS = 30  # for Ray's own end
_LONGEST_NAME = 40  # KubeRay appends to it, and a name of a pod has 63 characters


@dataclass(frozen=True, slots=True)
class KubeRayOptions:
    """ttl, keep_failed, grace: seconds; secrets: names of Secrets, which become variables of the pods."""

    name: str
    image: str
    store: str
    secrets: Sequence[str] = ()
    namespace: str | None = None
    queue: str | None = None
    ttl: int = 300
    keep_failed: int | None = None
    grace: int = 120


def ray_job(recipe: Sequence[str], size: ClusterSize, options: KubeRayOptions) -> Manifest:
    """Return the RayJob of `alignment run` with the arguments `recipe`, on the head of a cluster that ends with it."""
    run = f"alignment up && alignment run {shlex.join(recipe)}"
    spec: Manifest = {"entrypoint": f"bash -c {shlex.quote(run)}", "backoffLimit": _RETRIES}
    if options.keep_failed is None:
        spec |= {"shutdownAfterJobFinishes": True, "ttlSecondsAfterFinished": options.ttl}
    else:
        spec["deletionStrategy"] = {"deletionRules": [
            _rule("SUCCEEDED", "DeleteCluster", options.ttl),
            _rule("FAILED", "DeleteWorkers", options.ttl),
            _rule("FAILED", "DeleteCluster", max(options.ttl, options.keep_failed)),
        ]}  # fmt: skip
    return _object("RayJob", {**spec, "rayClusterSpec": _cluster_spec(size, options)}, options)


def ray_cluster(size: ClusterSize, options: KubeRayOptions) -> Manifest:
    return _object("RayCluster", _cluster_spec(size, options), options)


def yaml_text(manifest: Manifest) -> str:
    yaml, text = YAML(), StringIO()
    yaml.version, yaml.width = "1.1", 1000  # as Kubernetes reads it: `on` and `1e3` are quoted
    yaml.dump(manifest, text)
    return text.getvalue().partition("---\n")[2]


def _rule(status: str, policy: str, seconds: int) -> Manifest:
    return {"condition": {"jobStatus": status, "ttlSeconds": seconds}, "policy": policy}


def _object(kind: str, spec: Manifest, options: KubeRayOptions) -> Manifest:
    name = re.sub(r"[^a-z0-9]+", "-", f"alignment-{options.name}".lower())[:_LONGEST_NAME].strip("-")
    metadata: Manifest = {"name": name}
    if options.namespace:
        metadata["namespace"] = options.namespace
    if options.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": options.queue}
    return {"apiVersion": "ray.io/v1", "kind": kind, "metadata": metadata, "spec": spec}


def _cluster_spec(size: ClusterSize, options: KubeRayOptions) -> Manifest:
    resources = {"cpu": str(size.cpus), "memory": f"{size.memory_gib}Gi"}
    if size.gpus:
        resources["nvidia.com/gpu"] = str(size.gpus)
    workers = {
        "groupName": "nodes", "replicas": size.nodes, "minReplicas": size.nodes, "maxReplicas": size.nodes,
        "rayStartParams": {}, "template": _worker(resources, options),
    }  # fmt: skip
    head = {"rayStartParams": {"num-cpus": "0", "num-gpus": "0"}, "template": _head(options)}
    return {
        "rayVersion": version("ray"), "authOptions": {"mode": "token"},
        "headGroupSpec": head, "workerGroupSpecs": [workers],
    }  # fmt: skip


def _head(options: KubeRayOptions) -> Manifest:
    container = _container("ray-head", _HEAD, options)
    container["env"].append({"name": "RAY_API_SERVER_ADDRESS", "value": "http://127.0.0.1:8265"})
    return _pod(container)


def _worker(resources: Mapping[str, str], options: KubeRayOptions) -> Manifest:
    """Return a pod whose end is announced to Ray, so that stages write a checkpoint and resume on another."""
    container = _container("ray-worker", resources, options)
    drain = ["python", "-m", "rlhf_core.actors.draining", str(options.grace)]
    container["lifecycle"] = {"preStop": {"exec": {"command": drain}}}
    return _pod(container, terminationGracePeriodSeconds=options.grace + _AFTER_HOOK_SECONDS)


def _container(name: str, resources: Mapping[str, str], options: KubeRayOptions) -> Manifest:
    container: Manifest = {
        "name": name, "image": options.image,
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "env": [
            {"name": "ALIGNMENT_STORE", "value": options.store},
            {"name": "ALIGNMENT_AUTOSCALING", "value": "1"},  # a lost pod is replaced: stages wait for it
        ],
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],  # noqa: S108 (Ray's objects)
    }  # fmt: skip
    if options.secrets:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in options.secrets]
    return container


def _pod(container: Manifest, **spec: int) -> Manifest:
    volume = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
    return {"spec": {**spec, "containers": [container], "volumes": [volume]}}
