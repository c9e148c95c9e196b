"""Write the page of the Python API, generated from signatures and docstrings. Nothing is imported.

Usage: `python -m deployments.pages.api docs/reference/api.md`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import fill

ROOT = Path(__file__).resolve().parents[2]
# Section -> what is public: a module, of which all that has a docstring is, or names of a module.
PUBLIC: Mapping[str, tuple[str, ...]] = {
    "Plans and single stages": (
        "rlhf_core.pipeline.prepare: check prepare Checked Prepared",
        "rlhf_core.pipeline.in_process: try_node",
    ),
    "Results": (
        "rlhf_core.artifacts.opening: open_store",
        "rlhf_core.artifacts.repository: ArtifactRepository",
        "rlhf_core.artifacts.manifest: ArtifactRef Kind Manifest",
        "rlhf_core.artifacts.lineage: lineage",
    ),
    "Losses and advantages": (
        "rlhf_core.losses.advantages",
        "rlhf_core.losses.aggregation",
        "rlhf_core.losses.divergence",
        "rlhf_core.losses.kl",
        "rlhf_core.losses.kto",
        "rlhf_core.losses.policy",
        "rlhf_core.losses.ranking",
        "rlhf_core.losses.supervised",
        "rlhf_core.losses.value",
    ),
    "Lines of tables, for plugins": (
        "rlhf_core.config.rewards.rewards: RewardEntry",
        "rlhf_core.config.environments.environments: EnvironmentEntry",
        "rlhf_core.config.environments.tools: ToolEntry",
        "rlhf_core.config.rl.algorithm_table: AlgorithmEntry",
        "rlhf_core.config.stages.preference_losses: PreferenceLossEntry",
        "rlhf_core.config.data.format_table: FormatEntry",
        "rlhf_core.config.engines.rollout: EngineEntry",
        "rlhf_core.config.tracking: TrackerEntry",
    ),
    "What parts implement": (
        "rlhf_core.contract: Stage StageContext Input Output",
        "rlhf_core.rewards.base: Reward TrajectoryReward RewardResult checked_result",
        "rlhf_core.environments.base: Environment EnvironmentHost Feedback Reply",
        "rlhf_core.data.formats.base: Format",
    ),
    "Contracts to test parts by": (
        "rlhf_core.testing.reward: RewardContract",
        "rlhf_core.testing.environment: EnvironmentContract",
        "rlhf_core.testing.stage: StageContract StageRun",
        "rlhf_core.testing.store: StoreContract",
        "rlhf_core.testing.engine: RolloutEngineContract",
        "rlhf_core.testing.training_engine: TrainingEngineContract",
    ),
}
_HEAD = """# Python API

Written by `python -m deployments.pages.api docs/reference/api.md` from signatures and docstrings: edit these instead.
[From Python](../guides/python.md) and [Plugins](../guides/plugins.md) show how they are used. Until version 1.0 the API
may change, and the changelog tells how.
"""

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def page() -> str:
    """Return the text of docs/reference/api.md."""
    parts = [_HEAD]
    for section, modules in PUBLIC.items():
        parts += [f"## {section}\n", *map(_module, modules)]
    return "\n".join(parts)


def _module(public: str) -> str:
    """Return the part of one module. Raises LookupError if it lacks a public name."""
    name, _, names = public.partition(": ")
    source = (ROOT / (name.replace(".", "/") + ".py")).read_text(encoding="utf-8")
    tree = ast.parse(source)
    lines = source.splitlines()
    found = {node.name: node for node in tree.body if isinstance(node, _Definition)}
    wanted = names.split() or [each for each, node in found.items() if _is_public(node)]
    if missing := [each for each in wanted if each not in found]:
        raise LookupError(f"{name} has no {', '.join(missing)}: correct PUBLIC in deployments/pages/api.py")
    stubs = [f"```python\n{chr(10).join(_stub(found[each], lines))}\n```\n" for each in wanted]
    about = "" if names else fill((ast.get_docstring(tree) or "").split("\n\n")[0], 120) + "\n\n"
    return f"### `{name}`\n\n{about}" + "\n".join(stubs)


def _is_public(node: _Definition) -> bool:
    return not node.name.startswith(("_", "test_")) and ast.get_docstring(node) is not None


def _stub(node: _Definition, lines: list[str]) -> Iterator[str]:
    """Yield the lines of `node` from its decorators to its docstring, and those of a class's fields and methods."""
    begin = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    documented = ast.get_docstring(node) is not None
    yield from lines[begin - 1 : node.body[0].end_lineno if documented else node.body[0].lineno - 1]
    if not isinstance(node, ast.ClassDef):
        return
    fields = [inner for inner in node.body[1:] if isinstance(inner, ast.AnnAssign | ast.Assign)]
    if documented and fields:
        yield ""
    empty = not documented  # nothing of the class is there but its first line
    for inner in node.body[documented:]:
        if isinstance(inner, ast.AnnAssign | ast.Assign) and not lines[inner.lineno - 1].lstrip().startswith("_"):
            yield from lines[inner.lineno - 1 : inner.end_lineno]
            empty = False
        elif isinstance(inner, _Definition) and _is_public(inner):
            if not empty:
                yield ""
            yield from _stub(inner, lines)
            empty = False


def main(arguments: list[str]) -> None:
    Path(arguments[0]).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
