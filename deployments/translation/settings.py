"""Settings of another framework, each of which is translated or named."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from pyarrow import ArrowException, parquet
from ruamel.yaml import YAML

from rlhf_core.config.texts import is_hub_name
from rlhf_core.errors import RecipeError, one_line, reason_of, shortened
from rlhf_core.system.paths import file_problem, resolved, user_path

_NO_COUNTERPART = "it has no counterpart here"
_DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet")
_SECRET = re.compile(r"(^|[._])(token|api_key|password|secret)$|wandb\.key$")
_SHOWN = 120  # characters of a value
_SEED = 42  # of all three frameworks

ALWAYS = "here it is always so"
SIZES = "here a micro-batch is engine.tokens_per_micro_batch, and changes no result"
CONSTANT = "the schedule is constant, and never falls"
DEFAULT_STEPS = 100  # of RL over a data set whose rows cannot be counted
MOST_EPOCHS = 10_000


class UntranslatableError(Exception):
    """A value that no setting here has; its message says why."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A value that the file computes, which is never executed."""

    text: str


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting here: its path in the stage, the other framework's default, and its value there as one here."""

    ours: str
    default: Any = None  # None: only written if it is set
    value: Callable[[Any], Any] = lambda value: value  # may raise UntranslatableError


@dataclass(slots=True)
class Translation:
    """A recipe but for its base model, and what the file has beyond it."""

    recipe: dict[str, Any]
    model: str | None  # a folder or `owner/name`
    untranslated: list[str] = field(default_factory=list)  # a sentence for each setting
    assumed: list[str] = field(default_factory=list)  # settings of the recipe that the file does not have
    files: dict[str, str] = field(default_factory=dict)  # written beside the recipe
    reward_models: dict[str, str] = field(default_factory=dict)  # folder or `owner/name`, by the stage that reads it

    def reward_model(self, model: str, *, normalize: bool = False) -> dict[str, Any]:
        """Return a reward by a model that exists, for which the recipe gets a stage."""
        stage = f"reward_{len(self.reward_models) + 1}" if self.reward_models else "reward"
        self.reward_models[stage] = model
        return {"type": "reward_model", "model": stage, "normalize": normalize}

    def text(self, source: Callable[[str], Any], model: str, origin: str) -> str:
        """Return the recipe as YAML, which begins with what was not translated.

        source: the source of a model's folder or name.
        """
        lines = [f"Translated from {origin}."]
        for heading, entries in (("Not translated:", self.untranslated), ("Assumed:", self.assumed)):
            lines += [heading, *(f"  {entry}" for entry in entries)] if entries else []
        comment = "".join(f"# {line}\n" for line in lines)
        stages = {key: value for key, value in self.recipe.items() if key not in ("name", "seed", "data")}
        head = {key: self.recipe[key] for key in ("name", "seed")}
        judges = {
            stage: {"stage": "base", "kind": "reward_model", "source": source(name)}
            for stage, name in self.reward_models.items()
        }
        recipe = {**head, "base": {"source": source(model)}, **judges, "data": self.recipe["data"], **stages}
        yaml, written = YAML(), StringIO()
        yaml.width = 110
        yaml.dump(recipe, written)
        return comment + written.getvalue()


