"""The stage `benchmark` before anything runs: whether its task files can be read where the job runs. Runs no code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rlhf_core.config.stages.benchmark import HARNESS, TASK_SUFFIXES, BenchmarkConfig
from rlhf_core.errors import RecipeError, did_you_mean, reason_of
from rlhf_core.graph.drafting import Draft
from rlhf_core.graph.user_files import files_below
from rlhf_core.preflight.stages.context import CheckContext, Note
from rlhf_core.stages.key import OPTIONAL_LIBRARIES

_FILES = ("arrow", "csv", "json", "parquet", "text")  # values of dataset_path that read `data_files`


def check(config: BenchmarkConfig, node: Draft, context: CheckContext) -> Iterator[str | Note]:
    at = node.section
    try:
        version(HARNESS)
    except PackageNotFoundError:
        yield f"{at}: {HARNESS} is not installed here: run `pip install '{OPTIONAL_LIBRARIES[HARNESS]}'`"
    files: dict[str, Mapping[str, Any]] = {}
    problems = []
    for folder in config.named_folders():
        try:
            names = [name for name in files_below(context.root, folder) if name.endswith(".yaml")]
        except RecipeError as error:
            yield f"{at}.{error}"
            return
        for name in names:
            try:
                files[name] = _read(context.root / name)
            except (OSError, YAMLError, ValueError) as error:
                yield f"{at}.task_folder: {name}: {reason_of(error)}"
                return
            problems += [f"{name}: {problem}" for problem in _problems(files[name], name, config, context.root)]
    yield from (f"{at}.task_folder: {problem}" for problem in problems)
    own = {each for content in files.values() for each in _names(content)}
    others = [task for task in config.tasks if task not in own]
    if others and own and (near := [did_you_mean(task, sorted(own)) for task in others if did_you_mean(task, own)]):
        yield f"{at}.tasks: there is no `{others[0]}` in {config.task_folder}{near[0]}"
    elif others:
        yield Note(
            f"{at}: {', '.join(others)} are tasks of lm-evaluation-harness, whose data the job loads from the hub in "
            "their newest version: no key includes it"
        )


def _read(path: Path) -> Mapping[str, Any]:
    """Return a task file's content. Functions that it names are not loaded."""
    yaml = YAML(typ="safe", pure=True)
    yaml.constructor.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))
    content = yaml.load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("a task file must be a mapping")
    return content


def _names(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names by which a recipe can ask for the tasks of a file."""
    tags = content.get("tag") or ()
    for value in (content.get("task"), content.get("group"), *((tags,) if isinstance(tags, str) else tags)):
        if isinstance(value, str):
            yield value


def _problems(content: Mapping[str, Any], name: str, config: BenchmarkConfig, root: Path) -> Iterator[str]:
    """Yield what would make a task of the file fail in the job, or would run code that the recipe does not allow."""
    if content.get("unsafe_code", False) is not False and not config.unsafe_code:
        yield "`unsafe_code` runs completions as programs, outside of the sandbox: set unsafe_code to true to allow it"
    options = content.get("dataset_kwargs") or {}
    if options.get("trust_remote_code"):
        yield "`trust_remote_code` runs code of the hub, which is never done: take it out"
    folder = config.task_folder or ""
    included = content.get("include") or ()
    for file in (included,) if isinstance(included, str) else included:
        # Of an include the path starts at its own file; of data, at the task folder, where the job runs.
        yield from _file_problems(str(PurePosixPath(name).parent.relative_to(folder) / file), root / folder)
    if content.get("dataset_path") in _FILES:
        for file in _data_files(options.get("data_files")):
            yield from () if any(sign in file for sign in "*?[") else _file_problems(file, root / folder)


def _data_files(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _data_files(item)
    elif isinstance(value, list):
        for item in value:
            yield from _data_files(item)


def _file_problems(file: str, folder: Path) -> Iterator[str]:
    """Yield the problem of a file that a task names. folder: the task folder, which travels to the job."""
    path = (folder / file).resolve()
    if "://" in file or not path.is_relative_to(folder.resolve()):
        yield f"`{file}` is outside of the task folder, so the job would not have it: put it there"
    elif not path.is_file():
        yield f"there is no `{file}` in the task folder"
    elif path.suffix.lower() not in TASK_SUFFIXES and not path.name.endswith(TASK_SUFFIXES):
        yield f"`{file}` does not travel with the task folder: only files that end in {', '.join(TASK_SUFFIXES)} do"
