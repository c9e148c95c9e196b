"""Benchmarks before a run: task files, what they may not do, and a library that is missing."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from rlhf_core.errors import RecipeError
from rlhf_core.graph.graph import Node, build_graph
from rlhf_core.graph.outline import outline
from rlhf_core.preflight.look import Seen, look
from rlhf_core.preflight.stages import benchmark
from rlhf_core.recipe.loading import load_recipe
from rlhf_core.stages.key import computing_libraries

pytestmark = pytest.mark.parts  # the preflight asks for model classes

RECIPE = """
name: bot
data: {talks: {format: conversations, source: {type: files, paths: [rows.jsonl]}}}
base: {source: {type: scratch, context_length: 64}}
sft: {dataset: talks, batch_size: 2, max_length: 64, optimizer: {learning_rate: 1e-3}}
benchmark:
  tasks: [words]
  task_folder: tasks
  max_tokens: 8
  rollout: {max_length: 64}
gate: {candidate: sft, baseline: base, better: {acc: {evaluation: benchmark, scorer: words.acc}}}
report: null
"""
TASK = """
task: words
tag: [letters]
dataset_path: json
dataset_kwargs: {data_files: {test: words.jsonl}}
process_docs: !function code.docs
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "two and two?", "completion": "four"}\n')
    (tmp_path / "bot.yaml").write_text(RECIPE)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "words.yaml").write_text(TASK)
    (tmp_path / "tasks" / "words.jsonl").write_text("{}\n")
    (tmp_path / "tasks" / "code.py").write_text("def docs(docs):\n    return docs\n")
    return tmp_path


def seen(folder: Path, *overrides: str) -> Seen:
    loaded = load_recipe(str(folder / "bot.yaml"), overrides)
    return look(loaded, outline(loaded.recipe))


def nodes(folder: Path, *overrides: str, **libraries: str) -> dict[str, Node]:
    loaded = load_recipe(str(folder / "bot.yaml"), overrides)
    return build_graph(loaded, computing_libraries() | {name.replace("_", "-"): v for name, v in libraries.items()})


def test_a_benchmark_of_own_tasks_is_planned_for_each_model_and_compared_by_a_gate(folder: Path) -> None:
    assert not [note for note in seen(folder).notes if "benchmark" in note]
    graph = nodes(folder)
    assert graph["gate"].inputs["better.acc.evaluation.candidate"] == "benchmark.sft"
    files = ["tasks/code.py", "tasks/words.jsonl", "tasks/words.yaml"]
    assert sorted(graph["benchmark.base"].user_files) == files
    assert [name for name, node in graph.items() if "lm-eval" in node.libraries] == ["benchmark.base", "benchmark.sft"]


def test_task_files_and_the_version_of_the_harness_are_part_of_this_key_alone(folder: Path) -> None:
    before = {name: node.ref for name, node in nodes(folder).items()}
    others = {name: node.ref for name, node in nodes(folder, lm_eval="0.0.1").items()}
    assert {name for name in before if others[name] != before[name]} == {"benchmark.base", "benchmark.sft", "gate"}
    (folder / "tasks" / "code.py").write_text("def docs(docs):\n    return docs[:1]\n")
    after = {name: node.ref for name, node in nodes(folder).items()}
    assert {name for name in before if after[name] != before[name]} == {"benchmark.base", "benchmark.sft", "gate"}


def test_without_the_harness_the_command_that_installs_it_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(benchmark, "version", absent)
    with pytest.raises(RecipeError, match=r"benchmark: lm-eval is not installed here: run `pip install 'alignment\["):
        seen(folder)
    loaded = load_recipe(str(folder / "bot.yaml"), ())
    libraries = {name: its for name, its in computing_libraries().items() if name != "lm-eval"}
    with pytest.raises(RecipeError, match=r"lm-eval is not installed here: run `pip install 'alignment\[benchmarks\]'"):
        build_graph(loaded, libraries)


@pytest.mark.parametrize(
    ("task", "overrides", "message"),
    [
        (f"{TASK}unsafe_code: true\n", (), "words.yaml: `unsafe_code` runs completions as programs"),
        (TASK.replace("{data_files:", "{trust_remote_code: true, data_files:"), (), "`trust_remote_code` runs code"),
        (TASK.replace("words.jsonl", "../rows.jsonl"), (), "`../rows.jsonl` is outside of the task folder"),
        (TASK.replace("words.jsonl", "https://host/rows.jsonl"), (), "`https://host/rows.jsonl` is outside"),
        (TASK.replace("words.jsonl", "wrods.jsonl"), (), "there is no `wrods.jsonl` in the task folder"),
        (f"{TASK}include: ../common.yaml\n", (), "`../common.yaml` is outside of the task folder"),
        (TASK, ("benchmark.tasks=[wrods]",), "benchmark.tasks: there is no `wrods` in tasks .did you mean `words`"),
        (TASK, ("benchmark.task_folder=taks",), "benchmark.task_folder: taks: this folder is not there"),
        ("- words\n", (), "words.yaml: a task file must be a mapping"),
        ("task: [words\n", (), "words.yaml: .*flow sequence"),
        (TASK, ("gate.better.acc.scorer=acc",), "scorer: `acc` is not a score of `benchmark`: write TASK.METRIC"),
        (TASK, ("gate.better.acc.completions=sampled",), "`benchmark` has one completion of each prompt"),
        (TASK, ("benchmark.max_tokens=64",), "max_tokens=64 leaves no room for a prompt in rollout.max_length=64"),
        (TASK, ("benchmark.tasks=[words, words]",), "tasks names one twice"),
    ],
)
def test_a_benchmark_that_could_not_run(folder: Path, task: str, overrides: tuple[str, ...], message: str) -> None:
    (folder / "tasks" / "words.yaml").write_text(task)
    with pytest.raises(RecipeError, match=f"(?s){message}"):
        seen(folder, *overrides)


def test_unsafe_code_is_a_choice_of_the_recipe(folder: Path) -> None:
    (folder / "tasks" / "words.yaml").write_text(f"{TASK}unsafe_code: true\n")
    seen(folder, "benchmark.unsafe_code=true")


def test_a_tag_is_a_name_and_a_task_of_the_harness_is_noted(folder: Path) -> None:
    assert not [note for note in seen(folder, "benchmark.tasks=[letters]").notes if "hub" in note]
    notes = seen(folder, "benchmark.tasks=[words, arc_easy]").notes
    assert [note for note in notes if note.startswith("benchmark: arc_easy are tasks of lm-evaluation-harness")]
