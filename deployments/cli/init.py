"""`alignment init`: a recipe, example data and a reward function to start from."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from deployments.stack.environment import REPOSITORY
from rlhf_core.artifacts.scratch import scratch_folder
from rlhf_core.config.texts import is_hub_name
from rlhf_core.data.opening import name_problem
from rlhf_core.errors import RecipeError, one_line
from rlhf_core.paths import resolved, user_path, writing_to

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
    _write(STARTERS / method, folder, source)
    for path in sorted(folder.iterdir()):
        typer.echo(str(path))
    typer.echo(f"next: alignment plan {folder / 'recipe.yaml'}")


def _write(starter: Path, folder: Path, source: str) -> None:
    """All of it, or nothing: what is half written would be in the way of the next try."""
    parent = folder.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder("init", parent) as made, writing_to(folder):
        for path in starter.iterdir():
            text = path.read_text(encoding="utf-8")
            text = text.replace(_MODEL, source) if path.suffix == ".yaml" else text
            (made / path.name).write_text(text, encoding="utf-8")
        folder.mkdir(exist_ok=True)
        for path in made.iterdir():
            path.rename(folder / path.name)


def model_source(model: str) -> str:
    """`base.source` in YAML. Raises RecipeError if `model` is no folder and no name of the hub."""
    if not model.strip():
        raise RecipeError("--model is empty: give a model's folder, or `owner/name` on the hub")
    path = user_path(model)
    if path.is_dir():
        place = str(resolved(path))
        if problem := name_problem(place):
            raise RecipeError(f"--model {one_line(place)}: {problem}")
        return f"{{type: folder, path: {json.dumps(place, ensure_ascii=False)}}}"
    if not is_hub_name(model):
        raise RecipeError(f"--model {model}: there is no such folder, and on the hub a model is `owner/name`")
    return f"{{type: hub, repository: {json.dumps(model)}}}"
