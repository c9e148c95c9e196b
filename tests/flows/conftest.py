"""A recipe of quick nodes, and the environment that leads a flow to the session's Ray head and Prefect server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, PREFECT_LOCAL_STORAGE_PATH, temporary_settings

from rlhf_core.artifacts.manifest import Manifest
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.graph.graph import Node
from rlhf_core.pipeline.prepare import prepare
from tasks.ray_jobs import RayJobs, connect
from tests.cluster import ROOT

_RECIPE = """
name: few
tracking: {{wandb: false, tensorboard: false}}
data:
  test:
    format: text
    source: {{type: function, path: rows.py, function: rows, options: {{text: "{token} test"}}}}
  words:
    format: text
    exclude: [test]
    source:
      type: function
      path: rows.py
      function: rows
      options: {{text: "{token} words", {options}}}
base:
  dtype: float32
  source:
    {{type: scratch, words: ["{token}"], hidden_size: 16, intermediate_size: 32, layers: 1, heads: 2,
      context_length: 32}}
pretrain:
  {{dataset: words, batch_size: 2, max_length: 16, optimizer: {{learning_rate: 1e-3}}, engine: {{dtype: float32}},
    checkpoint: {{every_steps: 5}}}}
"""
NODES = ["data.test", "data.words", "base"]


@dataclass(frozen=True)
class Workplace:
    """A folder with a recipe of its own: no other test's keys, hence no other test's jobs."""

    folder: Path
    token: str
    jobs: RayJobs

    @property
    def recipe(self) -> str:
        return str(self.folder / "few.yaml")

    @property
    def sign(self) -> Path:
        """The file that the rows of `data.words` need or wait for."""
        return self.folder / "sign"

    @property
    def repository(self) -> ArtifactRepository:
        return ArtifactRepository(open_store(os.environ["ALIGNMENT_STORE"]))

    def write_recipe(self, options: str = "") -> None:
        text = _RECIPE.format(token=self.token, options=options.format(sign=self.sign))
        (self.folder / "few.yaml").write_text(text, encoding="utf-8")

    def node(self, name: str) -> Node:
        return _graph(self.recipe, Path(self.recipe).read_bytes())[name]

    def manifest(self, name: str) -> Manifest | None:
        return self.repository.manifest(self.node(name).ref)

    def attempts(self, name: str) -> dict[str, str]:
        """Every job that ever computed the node, and its status."""
        node = self.node(name)
        prefix = f"{node.stage.name}-{node.ref.key[:16]}-"
        listed = self.jobs._client.list_jobs()
        found = {j.submission_id or "": str(j.status) for j in listed if (j.submission_id or "").startswith(prefix)}
        return dict(sorted(found.items()))

    def start_flow(self, *nodes: str, output: int | None = None) -> subprocess.Popen[bytes]:
        """The flow `few` in a process of its own. output: where it writes to instead of flow.log."""
        code = f"from tests.flows.few import few; few({self.recipe!r}, {list(nodes)!r})"
        with (self.folder / "flow.log").open("ab") as log:
            return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=output or log, stderr=output or log)


@lru_cache(maxsize=1)
def _graph(recipe: str, content: bytes) -> Mapping[str, Node]:
    """Prepared once, since what waits for a job looks several times a second."""
    return prepare(recipe, []).graph


@pytest.fixture
def workplace(
    tmp_path: Path, store_url: str, ray_address: str, prefect_api: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Workplace]:
    (tmp_path / "rows.py").write_bytes(Path(__file__).with_name("rows.py").read_bytes())
    monkeypatch.setenv("ALIGNMENT_STORE", store_url)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", ray_address)
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    home = tmp_path / "prefect"
    monkeypatch.setenv("PREFECT_HOME", str(home))
    monkeypatch.setenv("PREFECT_LOCAL_STORAGE_PATH", str(home / "storage"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    settings = {PREFECT_API_URL: prefect_api, PREFECT_HOME: home, PREFECT_LOCAL_STORAGE_PATH: home / "storage"}
    with temporary_settings(settings):
        place = Workplace(tmp_path, tmp_path.name + str(abs(hash(store_url))), connect())
        place.write_recipe()
        yield place
