"""Remote sources named by a config, resolved to their current content when the run is planned."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from rlhf_core.config.base import Config, configs_below
from rlhf_core.config.data.sources import FilesSource, HubSource
from rlhf_core.config.environments.tools import McpTool
from rlhf_core.config.stages.base_model import HubModel
from rlhf_core.data.sources.remote import UnreadableError, file_identity, folder_identity, is_versioned
from rlhf_core.errors import RecipeError, reason_of
from rlhf_core.processes.mcp_server import look_up_tools

_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_SECONDS = 20.0


def pins(config: Config, resolved: dict[str, str], root: Path) -> dict[str, str]:
    """Return URL -> identity of every remote source that `config` names, at any depth: a commit of the hub, or the
    version of a file or of a folder's files (see data/sources/remote.py), or the tools of an MCP server.

    resolved: identities looked up before, so that two stages of one plan read the same content; extended in place.
    root: the recipe's folder.
    Raises RecipeError for a source that cannot be looked up.
    """
    pinned = {}
    for url, look_up in _sources(config, root):
        if url not in resolved:
            resolved[url] = look_up()
        pinned[url] = resolved[url]
    return pinned


def _sources(config: Config, root: Path) -> Iterator[tuple[str, partial[str]]]:
    """Yield each remote source: its URL, and a function that looks its identity up."""
    for _, part in configs_below(config):
        for folder in part.named_folders():
            if "://" in folder.path:
                yield folder.path, partial(_folder, folder.path, folder.suffixes)
        match part:
            case HubModel() | HubSource():
                yield part.url, partial(_commit, part)
            case McpTool():
                yield part.pin_name, partial(look_up_tools, part, root)
            case FilesSource(paths=paths, streaming=streaming):
                yield from ((path, partial(_file, path, streaming)) for path in paths if "://" in path)


def _commit(source: HubModel | HubSource) -> str:
    if _COMMIT.fullmatch(source.revision):
        return source.revision
    from huggingface_hub import HfApi

    hub = HfApi()
    look_up = hub.model_info if isinstance(source, HubModel) else hub.dataset_info
    try:
        commit = look_up(source.repository, revision=source.revision, expand=["sha"], timeout=_HUB_SECONDS).sha
    except Exception as error:  # the library raises many types; all mean that the commit cannot be had
        raise RecipeError(_unresolved(source, reason_of(error))) from error
    if not commit:
        raise RecipeError(_unresolved(source, "the hub names none"))
    return commit


def _unresolved(source: HubModel | HubSource, reason: str) -> str:
    return (
        f"{source.url}: the commit of revision `{source.revision}` cannot be looked up ({reason}): give a commit of 40 "
        "digits as `revision`, or plan the run where the hub can be reached"
    )


def _file(url: str, streaming: bool) -> str:
    try:
        identity = file_identity(url)
    except UnreadableError as error:
        raise RecipeError(_unreadable(url, error)) from error
    if streaming and not is_versioned(identity):
        raise RecipeError(
            f"{url}: its server reports no ETag or other version, by which a change would be seen while rows are read: "
            "remove `streaming`"
        )
    return identity


def _folder(url: str, suffixes: tuple[str, ...]) -> str:
    try:
        return folder_identity(url, suffixes)
    except UnreadableError as error:
        raise RecipeError(_unreadable(url, error)) from error


def _unreadable(url: str, error: UnreadableError) -> str:
    return (
        f"{url}: the recipe names this source, but it cannot be read ({error}): plan the run where it can be read, or "
        "name a local copy"
    )