class Given:
    """The settings of a file. Each is taken once, or is left and named."""

    def __init__(self, values: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
        """reasons: why some have no counterpart, by name, or by the longest prefix that ends with a dot."""
        self._values = dict(values)
        self._reasons = reasons
        self._taken: set[str] = set()
        self._left: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def names(self, prefix: str) -> list[str]:
        """Return the settings whose names begin with `prefix`."""
        return [name for name in self._values if name.startswith(prefix)]

    def value(self, name: str) -> Any:
        """Return a setting of the file, which is not taken by that."""
        return self._values.get(name)

    def take(self, name: str, default: Any = None) -> Any:
        """Return the value of `name`, or the other framework's default."""
        value = self._values.get(name)
        self._taken.add(name)
        if isinstance(value, Expression):
            self.leave(name, "it is computed, so set it yourself")
            return default
        return default if value is None else value

    def leave(self, name: str, why: str) -> None:
        """Name a setting as not translated, if the file has it."""
        if name in self._values:
            self._left[name] = why

    def fill(self, stage: dict[str, Any], table: Mapping[str, Setting]) -> None:
        """Write all settings of the table into `stage`."""
        for name, setting in table.items():
            value = self.take(name, setting.default)
            if value is None:
                continue
            try:
                put(stage, setting.ours, setting.value(value))
            except UntranslatableError as error:
                self.leave(name, str(error))
            except (TypeError, ValueError):
                self.leave(name, "it has another type than its counterpart here")

    def untranslated(self) -> list[str]:
        """Return a sentence for each setting that was left, or never taken."""
        rest = [name for name in self._values if name not in self._taken]
        why = {name: self._reason(name) for name in rest} | self._left
        return [f"{name} = {self._shown(name)}: {why[name]}" for name in self._values if name in why]

    def _reason(self, name: str) -> str:
        prefixes = [f"{name[:i]}." for i, letter in enumerate(name) if letter == "."]
        names = (name, *reversed(prefixes), name.rpartition(".")[2])
        return next((self._reasons[each] for each in names if each in self._reasons), _NO_COUNTERPART)

    def _shown(self, name: str) -> str:
        if _SECRET.search(name):
            return "…"  # it would be in the recipe
        value = self._values[name]
        return shortened(one_line(value.text if isinstance(value, Expression) else repr(value)), _SHOWN)


def put(stage: dict[str, Any], path: str, value: Any) -> None:
    """Set the setting at the dotted path."""
    *sections, last = path.split(".")
    for section in sections:
        stage = stage.setdefault(section, {})
    stage[last] = value


def one_of(values: Mapping[Any, Any]) -> Callable[[Any], Any]:
    """Return a conversion of the keys of `values`; others are untranslatable."""

    def convert(value: Any) -> Any:
        key = value.lower() if isinstance(value, str) else value
        if key not in values:
            raise UntranslatableError(f"here there are only counterparts of {', '.join(map(str, values))}")
        return values[key]

    return convert


schedule = one_of({
    "constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
})  # fmt: skip


def optimizer(stage: dict[str, Any], betas: Iterable[float], final_share: float) -> None:
    """Add the betas and the final rate to a stage's optimizer, whose schedule is written."""
    stage["optimizer"]["betas"] = list(betas)
    if stage["optimizer"].setdefault("schedule", "linear") != "constant":  # which never falls
        stage["optimizer"]["final_learning_rate_share"] = final_share


def number_of_epochs(value: Any) -> int:
    if float(value) != int(value):
        raise UntranslatableError("here epochs are whole: set max_steps")
    return int(value)


def set_seed(recipe: dict[str, Any], given: Given, name: str) -> None:
    recipe["seed"] = given.take(name, _SEED)


def recipe_name(file: Path) -> str:
    return re.sub(r"[^a-z0-9_.-]+", "-", file.stem.lower()).strip("-_.")[:100] or "translated"


def place_of(path: Path, folder: Path) -> str:
    """Return a path of the recipe in `folder`: relative to it where the path is below or beside it."""
    place, start = resolved(path), resolved(folder)
    return os.path.relpath(place, start) if place.is_relative_to(start.parent) else str(place)


@dataclass(frozen=True, slots=True)
class Origin:
    """The file to translate, and the folder of the recipe."""

    file: Path
    folder: Path
    context: int | None = None  # of the model in tokens, if it is known

    def local(self, text: str) -> Path | None:
        """Return a file or folder that the file names, from where it is started or beside it."""
        path = user_path(text)
        return next((each for each in (path, self.file.parent / path) if each.exists()), None)

    def source(self, names: str | list[str], **hub: Any) -> dict[str, Any]:
        """Return the source of a data set by name. hub: further settings, of a data set of the hub."""
        listed = [names] if isinstance(names, str) else names
        if len(listed) == 1 and self.local(listed[0]) is None and _names_a_data_set(listed[0]):
            settings = {key: value for key, value in hub.items() if value is not None}
            return {"type": "hub", "repository": listed[0], **settings}
        places = [self.local(name) or user_path(name) for name in listed]
        return {"type": "files", "paths": [place_of(place, self.folder) for place in places]}

    def rows(self, source: Mapping[str, Any]) -> int | None:
        """Return how many rows the files of a source have; None if they cannot be counted here."""
        folder = self.folder.absolute()
        counts = [_rows(Path(os.path.normpath(folder / path))) for path in source.get("paths", ())]
        return None if not counts or None in counts else sum(count for count in counts if count is not None)

    def read(self) -> str:
        """Return the file's text. Raises RecipeError."""
        if problem := file_problem(self.file):
            raise RecipeError(f"{self.file}: {problem}")
        try:
            return self.file.read_text(encoding="utf-8")
        except OSError as error:
            raise RecipeError(f"{self.file}: {reason_of(error)}") from error
        except UnicodeDecodeError as error:
            raise RecipeError(f"{self.file}: it is not UTF-8") from error


def _names_a_data_set(name: str) -> bool:
    return is_hub_name(name) and not name.endswith(_DATA_SUFFIXES)


def _rows(path: Path) -> int | None:
    try:
        if path.suffix == ".jsonl":
            return sum(bool(line.strip()) for line in path.read_bytes().splitlines())
        if path.suffix == ".parquet":
            return int(parquet.read_metadata(path).num_rows)
    except (OSError, ArrowException):
        return None  # the plan says what is wrong with it
    return None


def epochs_for(max_steps: int, batch_size: int, rows: int | None) -> int:
    """Return enough epochs for `max_steps`, which other frameworks repeat as often as it takes."""
    return MOST_EPOCHS if not rows else min(MOST_EPOCHS, math.ceil(max_steps * batch_size / rows))


def rl_steps(epochs: float, rows: int | None, prompts_per_step: int, setting: str, assumed: list[str]) -> int:
    """Return the RL steps of some passes over the prompts; an assumption if their number is not known."""
    if rows is not None:
        return max(1, math.floor(epochs * rows / prompts_per_step))
    assumed.append(
        f"rl.steps: {DEFAULT_STEPS}; {setting} is {epochs:g} passes over rows that were not counted: set rows x "
        f"{epochs:g} / {prompts_per_step}"
    )
    return DEFAULT_STEPS
