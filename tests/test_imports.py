"""The import rules of the house: who may import what, and what loads without torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("rlhf_core", "tasks", "flows", "deployments")  # each may import itself and what stands before it

# The packages and files of rlhf_core: each may import itself and what stands before it.
ORDER = (
    "errors", "system", "arrays", "kept_tokens", "types", "metrics", "config", "losses", "packing", "division",
    "mesh", "processes", "models", "chat", "algorithms", "tracking", "artifacts", "contract", "data", "rollout",
    "warm", "rewards", "reward_server", "runtimes", "environments", "episodes", "training", "evaluation",
    "report", "supervised", "rl", "actors", "stages", "recipe", "graph", "preflight", "pipeline", "garbage",
    "inference", "testing",
)  # fmt: skip

# A library and the only places (prefixes of a file's path) that may import it.
PLACES = {
    "prefect": ("flows/", "tasks/", "deployments/"),
    "ray": ("rlhf_core/actors/", "tasks/ray_jobs.py", "tasks/job_end.py"),
    "vllm": ("rlhf_core/rollout/vllm/",),
    "deepspeed": ("rlhf_core/training/deepspeed",),
    "lm_eval": ("rlhf_core/evaluation/harness/",),
}
LIGHT = (
    "rlhf_core.config", "rlhf_core.models.folders", "rlhf_core.chat", "rlhf_core.artifacts", "rlhf_core.recipe",
    "rlhf_core.graph", "rlhf_core.preflight", "rlhf_core.pipeline", "rlhf_core.garbage",
)  # fmt: skip
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
        if top == layer_of(place) == "rlhf_core" and place_in_core(module) > place_in_core(module_of(place)):
            yield f"{place}:{line} imports {module}, which stands above it inside rlhf_core"


def layer_of(place: str) -> str:
    return place.split("/")[0]


def module_of(place: str) -> str:
    return place.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def place_in_core(module: str) -> int:
    """Of a package or file of rlhf_core in ORDER; rlhf_core itself, which has the version, stands below all."""
    parts = module.split(".")
    return ORDER.index(parts[1]) if len(parts) > 1 else -1


def test_imports_run_one_way_and_only_where_allowed() -> None:
    assert [problem for file in source_files() for problem in broken(file)] == []


def test_every_package_of_the_core_has_its_place() -> None:
    found = {
        path.stem for path in (ROOT / "rlhf_core").iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert found - {"__init__"} == set(ORDER)


def test_no_file_imports_itself_through_others() -> None:
    """Also not inside functions or under TYPE_CHECKING."""
    modules = {module_of(file.relative_to(ROOT).as_posix()): file for file in source_files()}
    graph = networkx.DiGraph()
    for module, file in modules.items():
        for _, imported in imported_modules(file):
            found = [name for name in (imported, imported.rpartition(".")[0]) if name in modules]
            graph.add_edges_from((module, name) for name in found[:1] if name != module)
    assert list(networkx.simple_cycles(graph)) == []


def test_no_file_finds_its_way_up_by_path() -> None:
    """`parents[n]` of a file in rlhf_core must stay inside rlhf_core."""
    wrong = []
    for file in sorted((ROOT / "rlhf_core").rglob("*.py")):
        depth = len(file.relative_to(ROOT).parts) - 1
        climbs = [
            int(n) for n in re.findall(r"__file__\)(?:\.resolve\(\))?\.parents\[(\d+)\]", file.read_text("utf-8"))
        ]
        wrong += [f"{file}: parents[{n}]" for n in climbs if n >= depth]
    assert wrong == []


def test_the_rules_catch_a_wrong_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    file = tmp_path / "rlhf_core" / "losses" / "wrong.py"
    file.parent.mkdir(parents=True)
    late = "    from tasks.ray_jobs import submit\n    from rlhf_core.models import packed\n"
    file.write_text(f"import ray.util\n\ndef late():\n{late}")
    assert list(broken(file)) == [
        "rlhf_core/losses/wrong.py:1 imports ray.util; only rlhf_core/actors/, tasks/ray_jobs.py, tasks/job_end.py may",
        "rlhf_core/losses/wrong.py:4 imports tasks.ray_jobs, which stands above it",
        "rlhf_core/losses/wrong.py:5 imports rlhf_core.models, which stands above it inside rlhf_core",
    ]


def modules_of(package: str) -> list[str]:
    folder = ROOT / package.replace(".", "/")
    names = (file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for file in folder.rglob("*.py"))
    return sorted(name.removesuffix(".__init__") for name in names)


def loaded_by(modules: list[str], program: str = "") -> set[str]:
    """The modules that a fresh interpreter has after importing `modules`."""
    code = "\n".join([*(f"import {module}" for module in modules), program, "import sys; print(*sys.modules)"])
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parts
def test_what_a_sandbox_loads_is_of_the_standard_library() -> None:
    """None of its forks has more to give away."""
    added = loaded_by(["rlhf_core.processes.fork_server", "rlhf_core.processes.lines"]) - loaded_by([])
    assert {module.split(".")[0] for module in added} - sys.stdlib_module_names == {"rlhf_core"}


@pytest.mark.parts
def test_a_process_of_a_reward_function_starts_without_pydantic() -> None:
    """There is one for each of a user's files, and `plan` starts them all."""
    assert "pydantic" not in loaded_by(["rlhf_core.processes.function_process", "rlhf_core.processes.host_process"])


@pytest.mark.parts
def test_what_plans_a_recipe_loads_without_what_computes() -> None:
    """`python -X importtime` names the package that loads it."""
    stages = ["rlhf_core.stages.table", "rlhf_core.stages.key", "rlhf_core.contract"]
    modules = [module for package in LIGHT for module in modules_of(package)]
    assert loaded_by([*modules, *stages]) & {*HEAVY, "ray", "prefect"} == set()


@pytest.mark.parts
def test_shipped_recipes_parse_without_torch_in_a_second_of_processor_time() -> None:
    program = (
        "import time; start = time.process_time()\n"
        "from rlhf_core.recipe.known_recipes import known_recipes\n"
        "from rlhf_core.recipe.loading import load_recipe\n"
        "assert known_recipes()\n"
        "for name in known_recipes(): load_recipe(name)\n"
        "assert time.process_time() - start < len(known_recipes()), 'slow'\n"
    )
    assert "torch" not in loaded_by([], program)


@pytest.mark.parts
def test_drivers_of_training_load_without_what_only_ranks_and_engines_need() -> None:
    found = loaded_by([f"rlhf_core.stages.{name}" for name in ("pretrain", "sft", "reward_model", "rl", "evaluation")])
    assert found & {"vllm", "deepspeed", "peft", "transformers.modeling_utils"} == set()


@pytest.mark.parts
def test_command_and_flows_load_without_what_computes() -> None:
    """An orchestrator has neither torch nor vLLM."""
    assert loaded_by(["deployments.cli.main", *modules_of("flows"), *modules_of("tasks")]) & set(HEAVY) == set()


@pytest.mark.parts
def test_prefect_is_not_loaded_before_the_stack_environment_is() -> None:
    """Prefect reads its settings when it is imported."""
    assert "prefect" not in loaded_by(["deployments.cli.main"])
