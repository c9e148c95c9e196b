"""What a port answers to somebody without credentials."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import httpx

from deployments.stack.settings import LOOPBACK

# Each names something of value of one of the services; those of others are unknown to it, or refused.
PATHS = (
    "/", "/api/jobs/", "/nodes?view=summary", "/api/v0/actors", "/logs/",  # Ray's dashboard and agents
    "/api/health", "/api/flow_runs/count", "/api/deployments/filter",  # Prefect
    "/dir/assign", "/dir/status", "/status", "/buckets/", "/alignment/kept", "/alignment?list-type=2",  # SeaweedFS
)  # fmt: skip
METHODS = (
    "/ray.rpc.InternalKVGcsService/InternalKVKeys", "/ray.rpc.JobInfoGcsService/GetAllJobInfo",
    "/ray.rpc.NodeManagerService/GetNodeStats", "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats", "/ray.rpc.RayletDriver/ClusterInfo",
    "/ray.rpc.ReporterService/GetTraceback", "/filer_pb.SeaweedFiler/GetFilerConfiguration",
    "/master_pb.Seaweed/Statistics", "/volume_server_pb.VolumeServer/VolumeServerStatus",
)  # fmt: skip


def answered(port: int) -> set[str]:
    """The requests that it did not refuse."""
    return {*_by_http(port), *_by_grpc(port)}


def _by_http(port: int) -> Iterator[str]:
    for scheme in ("http", "https"):
        with httpx.Client(base_url=f"{scheme}://{LOOPBACK}:{port}", timeout=10, verify=False) as client:
            for path in PATHS:
                try:
                    answer = client.get(path)
                except httpx.HTTPError:
                    continue
                # A page of a UI that shows whatever path it is asked for has nothing of value in it.
                page = path != "/" and answer.text.lstrip().lower().startswith("<!doctype html")
                if answer.is_success and not page and not (path == "/status" and not answer.content):
                    yield f"GET {path}"
            try:
                if client.put("/alignment/evil", content=b"x").is_success:
                    yield "PUT"
            except httpx.HTTPError:
                continue


def _by_grpc(port: int) -> Iterator[str]:
    with grpc.insecure_channel(f"{LOOPBACK}:{port}") as channel:
        for method in METHODS:
            try:
                channel.unary_unary(method)(b"", timeout=10)
            except grpc.RpcError as error:
                if error.code() in (
                    grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED,
                ):  # fmt: skip
                    continue
            yield method
