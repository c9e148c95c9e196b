"""`alignment init`: a recipe, example data and a reward function to start from."""

from __future__ import annotations

import json
import re
import shutil
from enum import StrEnum
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any

import typer

from deployments.cli import panels
from deployments.cli.documents.files import Files, Translated
from deployments.cli.output import Printed, printing
from deployments.stack.environment import HOME
from deployments.translation.settings import Origin, Translation, place_of
from rlhf_core.config.texts import is_hub_name
from rlhf_core.data.sources.opening import name_problem
from rlhf_core.errors import RecipeError, StageError, did_you_mean, one_line, reason_of
from rlhf_core.models.folders.folder import text_config
from rlhf_core.models.folders.headers import read_object
from rlhf_core.recipe.loading import load_recipe
from rlhf_core.recipe.methods import method_hint
from rlhf_core.system.paths import user_path, writing_to
from rlhf_core.system.scratch import scratch_folder
from rlhf_core.system.yaml_text import read_yaml

app = typer.Typer()

RECIPE_FILE = "recipe.yaml"
STARTERS = HOME / "deployments" / "starters"
SHARED = STARTERS / "shared"  # files that several starters have
_MODEL, _LENGTH, _ANSWER = (
    "MODEL",
    "LENGTH",
    "ANSWER",
)  # placeholders in the starters for parts that depend on the model
_LONGEST, _LONGEST_ANSWER = 1024, 128  # tokens; an answer has at most a quarter of the context


class Framework(StrEnum):
    trl = "trl"
    openrlhf = "openrlhf"
    verl = "verl"


class Method(StrEnum):
    sft = "sft"
    dpo = "dpo"
    kto = "kto"
    grpo = "grpo"
    ppo = "ppo"
    environment = "environment"
    tools = "tools"
    agent = "agent"


