"""`alignment run` and the commands on artifacts, as a person calls them, on a real worker."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import service_environment
from tests.flows.conftest import Workplace
from tests.flows.test_deployment import prefect, worker

__all__ = ["worker"]
pytestmark = pytest.mark.parametrize("store_url", ["s3"], indirect=True)

_RECIPE = """
name: smallest
data: {unused: {format: text, source: {type: hub, repository: some/set}}}
base:
  dtype: float32
  source: {type: scratch, words: [WORD], hidden_size: 64, intermediate_size: 64, layers: 1, heads: 2}
"""


def alignment(workplace: Workplace, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deployments.cli.main", *arguments]
    environment = service_environment(
        ALIGNMENT_STACK_DIR=str(workplace.folder / "no stack"),
        COLUMNS="150",
        ALIGNMENT_STORE=os.environ["ALIGNMENT_STORE"],
    )
    return subprocess.run(command, cwd=workplace.folder, env=environment, capture_output=True, text=True, check=False)


def test_a_run_from_the_terminal(workplace: Workplace, worker: None) -> None:
    prefect("deploy", "--all", "--prefect-file", "deployments/prefect.yaml")
    (workplace.folder / "smallest.yaml").write_text(_RECIPE.replace("WORD", f'"{workplace.token}"'), encoding="utf-8")

    first = alignment(workplace, "run", "smallest.yaml")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "smallest: 2 to compute, 0 to reuse" in first.stdout
    assert "base                " in first.stdout
    (report,) = (workplace.folder / "outputs").glob("*/report.html")
    assert report.read_text(encoding="utf-8").lstrip().startswith("<!")
    assert str(report.relative_to(workplace.folder)) in first.stdout

    second = alignment(workplace, "run", "smallest.yaml")
    assert second.returncode == 0, second.stdout + second.stderr
    assert "smallest: 0 to compute, 2 to reuse" in second.stdout
    assert "Nothing had to be computed: every stage was in the store." in second.stdout

    listed = alignment(workplace, "artifacts", "--stage", "base").stdout
    name = next(word for word in listed.split() if word.startswith("base/"))
    assert f'"key": "{name.removeprefix("base/")}' in alignment(workplace, "show", name).stdout
    pulled = alignment(workplace, "pull", name, "pulled")
    assert pulled.returncode == 0, pulled.stderr
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in Path(workplace.folder, "pulled").iterdir()
    }
    again = alignment(workplace, "pull", name, "pulled")
    assert (again.returncode, again.stderr) == (1, "error: pulled exists already: give another folder\n")
    report_name = next(w for w in alignment(workplace, "artifacts").stdout.split() if w.startswith("report/"))
    assert f"node.base: base {name}" in alignment(workplace, "lineage", report_name).stdout


def test_mistakes_end_with_one_sentence(workplace: Workplace) -> None:
    (workplace.folder / "smallest.yaml").write_text(_RECIPE, encoding="utf-8")
    for command in ("plan", "run"):
        wrong = alignment(workplace, command, "smallest.yaml", "base.dtpe=float32")
        assert (wrong.returncode, wrong.stderr) == (
            1, "error: smallest.yaml: unknown key `base.dtpe`, did you mean `dtype`?\n",
        )  # fmt: skip
