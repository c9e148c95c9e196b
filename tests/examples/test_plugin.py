"""The example plugin, built as a wheel and installed: what plans, keys and jobs make of it and of its version."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_core.actors.worker_group import _Rank
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.errors import PluginError, RecipeError
from rlhf_core.pipeline.in_process import try_node
from rlhf_core.pipeline.prepare import check, prepare
from rlhf_core.pipeline.specs import run_settings, store_spec
from rlhf_core.recipe.loading import load_recipe
from rlhf_core.stages.runner import run_job
from rlhf_core.tracking.protocol import METRICS_FILE
from tests import plugin

pytestmark = pytest.mark.parts

ROOT = Path(__file__).parents[2]
RECIPE = plugin.SOURCE / "recipe.yaml"
USING = {"data.riddles", "data.questions", "measure", "far", "rl"}


def python(site: Path, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A process that has the plugin of `site`, and a store of its own in place of that of a local stack."""
    environment = {**os.environ, "PYTHONPATH": f"{site}:{ROOT}", "ALIGNMENT_STORE": str(site.parent / "store")}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def keys(site: Path) -> dict[str, str]:
    with plugin.visible(site):
        return {name: node.ref.key for name, node in check(str(RECIPE), []).graph.items()}


def test_keys_of_what_uses_the_plugin_have_its_version(plugin_site: Path, tmp_path: Path) -> None:
    first, later = keys(plugin_site), keys(plugin.with_version(plugin_site, tmp_path, "1.1"))
    assert {name for name in first if first[name] != later[name]} == USING | {"report"}  # which reads them all


@pytest.mark.endurance("architectures")
def test_the_page_of_settings_has_those_of_the_plugin(plugin_site: Path) -> None:
    done = python(
        plugin_site, "-c", "from rlhf_core.recipe.settings_page import pages; import json; print(json.dumps(pages()))"
    )
    assert done.returncode == 0, done.stderr
    pages = json.loads(done.stdout)
    assert pages["measure.md"].startswith("# measure\n")
    assert "- `measure` ([measure](measure.md#measure))" in pages["README.md"]
    for page, heading in (
        ("shared.md", "brevity"),
        ("shared.md", "guess"),
        ("shared.md", "adder"),
        ("preference.md", "preference.losses: apart"),
        ("rl.md", "rl.critic_grpo"),
        ("README.md", "tracking.others: csv"),
    ):
        assert f"{heading}\n" in pages[page], heading


@pytest.mark.endurance("architectures")
@pytest.mark.slow("a process of pytest")
def test_its_own_tests_pass(plugin_site: Path, tmp_path: Path) -> None:
    source = shutil.copytree(plugin.SOURCE, tmp_path / "source")
    done = python(plugin_site, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=source)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "11 passed" in done.stdout


@pytest.mark.endurance("architectures")
def test_the_command_plans_its_recipe(plugin_site: Path) -> None:
    done = python(plugin_site, "-m", "deployments.cli.main", "plan", str(RECIPE))
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(name in done.stdout for name in USING)


def test_without_the_plugin_the_recipe_is_refused() -> None:
    with pytest.raises(RecipeError, match="there is no format `riddles`"):
        load_recipe(str(RECIPE))


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ALIGNMENT_WORKDIR", str(tmp_path / "work"))


@pytest.mark.endurance("architectures")
@pytest.mark.usefixtures("folders")
def test_jobs_run_it_and_keep_what_its_tracker_wrote(plugin_site: Path, local_store_url: str, tmp_path: Path) -> None:
    with plugin.visible(plugin_site):
        prepared = prepare(str(RECIPE), [], store=local_store_url)
        measured = try_node(prepared, prepared.node("measure"), print).manifest
        far = try_node(prepared, prepared.node("far"), print).manifest
    assert measured.metrics == {"longest": 8}
    assert measured.libraries["alignment-example"] == "1.0"
    files = ArtifactRepository(open_store(local_store_url)).fetch(far.ref, tmp_path / "cache")
    steps = [json.loads(line)["step"] for line in (files / METRICS_FILE).read_text().splitlines()]
    table = (files / "tracking" / "others" / "table" / "metrics.csv").read_text().splitlines()
    assert table[0] == "node,step,metric,value"
    assert {int(line.split(",")[1]) for line in table[1:]} == set(steps)
    plain = prepared.repository.manifest(prepared.node("base").ref)
    assert plain is not None
    assert "alignment-example" not in plain.libraries


@pytest.mark.usefixtures("folders")
def test_a_node_with_another_version_or_without_it_fails_in_a_sentence(plugin_site: Path, local_store_url: str) -> None:
    with plugin.visible(plugin_site):
        prepared = prepare(str(RECIPE), [], store=local_store_url)
        measure, base = prepared.node("measure"), prepared.node("base")
        assert (measure.plugins, base.plugins) == ({plugin.NAME: "1.0"}, {})
        settings = run_settings(prepared)
        assert settings.plugins == {plugin.NAME: "1.0"}  # of the tracker, which every job has
        store_spec(replace(measure, plugins={plugin.NAME: "1.1"}), replace(settings, plugins={}), prepared.repository)
        with pytest.raises(PluginError, match=r"^this node has alignment-example 1\.0, .* alignment-example 1\.1: "):
            run_job(local_store_url, measure.ref)
        store_spec(measure, settings, prepared.repository)
    with pytest.raises(PluginError, match=r"^this node lacks the plugin alignment-example, and .* alignment-example 1"):
        run_job(local_store_url, measure.ref)
    with pytest.raises(PluginError, match=r"^this node lacks the plugin alignment-example"):
        _Rank().inherit("rank 0", {}, {plugin.NAME: "1.0"})
