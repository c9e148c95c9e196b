"""Validation of the settings that a recipe passes on to DeepSpeed. Importing this module imports no library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from rlhf_core.errors import did_you_mean, reason_of


class _Recorded(dict[str, Any]):
    """A mapping that records which keys are asked for, with the default of each."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__({k: _Recorded(v) if isinstance(v, dict) else v for k, v in settings.items()})
        self.asked: dict[str, Any] = {}
        self.spread = False  # passed whole to a class, which rejects what it does not know

    def __iter__(self) -> Iterator[str]:
        self.spread = True
        return super().__iter__()

    def keys(self) -> Any:  # of `**settings`, where __iter__ is overridden
        self.spread = True
        return super().keys()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked[key] = default
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.setdefault(key, None)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.setdefault(str(key), None)
        return super().__contains__(key)


def problems(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the dotted name and the problem of each setting that DeepSpeed does not know, or whose value it rejects.

    DeepSpeed ignores an unknown name outside of its blocks: a name is known if its configuration asks for it.
    """
    return [problem for name, value in settings.items() for problem in _problems_of(name, value)]


def _problems_of(name: str, value: Any) -> Iterator[tuple[str, str]]:
    from pydantic import ValidationError

    from rlhf_core.training.deepspeed_settings import import_deepspeed

    import_deepspeed()
    from deepspeed.runtime.config import DeepSpeedConfig

    recorded = _Recorded({name: value, "train_micro_batch_size_per_gpu": 1})
    try:
        DeepSpeedConfig(recorded)
    except ValidationError as error:
        for problem in error.errors():
            yield _located(name, value, problem["loc"]), _described(error.title, problem)
    except Exception as error:  # whatever a check of DeepSpeed raises
        yield name, f"DeepSpeed does not take it: {reason_of(error)}"
    else:
        yield from _unread(recorded, "")


def _unread(recorded: _Recorded, at: str) -> Iterator[tuple[str, str]]:
    """Yield what no code of DeepSpeed has asked for, and values of another type than the default's."""
    for name, value in recorded.items():
        default = recorded.asked.get(name)
        if name not in recorded.asked:
            yield f"{at}{name}", f"DeepSpeed has no such setting{did_you_mean(name, recorded.asked)}"
        elif isinstance(default, bool | str) and type(value) is not type(default):
            yield f"{at}{name}", f"it must be {'true or false' if isinstance(default, bool) else 'text'}"
        elif isinstance(value, _Recorded) and value.asked and not value.spread:
            yield from _unread(value, f"{at}{name}.")


def _located(name: str, value: Any, location: Sequence[Any]) -> str:
    """Return the dotted name of the setting at `location`, or else of the block that it is somewhere below."""
    for part in location:
        if not isinstance(value, dict) or part not in value:
            break
        name, value = f"{name}.{part}", value[part]
    return name


def _described(title: str, problem: Mapping[str, Any]) -> str:
    """title: of the pydantic class that found the problem."""
    *outer, last = problem["loc"] or ("",)
    if problem["type"] != "extra_forbidden":
        return f"{last}: {problem['msg']}" if last else str(problem["msg"])
    return f"DeepSpeed has no setting `{last}` here{did_you_mean(str(last), _fields(title, outer))}"


def _fields(title: str, outer: Sequence[Any]) -> Iterator[str]:
    """Yield the names in the class `title`, or in that of its field at `outer`."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    model: Any = next(each for each in _subclasses(DeepSpeedConfigModel) if each.__name__ == title)
    for name in outer:
        annotation = model.model_fields[name].annotation
        model = next(each for each in (annotation, *get_args(annotation)) if hasattr(each, "model_fields"))
    for name, info in model.model_fields.items():
        yield info.alias or name


def _subclasses(model: type) -> Iterator[type]:
    below: type
    for below in model.__subclasses__():
        yield below
        yield from _subclasses(below)
