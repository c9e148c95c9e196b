"""Shapes of base models before a run: by config.json alone, in a folder behind a URL, on the hub, in the store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.config.stages.base_model import BaseModelConfig
from rlhf_core.graph.graph import Node
from rlhf_core.pipeline.shapes import ShapeUnknownError, shape_of
from rlhf_core.stages.table import STAGES
from tests.hub import REPOSITORY, running_hub
from tests.rlhf_core.artifacts.manifests import manifest

pytestmark = pytest.mark.parts
CONFIG = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
    "tie_word_embeddings": True,
}  # fmt: skip
PARAMETERS = 2 * (2 * 64 * 16 * 8 + 3 * 64 * 128) + 100 * 64


def base(source: dict[str, str], pins: dict[str, str] | None = None) -> Node:
    config = BaseModelConfig.model_validate_json(json.dumps({"source": source}))
    return Node(
        name="base", stage=STAGES["base"], config=config, inputs={}, input_refs={}, after=(),
        user_files={}, pins=pins or {}, seed=None, libraries={}, plugins={}, ref=manifest("base", "base").ref,
    )  # fmt: skip


def test_a_folder_behind_a_url_is_read_by_its_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shape = shape_of(base({"type": "folder", "path": f"file://{tmp_path}"}), tmp_path, None, None)
    assert (shape.parameters, shape.layers, shape.vocabulary) == (PARAMETERS, 2, 100)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ShapeUnknownError, match="has not all sizes"):
        shape_of(base({"type": "folder", "path": f"file://{tmp_path}"}), tmp_path, None, None)


def test_a_model_of_the_hub_is_read_by_its_config_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_hub() as hub:
        commit = hub.commit({"config.json": json.dumps(CONFIG).encode()})
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        source = {"type": "hub", "repository": REPOSITORY}
        shape = shape_of(base(source, {f"hf://{REPOSITORY}@main": commit}), tmp_path, None, None)
        assert shape.parameters == PARAMETERS
        with pytest.raises(ShapeUnknownError, match=r"config\.json cannot be fetched"):
            shape_of(base(source, {f"hf://{REPOSITORY}@main": "0" * 40}), tmp_path, None, None)


def test_a_stored_model_counts_its_own_parameters_whatever_it_came_from(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    repository = ArtifactRepository(LocalStore(tmp_path / "store"))
    stored = repository.publish(manifest("base", "base", metrics={"parameters": 123}), made)
    wheel = base({"type": "wheel", "requirement": "some-model==1.0", "file": "a.gguf"})
    shape = shape_of(wheel, tmp_path, stored, repository)
    assert (shape.parameters, shape.hidden) == (123, 64)
    with pytest.raises(ShapeUnknownError, match="in a wheel, which only its job fetches"):
        shape_of(wheel, tmp_path, None, repository)
