"""The shape of a base model before it is fetched: by its config.json alone, wherever that is."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_core.artifacts.manifest import Manifest
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.chat.tokenizers import vocabulary
from rlhf_core.config.stages.base_model import BaseModelConfig, FolderModel, HubModel, ScratchModel, WheelModel
from rlhf_core.data.sources.remote import fetch_file
from rlhf_core.errors import StageError, StoreError, reason_of
from rlhf_core.graph.graph import Node
from rlhf_core.models.folders.folder import read_config
from rlhf_core.models.folders.headers import stored_tensors
from rlhf_core.models.folders.scratch import architecture
from rlhf_core.pipeline.memory import Shape

_CONFIG = "config.json"
_INCOMPLETE = "its config.json has not all sizes of a decoder-only transformer"


class ShapeUnknownError(Exception):
    """The shape of a model cannot be known before a run; its text is the reason."""


def shape_of(node: Node, root: Path, result: Manifest | None, repository: ArtifactRepository | None) -> Shape:
    """Return the shape of the model that `node`, the first of its line, makes or is.

    root: the recipe's folder. result: its artifact, if the store has one. Raises ShapeUnknownError.
    """
    if result is not None and repository is not None and (shape := _stored(result, repository)) is not None:
        return shape
    counted = None if result is None else result.metrics.get("parameters")
    shape = _of_source(node, root)
    return replace(shape, parameters=counted) if isinstance(counted, int) else shape


def _stored(result: Manifest, repository: ArtifactRepository) -> Shape | None:
    """Return the shape of a stored model; None if the artifact has no config.json."""
    file = next((file for file in result.files if file.path == _CONFIG), None)
    if file is None:
        return None
    counted = result.metrics.get("parameters")
    with tempfile.TemporaryDirectory() as folder:
        try:
            repository.get_blob(file.sha256, Path(folder) / _CONFIG)
            return _of_config(read_config(Path(folder)), counted if isinstance(counted, int) else None)
        except (StageError, StoreError) as error:
            raise ShapeUnknownError(str(error)) from error


def _of_source(node: Node, root: Path) -> Shape:
    source = node.config.source if isinstance(node.config, BaseModelConfig) else None
    match source:
        case ScratchModel():
            words = vocabulary(source.words, images=source.vision is not None)
            return _of_config({**architecture(source), "vocab_size": len(words)})
        case FolderModel(path=path) if "://" not in path:
            try:
                parameters = sum(math.prod(tensor.shape) for tensor in stored_tensors(root / path).values())
                return _of_config(read_config(root / path), parameters)
            except StageError as error:
                raise ShapeUnknownError(str(error)) from error
        case FolderModel(path=url):
            return _of_config(_remote(url, node.pins.get(url)))
        case HubModel():
            return _of_config(_of_hub(source, node.pins.get(source.url)))
        case WheelModel():
            raise ShapeUnknownError("its file is in a wheel, which only its job fetches: known once that has run")
        case _:
            raise ShapeUnknownError("it is no base model whose shape is known before it is computed")


def _of_config(config: Mapping[str, Any], parameters: int | None = None) -> Shape:
    shape = Shape.of(config, parameters)
    if shape is None:
        raise ShapeUnknownError(_INCOMPLETE)
    return shape


def _remote(url: str, pinned: str | None) -> Mapping[str, Any]:
    """Return the config.json of the folder at `url`. pinned: the identities of its files."""
    identity = None if pinned is None else json.loads(pinned).get(_CONFIG)
    with tempfile.TemporaryDirectory() as folder:
        try:
            fetch_file(f"{url.rstrip('/')}/{_CONFIG}", identity, Path(folder) / _CONFIG)
            return read_config(Path(folder))
        except StageError as error:
            raise ShapeUnknownError(str(error)) from error


def _of_hub(source: HubModel, commit: str | None) -> Mapping[str, Any]:
    from huggingface_hub import hf_hub_download

    with tempfile.TemporaryDirectory() as folder:
        try:
            hf_hub_download(source.repository, _CONFIG, revision=commit or source.revision, local_dir=folder)
            return read_config(Path(folder))
        except Exception as error:  # the library raises many types; all mean that the file cannot be had
            raise ShapeUnknownError(f"{source.url}: {_CONFIG} cannot be fetched ({reason_of(error)})") from error
