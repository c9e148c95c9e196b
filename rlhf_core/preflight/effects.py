"""Preflight checks for stages without effect: empty data, train/test overlap, unused outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.data.sources.base import Located
from rlhf_core.graph.drafting import Draft, asked_dataset
from rlhf_core.preflight.samples import Sample
from rlhf_core.recipe.recipe import Recipe


def check_effects(recipe: Recipe, nodes: Mapping[str, Draft], samples: Mapping[str, list[Located]]) -> Iterator[str]:
    """Yield problems.

    samples: the readable rows, after the checks of `overlap` have removed held-out ones.
    """
    compared = [name for name, rows in samples.items() if rows]
    for name, by, on in _train_test_overlaps(recipe, nodes):
        if name in recipe.data and name not in compared and recipe.data[name].on_overlap == "error":
            yield (
                f"{on}: {by} trains on `{name}`, so the scores would measure memorisation: test on another dataset, or "
                f"set data.{name}.on_overlap to allow"
            )


def effect_notes(recipe: Recipe, nodes: Mapping[str, Draft]) -> Iterator[str]:
    """Yield notes on valid settings that are probably unintended."""
    for name, by, on in _train_test_overlaps(recipe, nodes):
        yield f"`{name}` is trained on ({by}) and tested on ({on}): the scores will measure memorisation"
    yield from _unused_datasets(recipe, nodes)
    yield from _unread_models(recipe, nodes)
    if not any(node.stage.writes == {Kind.EVALUATION} for node in nodes.values()):
        yield "no stage `evaluation`: no model of this recipe is evaluated"


def _train_test_overlaps(recipe: Recipe, nodes: Mapping[str, Draft]) -> Iterator[tuple[str, str, str]]:
    """Yield each dataset used for both, the settings that train on it and those that test on it."""
    trained: dict[str, set[str]] = {}
    tested: dict[str, set[str]] = {}
    for node in nodes.values():
        for setting in node.input_settings:
            reads = setting.reads
            if reads.role == "dataset" and reads.format is not None and not reads.only_read:
                for name in {asked_dataset(recipe, name) for name in setting.names}:
                    uses = tested if reads.held_out else trained
                    uses.setdefault(name, set()).add(f"{node.section}.{setting.path}")
    for name in sorted(trained.keys() & tested.keys()):
        yield name, ", ".join(sorted(trained[name])), ", ".join(sorted(tested[name]))


def _unused_datasets(recipe: Recipe, nodes: Mapping[str, Draft]) -> Iterator[str]:
    unused = [name for name in recipe.data if f"data.{name}" not in nodes]
    if unused:
        yield f"no stage reads {', '.join(f'data.{name}' for name in unused)}"


def _unread_models(recipe: Recipe, nodes: Mapping[str, Draft]) -> Iterator[str]:
    """Yield models that nothing reads, except the last one, the result of the run."""
    read = {other for node in nodes.values() if not node.stage.reads_all for other in node.inputs.values()}
    models = [name for name, config in recipe.stages.items() if config.makes == "model" and name in nodes]
    for name in models[:-1]:
        if not {name, f"merge.{name}"} & (read - _merges(nodes, name)):
            yield f"nothing reads the result of `{name}`, and it is not the last model of the recipe"


def _merges(nodes: Mapping[str, Draft], name: str) -> set[str]:
    """Return {`name`} if only its own merge reads it."""
    readers = [node.name for node in nodes.values() if not node.stage.reads_all and name in node.inputs.values()]
    return {name} if readers == [f"merge.{name}"] else set()


def bad_row_notes(samples: Mapping[str, Sample]) -> list[str]:
    """Return a note for each dataset whose job will drop bad rows, of the rows readable here."""
    return [f"data.{name}: {sample.bad.sentence()}" for name, sample in samples.items() if sample.bad.count]
