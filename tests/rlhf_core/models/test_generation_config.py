"""A model's generation_config.json is kept as it is, also where transformers would not write it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlhf_core.config.stages.base_model import BaseModelConfig
from rlhf_core.errors import StageError
from rlhf_core.models.loading import load_causal_model
from rlhf_core.preflight.model import base_folder_problems
from rlhf_core.stages import base
from tests.rlhf_core.models.saved import save_state
from tests.rlhf_core.recipes import model_folder
from tests.rlhf_core.stages.context import LocalContext

pytestmark = pytest.mark.endurance("architectures")

CONFIG = BaseModelConfig.model_validate({"source": {"type": "folder", "path": "model"}, "dtype": "float32"})
WITHOUT_SAMPLING = {"temperature": 0.7, "top_p": 0.9, "pad_token_id": -7}


def test_a_model_is_saved_with_settings_that_transformers_does_not_write(tmp_path: Path) -> None:
    model_folder(tmp_path)
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(WITHOUT_SAMPLING))
    assert not list(base_folder_problems(tmp_path / "model", reward_model=False, needs_template=True))
    folder = base.run(CONFIG, {}, LocalContext(tmp_path / "work", user_files_root=tmp_path)).folder
    model = load_causal_model(folder, dtype=torch.float32, attention="sdpa")
    save_state(model, model.state_dict(), tmp_path / "saved", folder)
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert saved.items() >= WITHOUT_SAMPLING.items()
    load_causal_model(tmp_path / "saved", dtype=torch.float32, attention="sdpa")


def test_settings_that_transformers_does_not_read_are_refused_by_name(tmp_path: Path) -> None:
    model_folder(tmp_path)
    (tmp_path / "model" / "generation_config.json").write_text('{"max_new_tokens": 0}')
    sentence = "generation_config.json is not what transformers expects: correct it or remove it (`max_new_tokens` must"
    (said,) = base_folder_problems(tmp_path / "model", reward_model=False, needs_template=True)
    assert said.startswith(sentence)
    with pytest.raises(StageError) as raised:
        base.run(CONFIG, {}, LocalContext(tmp_path / "work", user_files_root=tmp_path))
    assert sentence in str(raised.value)
