"""The plugins that a node uses: their versions are part of its key, and its job needs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rlhf_core.config.base import Config, configs_below
from rlhf_core.config.data.format_table import FORMATS
from rlhf_core.config.plugins import Plugin
from rlhf_core.graph.drafting import Draft, dataset_format
from rlhf_core.stages.table import STAGES


def plugins_of(draft: Draft, drafts: Mapping[str, Draft]) -> dict[str, str]:
    """Name -> version of those that its stage, its settings, or the formats of the datasets that it reads come from."""
    read = () if draft.stage.reads_all else draft.inputs.values()
    formats = {dataset_format(drafts[name]) for name in read}
    named = [STAGES.plugins.get(draft.stage.name), *(FORMATS.plugins.get(name) for name in formats if name)]
    return versions([plugin for plugin in named if plugin is not None]) | plugins_of_settings(draft.config)


def plugins_of_settings(config: Config) -> dict[str, str]:
    return versions(plugin for _, below in configs_below(config) for plugin in below.named_plugins())


def versions(plugins: Iterable[Plugin]) -> dict[str, str]:
    return {plugin.name: plugin.version for plugin in plugins}
