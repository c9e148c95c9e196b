"""`alignment init`: a recipe, example data and a reward function to start from."""

from __future__ import annotations

import json
import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from deployments.stack.environment import REPOSITORY
from rlhf_core.errors import RecipeError
from rlhf_core.paths import user_path

app = typer.Typer()

STARTERS = REPOSITORY / "deployments" / "starters"
_MODEL = "MODEL"  # stands in the starters for the source of the model


class Method(StrEnum):
    sft = "sft"
    dpo = "dpo"
    grpo = "grpo"
    ppo = "ppo"


@app.command()
def init(
    method: Annotated[
        Method, typer.Argument(help="what the recipe does: learn from conversations, a reward, or pairs")
    ],
    folder: Annotated[Path, typer.Argument(help="made for the recipe; must not exist yet, or be empty")],
    model: Annotated[str, typer.Option(help="a model's folder, or `owner/name` on the Hugging Face hub")],
) -> None:
    """Write a short recipe for your model, with example data to replace by yours."""
    source = model_source(model)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RecipeError(f"{folder} exists already: give a new folder, nothing was written")
    shutil.copytree(STARTERS / method, folder, copy_function=shutil.copyfile, dirs_exist_ok=True)
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text(encoding="utf-8").replace(_MODEL, source), encoding="utf-8")
    for path in sorted(folder.iterdir()):
        typer.echo(str(path))
    typer.echo(f"next: alignment plan {recipe}")


def model_source(model: str) -> str:
    """`base.source` in YAML. Raises RecipeError if `model` is no folder and no name of the hub."""
    path = user_path(model, RecipeError)
    if path.is_dir():
        return f"{{type: folder, path: {json.dumps(str(path.resolve()), ensure_ascii=False)}}}"
    owner, slash, name = model.partition("/")
    if not (owner and slash and name) or "/" in name or owner.startswith((".", "~")):
        raise RecipeError(f"--model {model}: there is no such folder, and on the hub a model is `owner/name`")
    return f"{{type: hub, repository: {json.dumps(model)}}}"
