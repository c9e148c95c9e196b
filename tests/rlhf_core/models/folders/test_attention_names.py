"""An architecture without the configured attention is rejected by `plan`, and by the job where that loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.small_models import small_config, small_model
from rlhf_core.errors import RecipeError, StageError
from rlhf_core.models.folders.headers import read_object
from rlhf_core.models.loading import load_causal_model
from rlhf_core.preflight.look import preflight
from rlhf_core.recipe.loading import load_recipe
from tests.rlhf_core.recipes import model_folder, write

pytestmark = pytest.mark.endurance("architectures")


@pytest.mark.slow("imports the models of transformers")
def test_an_attention_that_the_architecture_lacks(tmp_path: Path) -> None:
    model_folder(tmp_path)
    rows = read_object(tmp_path / "model" / "config.json")["vocab_size"]
    small_model(small_config("gptj", vocab_size=rows)).save_pretrained(tmp_path / "model")

    def change(recipe: dict[str, Any], root: Path) -> None:
        recipe["base"]["source"] = {"type": "folder", "path": "model"}
        recipe["pretrain"]["engine"] = {"attention": "eager"}

    sentence = "transformers has no attention `sdpa` for GPTJForCausalLM: set engine.attention: eager"
    with pytest.raises(RecipeError) as raised:
        preflight(load_recipe(write(tmp_path, change)))
    said = str(raised.value).splitlines()
    assert f"sft.engine.attention: {sentence}" in said
    assert not any(problem.startswith("pretrain.engine") for problem in said)
    with pytest.raises(StageError, match=sentence):
        load_causal_model(tmp_path / "model", dtype=torch.float32, attention="sdpa")
