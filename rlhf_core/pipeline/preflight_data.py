"""Datasets before anything runs: can they be read, has each the format of its stages, do any overlap?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.config.data import FunctionSource, OverlapConfig
from rlhf_core.config.inputs import InputSetting
from rlhf_core.config.reward_models import SupervisedRewardConfig
from rlhf_core.data.formats import format_of
from rlhf_core.data.overlap import overlap_problem
from rlhf_core.pipeline.drafting import Draft
from rlhf_core.pipeline.recipe import Recipe
from rlhf_core.pipeline.samples import Sample, is_used_whole, read_samples, rows_of, sources_of


@dataclass(frozen=True, slots=True)
class Use:
    """A stage reads a dataset, and needs it in a format."""

    node: Draft
    read_by: InputSetting

    @property
    def setting(self) -> str:
        """As the recipe has it: `rl.validation.dataset`."""
        return f"{self.node.section}.{self.read_by.path}"

    @property
    def reader(self) -> str:
        """What reads it: `rl.validation`."""
        return self.setting.rpartition(".")[0]

    @property
    def dataset(self) -> str:
        return self.read_by.names[0]

    @property
    def format(self) -> str | None:
        return self.read_by.reads.format


def dataset_uses(nodes: Mapping[str, Draft]) -> list[Use]:
    """What the stages that will run read, each setting once."""
    uses: dict[str, Use] = {}
    for node in nodes.values():
        for setting in node.input_settings:
            if setting.reads.format is not None and setting.names:
                use = Use(node, setting)
                uses.setdefault(use.setting, use)
    return list(uses.values())


def splits_by_prompt(use: Use) -> bool:
    """Whether the stage holds out some prompts of the dataset, and trains on the rows of the others."""
    config = use.node.config
    return isinstance(config, SupervisedRewardConfig) and config.validation is None and use.read_by.path == "dataset"


def is_misread(use: Use, recipe: Recipe) -> bool:
    """Whether the stage needs the dataset in another format than it has."""
    return use.dataset in recipe.data and recipe.data[use.dataset].format != use.format


def check_datasets(recipe: Recipe, uses: list[Use], root: Path) -> tuple[dict[str, Sample], list[str]]:
    """A sample of each dataset, and the problems."""
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
    """Those of the datasets `names`, with the setting of each."""
    return [
        (f"data.{name}", source)
        for name in names
        for source in sources_of(recipe.data[name])
        if isinstance(source, FunctionSource)
    ]


def check_overlaps(nodes: Mapping[str, Draft], recipe: Recipe, samples: Mapping[str, Sample]) -> Iterator[str]:
    """One sentence for each stage `overlap` that is known here to fail, by the rows that could be read."""
    for node in nodes.values():
        if not isinstance(node.config, OverlapConfig):
            continue
        name = node.config.dataset
        if name not in samples:
            continue  # a dataset that exists already, which its job reads
        problem = overlap_problem(
            samples[name].rows,
            format_of(recipe.data[name].format),
            {other: rows_of(recipe, samples, other) for other in node.config.held_out if is_used_whole(recipe, other)},
            {other: rows_of(recipe, samples, other) for other in recipe.data[name].exclude if other in samples},
        )
        if problem is not None:
            yield f"data.{name}: {problem}"
