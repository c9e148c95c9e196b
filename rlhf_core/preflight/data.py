"""Preflight checks of datasets: readability, and the format that stages need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.config.data.sources import FunctionSource
from rlhf_core.config.inputs import InputSetting
from rlhf_core.graph.drafting import Draft
from rlhf_core.preflight.samples import Sample, read_samples, sources_of
from rlhf_core.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Use:
    """A stage that reads a dataset, and the format that it needs."""

    node: Draft
    read_by: InputSetting

    @property
    def setting(self) -> str:
        """The setting in the recipe, such as `rl.validation.dataset`."""
        return f"{self.node.section}.{self.read_by.path}"

    @property
    def reader(self) -> str:
        """The part of the stage that reads it, such as `rl.validation`."""
        return self.setting.rpartition(".")[0]

    @property
    def dataset(self) -> str:
        return self.read_by.names[0]

    @property
    def format(self) -> str | None:
        return self.read_by.reads.format


def dataset_uses(nodes: Mapping[str, Draft]) -> list[Use]:
    """Return the datasets read by the stages that will run, each setting once."""
    uses: dict[str, Use] = {}
    for node in nodes.values():
        for setting in node.input_settings:
            if setting.reads.format is not None and setting.names:
                use = Use(node, setting)
                uses.setdefault(use.setting, use)
    return list(uses.values())


def is_misread(use: Use, recipe: Recipe) -> bool:
    """Return whether the stage needs another format than the dataset's."""
    return use.dataset in recipe.data and recipe.data[use.dataset].format != use.format


def check_datasets(recipe: Recipe, uses: list[Use], root: Path) -> tuple[dict[str, Sample], list[str]]:
    """Return a sample of each dataset, and the problems."""
    problems = []
    for use in uses:
        if is_misread(use, recipe):
            problems.append(
                f"{use.setting}: `{use.dataset}` has the format {recipe.data[use.dataset].format}, "
                f"{use.reader} needs {use.format}: name another dataset or change `data.{use.dataset}`"
            )
    samples = read_samples(recipe, [use.dataset for use in uses], root)
    problems += [problem for sample in samples.values() for problem in sample.problems]
    return samples, problems


def source_functions(recipe: Recipe, names: Iterable[str]) -> list[tuple[str, FunctionSource]]:
    """Return the source functions of the datasets `names`, with their settings."""
    return [
        (f"data.{name}", source)
        for name in names
        for source in sources_of(recipe.data[name])
        if isinstance(source, FunctionSource)
    ]
