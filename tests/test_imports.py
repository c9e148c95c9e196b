"""The import rules of the house: who may import what, and what loads without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("rlhf_core", "tasks", "flows", "deployments")  # each may import itself and what stands before it

# A library and the only places (prefixes of a file's path) that may import it.
PLACES = {
    "prefect": ("flows/", "tasks/", "deployments/"),
    "ray": ("rlhf_core/actors/", "tasks/ray_jobs.py"),
    "vllm": ("rlhf_core/rollout/vllm",),
    "deepspeed": ("rlhf_core/training/deepspeed",),
}
LIGHT = ("rlhf_core.config", "rlhf_core.artifacts", "rlhf_core.pipeline")
HEAVY = ("torch", "vllm", "deepspeed", "peft")


def source_files() -> Iterator[Path]:
    for layer in LAYERS:
        yield from sorted((ROOT / layer).rglob("*.py"))


def imported_modules(file: Path) -> Iterator[tuple[int, str]]:
    """Every import statement, also inside functions and under TYPE_CHECKING: (line, full module name)."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            yield node.lineno, node.module or ""


def broken(file: Path) -> Iterator[str]:
    place = file.relative_to(ROOT).as_posix()
    layer = LAYERS.index(place.split("/")[0])
    for line, module in imported_modules(file):
        top = module.split(".")[0]
        if top in PLACES and not place.startswith(PLACES[top]):
            yield f"{place}:{line} imports {module}; only {', '.join(PLACES[top])} may"
        if top in LAYERS and LAYERS.index(top) > layer:
            yield f"{place}:{line} imports {module}, which stands above it"
        if top in ("tests", "benchmarks"):
            yield f"{place}:{line} imports {module}"


def test_imports_run_one_way_and_only_where_allowed() -> None:
    assert [problem for file in source_files() for problem in broken(file)] == []


def test_the_rules_catch_a_wrong_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    file = tmp_path / "rlhf_core" / "losses" / "wrong.py"
    file.parent.mkdir(parents=True)
    file.write_text("import ray.util\n\ndef late():\n    from tasks.ray_jobs import submit\n")
    assert list(broken(file)) == [
        "rlhf_core/losses/wrong.py:1 imports ray.util; only rlhf_core/actors/, tasks/ray_jobs.py may",
        "rlhf_core/losses/wrong.py:4 imports tasks.ray_jobs, which stands above it",
    ]


def modules_of(package: str) -> list[str]:
    folder = ROOT / package.replace(".", "/")
    names = (file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for file in folder.rglob("*.py"))
    return sorted(name.removesuffix(".__init__") for name in names)


def loaded_by(modules: list[str], program: str = "") -> set[str]:
    """The top-level modules that a fresh interpreter has after importing `modules`."""
    code = "\n".join([*(f"import {module}" for module in modules), program, "import sys; print(*sys.modules)"])
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name.split(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize("package", LIGHT)
def test_package_loads_without_what_computes(package: str) -> None:
    assert loaded_by(modules_of(package)) & {*HEAVY, "ray", "prefect"} == set()


def test_stage_table_and_contract_load_without_what_computes() -> None:
    found = loaded_by(["rlhf_core.stages.table", "rlhf_core.stages.contract"])
    assert found & {*HEAVY, "ray", "prefect"} == set()


def test_shipped_recipes_parse_without_torch_in_a_second_of_processor_time() -> None:
    program = (
        "import time; start = time.process_time()\n"
        "from rlhf_core.config.loading import load_recipe, shipped_recipes\n"
        "assert shipped_recipes()\n"
        "for name in shipped_recipes(): load_recipe(name)\n"
        "assert time.process_time() - start < len(shipped_recipes()), 'slow'\n"
    )
    assert "torch" not in loaded_by([], program)


def test_command_and_flows_load_without_what_computes() -> None:
    """An orchestrator has neither torch nor vLLM."""
    assert loaded_by(["deployments.cli.main", *modules_of("flows"), *modules_of("tasks")]) & set(HEAVY) == set()


def test_prefect_is_not_loaded_before_the_stack_environment_is() -> None:
    """Prefect reads its settings when it is imported."""
    assert "prefect" not in loaded_by(["deployments.cli.main"])
