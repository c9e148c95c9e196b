"""`plan` and `run` against what the Ray cluster has."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from typer.testing import CliRunner

from deployments.cli.cluster_room import room_notes
from deployments.cli.main import app
from rlhf_core.actors.room import require_reservable
from rlhf_core.config.engines.placement import Placement, Reservation, of_each
from rlhf_core.errors import StageError

pytestmark = pytest.mark.endurance("two-nodes")

RECIPE = """
name: small
data:
  words:
    format: text
    source: {type: function, path: rows.py, function: rows, options: {text: some words}}
base:
  dtype: float32
  source:
    {type: scratch, words: [some], hidden_size: 16, intermediate_size: 32, layers: 1, heads: 2, context_length: 32}
pretrain: {dataset: words, batch_size: 2, max_length: 16, optimizer: {learning_rate: 1e-3}}
"""


@pytest.fixture
def recipe(tmp_path: Path, ray_address: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """On a cluster of one node with 4 CPUs and no GPU."""
    monkeypatch.setenv("ALIGNMENT_STACK_DIR", str(tmp_path / "no stack"))
    monkeypatch.setenv("ALIGNMENT_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", ray_address)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    rows = "def rows(text):\n    return ({'text': text} for _ in range(4))\n"
    (tmp_path / "rows.py").write_text(rows)
    (tmp_path / "small.yaml").write_text(RECIPE)
    return str(tmp_path / "small.yaml")


@pytest.mark.parametrize(
    ("command", "override", "problem"),
    [
        (
            "plan",
            "pretrain.placement.gpus_per_worker=1",
            "pretrain: asked Ray for 1 CPUs and 1 GPUs, the whole cluster has ",
        ),
        (
            "run",
            "pretrain.placement.cpus_per_worker=8",
            "pretrain: asked Ray for 8 CPUs, the whole cluster has 4 CPUs; ask for less",
        ),
        (
            "plan",
            "data.words.processes=5",
            "data.words: asked Ray for 5 CPUs, the whole cluster has 4 CPUs; ask for less of",
        ),
    ],
)
@pytest.mark.slow("starts a Ray head")
def test_what_no_node_has_is_refused_before_any_job(recipe: str, command: str, override: str, problem: str) -> None:
    done = CliRunner().invoke(app, [command, recipe, override])
    assert done.exit_code == 1
    (said,) = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert said.startswith(f"error: {problem}")
    assert said.endswith("If nodes come on demand, set ALIGNMENT_AUTOSCALING=1 here and on the nodes")


def test_a_cluster_that_grows_or_has_room_is_not_refused(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = CliRunner().invoke(app, ["plan", recipe, "pretrain.placement.workers=2"])
    assert (plain.exit_code, "more nodes" in plain.output) == (0, False), plain.output
    monkeypatch.setenv("ALIGNMENT_AUTOSCALING", "1")
    waits = CliRunner().invoke(app, ["plan", recipe, "pretrain.placement.gpus_per_worker=1"])
    assert (waits.exit_code, "it would wait for more nodes" in " ".join(waits.output.split())) == (0, True)


def test_a_cluster_that_starts_is_no_cluster_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its head answers before a node has joined."""
    head = {"state": "ALIVE", "resources_total": {"node:127.0.0.1": 1.0}}
    answer = json.dumps({"data": {"result": {"result": [head]}}}).encode()

    class Dashboard(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Dashboard) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", address)
        asking = Thread(target=server.handle_request)
        asking.start()
        notes = room_notes({"sft": of_each(1, 1.0, 1.0)})
        asking.join()
    assert notes == [f"the Ray cluster at {address} is starting: no node has a CPU yet"]


def test_each_actor_is_on_one_node() -> None:
    nodes = [{"CPU": 2.0, "GPU": 1.0}, {"CPU": 3.0}]
    for fits in (Reservation(), of_each(5, 1.0, 0.0), of_each(1, 2.0, 1.0) + of_each(1, 3.0, 0.0)):
        require_reservable(fits, nodes)
    with pytest.raises(StageError, match=r"asked Ray for 1 times 3 CPUs and 1 GPUs, each on one node, .* \(2 CPUs and"):
        require_reservable(Placement(cpus_per_worker=3.0, gpus_per_worker=1.0).reserves(), nodes)
    for too_much in (of_each(6, 1.0, 0.0), of_each(2, 1.0, 1.0)):
        with pytest.raises(StageError, match=r"the whole cluster has 5 CPUs( and 1 GPUs)?; ask for less of it"):
            require_reservable(too_much, nodes)
    with pytest.raises(StageError, match=r"^asked Ray for 1 times 4 CPUs"):
        require_reservable(of_each(1, 1.0, 0.0) | of_each(1, 4.0, 0.0), nodes)
