"""Inputs of a stage's job, stored before it starts: the user's files and `spec.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_core.artifacts.deletions import wait_for_deletions
from rlhf_core.artifacts.repository import ArtifactRepository, blob_path
from rlhf_core.artifacts.spec import StageSpec
from rlhf_core.config.watchdog import WatchdogConfig
from rlhf_core.errors import RecipeError
from rlhf_core.graph.graph import Node
from rlhf_core.graph.plugins import plugins_of_settings
from rlhf_core.pipeline.prepare import Prepared


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings shared by all stages of one run."""

    run_id: str
    store_url: str
    root: Path  # the recipe's folder, where the user's files are
    tracking: Mapping[str, Any]
    recipe: str  # its name
    plugins: Mapping[str, str] = field(default_factory=dict)  # of the trackers -> version
    watchdog: WatchdogConfig | None = None


def run_settings(prepared: Prepared, run_id: str = "") -> RunSettings:
    recipe = prepared.loaded.recipe
    return RunSettings(
        run_id=run_id,
        store_url=prepared.store.url,
        root=prepared.loaded.root,
        tracking=recipe.tracking.model_dump(mode="json"),
        recipe=recipe.name,
        plugins=plugins_of_settings(recipe.tracking),
        watchdog=recipe.watchdog,
    )


def store_spec(node: Node, settings: RunSettings, repository: ArtifactRepository) -> None:
    """Store the spec and the user's files. Raises RecipeError for a file that changed after the key was computed."""
    repository.write_spec(_spec(node, settings))  # first: what it names is then kept by a garbage collection
    wait_for_deletions(repository.store, [node.ref.path, *map(blob_path, node.user_files.values())])
    for path, planned in node.user_files.items():
        if repository.put_blob(settings.root / path) != planned:
            raise RecipeError(
                f"{path}: this file changed after the run was planned: run again to plan with it as it is"
            )


def _spec(node: Node, settings: RunSettings) -> StageSpec:
    return StageSpec(
        name=node.name,
        stage=node.stage.name,
        stage_version=node.stage.version,
        key=node.ref.key,
        config=node.config.model_dump(mode="json"),
        inputs=dict(node.input_refs),
        user_files=dict(node.user_files),
        pins=dict(node.pins),
        seed=node.seed,
        libraries=dict(node.libraries),
        plugins={**node.plugins, **settings.plugins},
        tracking=dict(settings.tracking),
        watchdog=None if settings.watchdog is None else settings.watchdog.model_dump(mode="json"),
        run_id=settings.run_id,
        recipe=settings.recipe,
        rerun=node.rerun,
    )