@printing(app, panels.SET_UP)
def init(
    method: Annotated[
        str,
        typer.Argument(
            help="What the recipe learns from: conversations (sft), pairs (dpo), labels (kto), a reward (grpo), a "
            "reward model (ppo), or episodes (environment, tools, agent). With --from: the file to translate.",
            metavar=f"[{'|'.join(Method)}|FILE]",
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="Folder to write the recipe to; it must be new or empty.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Model to start from: a folder, or `owner/name` on the Hugging Face hub. With --from, it defaults to "
            "the model of the file."
        ),
    ] = None,
    framework: Annotated[
        Framework | None, typer.Option("--from", help="Translate a script or settings file of this framework.")
    ] = None,
) -> Printed[Files]:
    """Write a short recipe with example data for your model, or translate a script of another framework."""
    if framework is None:
        chosen = known_method(method)
        if model is None:
            raise typer.BadParameter("give a model's folder, or `owner/name` on the hub", param_hint="--model")
        values = recipe_values(model, folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RecipeError(f"{folder} exists already: give a new folder, nothing was written")
    if framework is not None:
        return _translated(framework, user_path(method), folder, model)
    _write(STARTERS / chosen, folder, values)
    paths = sorted(folder.iterdir())
    return Printed(Files(paths), [*map(str, paths), f"next: alignment plan {folder / RECIPE_FILE}"])


def _translated(framework: Framework, file: Path, folder: Path, model: str | None) -> Printed[Files]:
    """Write the recipe that a file of another framework describes. Raises RecipeError."""
    translate = resolve_name(f"deployments.translation.{framework}:translate")
    context = None if model is None else context_length(model)
    origin = Origin(file, folder, context)
    try:
        translation: Translation = translate(origin)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        kind = f"a value has not the type that {framework} gives it"
        raise RecipeError(f"{file}: {kind}: {reason_of(error)}") from error
    if (name := model if model is not None else translation.model) is None:
        raise RecipeError(f"{file}: it does not name its model by a text: give --model")

    def source(named: str) -> Any:
        return read_yaml(model_source(str(origin.local(named) or named), folder))

    parent = folder.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder("init", parent) as partial_folder, writing_to(folder):
        written = {RECIPE_FILE: translation.text(source, name, f"{file.name} of {framework}"), **translation.files}
        for each, text in written.items():
            (partial_folder / each).write_text(text, encoding="utf-8")
        load_recipe(str(partial_folder / RECIPE_FILE))
        folder.mkdir(exist_ok=True)
        for path in partial_folder.iterdir():
            path.rename(folder / path.name)
    paths = sorted(folder.iterdir())
    named = [f"not translated: {each}" for each in translation.untranslated]
    named += [f"assumed: {each}" for each in translation.assumed]
    document = Translated(paths, translation.untranslated, translation.assumed)
    return Printed(document, [*map(str, paths), *named, f"next: alignment plan {folder / RECIPE_FILE}"])


def known_method(name: str) -> Method:
    """Return the starter. Raises RecipeError if there is none of this name."""
    if name in set(Method):
        return Method(name)
    hint = method_hint(name)
    near = f": {hint}" if hint else did_you_mean(name, Method)
    raise RecipeError(f"there is no starter `{name}`{near}; there are {', '.join(Method)}")


def recipe_values(model: str, folder: Path) -> dict[str, str]:
    """Return the value of each placeholder of a starter for the recipe in `folder`. Raises RecipeError."""
    source = model_source(model, folder)
    length = min(_LONGEST, context_length(model) or _LONGEST)
    return {_MODEL: source, _LENGTH: str(length), _ANSWER: str(min(_LONGEST_ANSWER, length // 4))}


def _write(starter: Path, folder: Path, values: dict[str, str]) -> None:
    """Write all files, or none: partial output would block the next attempt."""
    parent = folder.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    recipe = (starter / RECIPE_FILE).read_text(encoding="utf-8")
    files = [path for path in starter.iterdir() if path.name != RECIPE_FILE]
    own_names = {path.name for path in files}
    files += [path for path in SHARED.iterdir() if path.name in recipe and path.name not in own_names]
    with scratch_folder("init", parent) as partial_folder, writing_to(folder):
        (partial_folder / RECIPE_FILE).write_text(filled(recipe, values), encoding="utf-8")
        for path in files:
            shutil.copyfile(path, partial_folder / path.name)
        folder.mkdir(exist_ok=True)
        for path in partial_folder.iterdir():
            path.rename(folder / path.name)


def filled(starter: str, values: dict[str, str]) -> str:
    """Fill the placeholders of a starter; comments keep their column if the values leave room for it."""
    for mark, value in values.items():
        code = re.compile(rf"{mark}(\S*) +(?=  #)")
        starter = code.sub(partial(_aligned, value), starter).replace(mark, value)
    return starter


def _aligned(value: str, found: re.Match[str]) -> str:
    return f"{value}{found[1]}".ljust(len(found[0]))


def model_source(model: str, folder: Path) -> str:
    """Return `base.source` in the YAML of a recipe in `folder`: relative to it where the model is below or beside it.

    Raises RecipeError if `model` is neither a folder nor a name on the hub.
    """
    if not model.strip():
        raise RecipeError("--model is empty: give a model's folder, or `owner/name` on the hub")
    path = user_path(model)
    if path.is_dir():
        place = place_of(path, folder)
        if problem := name_problem(place):
            raise RecipeError(f"--model {one_line(place)}: {problem}")
        return f"{{type: folder, path: {json.dumps(place, ensure_ascii=False)}}}"
    if not is_hub_name(model):
        raise RecipeError(f"--model {model}: there is no such folder, and on the hub a model is `owner/name`")
    return f"{{type: hub, repository: {json.dumps(model)}}}"


def context_length(model: str) -> int | None:
    """Return the context of the model in a folder, in tokens; none if its config.json has none, or for a model of the
    hub.

    Raises RecipeError.
    """
    folder = user_path(model)
    if not folder.is_dir():
        return None
    try:
        length = text_config(read_object(folder / "config.json")).get("max_position_embeddings")
    except StageError as error:
        raise RecipeError(f"--model {one_line(model)}: {error}") from error
    return length if isinstance(length, int) and length > 0 else None
