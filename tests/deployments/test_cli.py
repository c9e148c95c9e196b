"""The command line as a whole: JSON, exit codes, help, completion, and docs/reference/cli.md and AGENTS.md."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from deployments.cli import completion, output, run
from deployments.cli.documents.runs import LogLine
from deployments.cli.exit_codes import ExitCode
from deployments.cli.following import Ended
from deployments.cli.main import app
from rlhf_core import __version__
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.manifest import ArtifactRef, Kind, Manifest
from rlhf_core.artifacts.registry import move_alias
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.rounds import Rounds
from rlhf_core.pipeline.record import NodeRecord, RunRecord, record_path, write_record
from rlhf_core.tracking.protocol import SAMPLES_FILE
from tests.rlhf_core.artifacts.manifests import manifest, published
from tests.rlhf_core.recipes import write

ROOT = Path(__file__).resolve().parents[2]
NOW = datetime(2026, 1, 2, tzinfo=UTC)
GROUP: Any = typer.main.get_command(app)


@pytest.fixture(autouse=True)
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArtifactRepository:
    """The store of the commands, which run in an empty folder."""
    monkeypatch.setenv("ALIGNMENT_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "cache"))
    for name in ("PREFECT_API_URL", "RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return ArtifactRepository(LocalStore(tmp_path / "store"))


def alignment(*arguments: str) -> Any:
    return CliRunner().invoke(app, [*arguments])


def document(*arguments: str, exit_code: int = 0) -> Any:
    done = alignment(*arguments, "--json")
    assert done.exit_code == exit_code, done.output
    return json.loads(done.stdout)


def recorded(
    repository: ArtifactRepository, run_id: str, *nodes: Manifest, hours: int = 0, failed: str = "", recipe: str = "r"
) -> None:
    outcomes = [NodeRecord(name=each.name, ref=each.ref, outcome="computed") for each in nodes]
    if failed:
        ref = ArtifactRef(stage="rl", key="0" * 64)
        outcomes.append(NodeRecord(name=failed, ref=ref, outcome="failed", error="no memory"))
    record = RunRecord(
        run_id=run_id, recipe={"name": recipe}, overrides=(f"seed={hours}",), tags=("nightly",) if hours == 49 else (),
        started_at=NOW + timedelta(hours=hours),
        finished_at=NOW + timedelta(hours=hours, minutes=5), nodes=tuple(outcomes),
    )  # fmt: skip
    write_record(repository.store, record)


# JSON, errors, exit codes


def test_a_list_is_a_document_or_lines_of_cells(repository: ArtifactRepository, tmp_path: Path) -> None:
    made = published(repository, tmp_path / "a", "sft\twith a tab and " + "a long name " * 40)
    (line,) = document("artifacts")["artifacts"]
    assert (line["artifact"], line["size"], line["metrics"]["gap"]) == (made.ref.full, len(made.name), None)
    header, row = alignment("artifacts").stdout.splitlines()
    assert header.split("\t") == ["artifact", "node", "kind", "made", "size", "metrics"]
    assert row.split("\t")[:3] == [str(made.ref), " ".join(made.name.split()), "policy"], "whole, on one line"
    assert document("show", str(made.ref))["key"] == made.key
    assert document("lineage", str(made.ref)) == {
        "artifacts": [json.loads(made.model_dump_json())],
        "edges": [],
    }
    pulled = document("pull", str(made.ref), "there")
    assert pulled == {"artifact": made.ref.full, "folder": "there"}
    assert document("verify")["damaged"] == []


def test_an_error_is_json_too_with_its_exit_code() -> None:
    done = alignment("show", "sft/1f3c", "--json")
    assert (done.exit_code, done.stdout) == (1, "")
    error = json.loads(done.stderr)["error"]
    assert (error["type"], error["exit_code"]) == ("StoreError", 1)
    assert "has no artifact or alias `sft/1f3c`" in error["message"]
    for arguments in (["artifacts", "--nothing"], ["artefacts"], ["--nothing"]):
        wrong = alignment(*arguments, "--json")
        assert wrong.exit_code == 2
        assert json.loads(wrong.stderr)["error"]["type"] == "UsageError"


def test_bad_news_is_printed_and_then_said(repository: ArtifactRepository, tmp_path: Path) -> None:
    made = published(repository, tmp_path / "a", "one")
    (blob,) = repository.store.list("blobs/")
    repository.store.put(blob, b"oni")
    done = alignment("verify", "--json")
    (damaged,) = json.loads(done.stdout)["damaged"]
    assert (done.exit_code, damaged["object"], damaged["artifacts"]) == (1, blob, [made.ref.full])
    assert json.loads(done.stderr.splitlines()[-1])["error"]["message"].startswith("1 object damaged")
    assert document("repair", "--yes")["damaged"][0]["repair"].startswith("moved to damaged/")


@pytest.mark.parametrize(
    ("state", "interrupted", "exit_code"),
    [("Completed", False, 0), ("Failed", False, 3), ("Cancelled", False, 3), ("Cancelled", True, 130)],
)
def test_a_run_that_does_not_complete_has_an_exit_code_of_its_own(
    state: str, interrupted: bool, exit_code: int
) -> None:
    error = run.run_error(Ended("1", state == "Completed", state, "why", "url", interrupted))
    ended = typer.Typer(cls=type(GROUP))

    @output.printing(ended, "group", "end")
    def end() -> output.Printed[LogLine]:
        return output.Printed(LogLine("job", "sft", "driver", None, "é"), ["text"], error)

    ended.callback()(lambda: None)
    done = CliRunner().invoke(ended, ["end", "--json"])
    assert (done.exit_code, json.loads(done.stdout)["line"]) == (exit_code, "é")
    assert exit_code in set(ExitCode)


def test_what_a_command_prints_beside_its_document_goes_to_standard_error() -> None:
    noisy = typer.Typer(cls=type(GROUP))

    @output.printing(noisy, "group", "noise")
    def noise() -> output.Printed[LogLine]:
        print("of a library")
        output.console.print("progress")
        return output.Printed(LogLine("job", "sft", "driver", None, "the line"), ["text"])

    noisy.callback()(lambda: None)
    done = CliRunner().invoke(noisy, ["noise", "--json"])
    assert json.loads(done.stdout)["line"] == "the line"
    assert done.stderr == "of a library\nprogress\n"
    assert CliRunner().invoke(noisy, ["noise"]).stdout == "of a library\nprogress\ntext\n"


def test_the_version() -> None:
    assert alignment("--version").stdout == f"alignment {__version__}\n"


# The lists


def test_runs_are_listed_newest_first_and_only_as_many_are_read_as_are_shown(
    repository: ArtifactRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    for hour in range(50):
        recorded(repository, f"run-{hour:02}", hours=hour, failed="rl" if hour % 10 == 3 else "")
    repository.store.put(record_path("run-48"), b"{")
    read = []
    get_tagged = LocalStore.get_tagged
    monkeypatch.setattr(LocalStore, "get_tagged", lambda self, path: read.append(path) or get_tagged(self, path))
    newest, *_ = shown = document("runs", "-n", "3")["runs"]
    assert [line["outcome"] for line in document("runs", "--limit", "3")["runs"]][:1] == ["completed"]
    assert newest == {
        "run": "run-49", "recipe": "r", "settings": ["seed=49"], "outcome": "completed",
        "started": "2026-01-04T01:00:00Z", "seconds": 300.0, "failed_stages": [], "tags": ["nightly"],
        "device_seconds": 0.0, "money": None, "currency": None,
    }  # fmt: skip
    assert {line["run"] for line in shown} == {"run-49", "run-48", "run-47"}
    assert len(read) <= 2 * 16
    failed = document("runs", "--failed")["runs"]
    assert [line["run"] for line in failed] == ["run-43", "run-33", "run-23", "run-13", "run-03", "run-48"]
    assert failed[0]["failed_stages"] == ["rl"]
    assert failed[-1]["outcome"] == "unreadable"
    assert document("runs", "--recipe", "another")["runs"] == []
    assert [line["run"] for line in document("runs", "--tag", "nightly")["runs"]] == ["run-49"]
    assert "run-49\tr\tseed=49 nightly\t2026-01-04 01:00\tcompleted\t5:00" in alignment("runs").stdout


def test_aliases_and_recipes_are_listed(repository: ArtifactRepository, tmp_path: Path) -> None:
    assert document("alias") == {"aliases": []}
    assert alignment("artifacts").stdout == "the store has no artifact yet: `alignment run RECIPE` makes some\n"
    assert alignment("runs").stdout == "there is no run yet: `alignment run RECIPE` makes one\n"
    assert alignment("runs", "--failed").stdout == "no run matches these filters\n"
    made = published(repository, tmp_path / "a", "one")
    move_alias(repository.store, "bot", "best", made.ref, by="me", reason="better")
    repository.store.put("aliases/README", b"no alias")
    (line,) = document("alias")["aliases"]
    assert (line["alias"], line["artifact"], line["by"], line["reason"]) == (
        "bot/best", made.ref.full, "me", "better",
    )  # fmt: skip
    assert alignment("alias", "bot/best").exit_code == 1
    write(Path())
    names = [line["name"] for line in document("recipes")["recipes"]]
    assert names[0] == "./recipe.yaml"
    assert "tiny" in names


def test_the_running_round_is_listed(repository: ArtifactRepository) -> None:
    rounds = Rounds(repository.store, "tiny-loop")
    rounds.start(rounds.current("run-1"))
    (line,) = document("rounds", "tiny-loop")["rounds"]
    assert (line["number"], line["verdict"], line["run"], line["ended"]) == (1, "unfinished", "run-1", None)
    with rounds.take():  # type: ignore[union-attr]
        (line,) = document("rounds", "tiny-loop")["rounds"]
    assert line["verdict"] == "running"


# Comparing


def evaluated(repository: ArtifactRepository, folder: Path, name: str, scores: dict[str, float]) -> Manifest:
    folder.mkdir()
    rows = [
        {"id": each, "prompt": f"What is {each}?", "completions": [{"text": name, "scores": {"exact": score}}]}
        for each, score in scores.items()
    ]
    (folder / SAMPLES_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    changes = {"kind": Kind.EVALUATION, "metrics": {"pass@1": 0.5}}
    return repository.publish(
        manifest(name, "evaluation", **changes).model_copy(update={"name": "evaluation.sft"}), folder
    )


def test_two_runs_are_compared(repository: ArtifactRepository, tmp_path: Path) -> None:
    first = evaluated(repository, tmp_path / "a", "first", {"a": 1.0, "b": 0.0})
    second = evaluated(repository, tmp_path / "b", "second", {"b": 1.0, "a": 1.0})
    recorded(repository, "run-1", first)
    recorded(repository, "run-2", second, hours=1, recipe="other")
    content = document("diff", "run-1", "run-2")
    assert [head["run"] for head in content["runs"]] == ["run-1", "run-2"]
    assert content["differences"] == [{"section": "settings", "field": "name", "values": ["r", "other"]}]
    (evaluation,) = content["evaluations"]
    (difference,) = evaluation["differences"]
    assert (difference["run"], difference["value"], difference["prompts"]) == ("run-2", 0.5, 2)
    assert [change["id"] for change in evaluation["better"]] == ["b"]
    text = alignment("diff", "run-1", "run-2").stdout
    assert "settings\tname\tr\tother" in text
    assert re.search(r"run-2\texact\tgreedy\t\+0\.500\t", text)
    for arguments, sentence in (
        (["run-1"], "compares two to 6 different runs: 1 given"),
        (["run-1", "run-1"], "compares two to 6 different runs: 1 given"),
        (["run-1", "run-3"], "has no run `run-3`: its newest are run-2, run-1, and `alignment runs` lists all"),
        (["run-1", "../x"], "has no run `../x`: its newest are run-2, run-1, and `alignment runs` lists all"),
    ):
        done = alignment("diff", *arguments)
        assert (done.exit_code, sentence in done.stderr) == (1, True), done.stderr


# Help, completion, pages


def commands() -> Iterator[tuple[str, Any]]:
    yield from GROUP.commands.items()


def test_every_command_is_in_a_group_and_says_in_one_sentence_what_it_does() -> None:
    for name, command in commands():
        sentence = (command.help or "").split("\n\n")[0].replace("\n", " ")
        verb = sentence.split()[0]
        assert command.rich_help_panel, name
        assert sentence.endswith("."), name
        assert not re.search(r"\. [A-Z]", sentence), f"{name}: {sentence}"
        assert verb[0].isupper(), name
        assert not verb.endswith("s"), f"{name}: {verb}"


def test_every_argument_and_option_is_described_by_a_sentence() -> None:
    described = 0
    for name, command in [*commands(), *GROUP.commands["cluster"].commands.items()]:
        for parameter in command.params:
            sentence, place = parameter.help or "", f"{name} {parameter.name}"
            assert re.match(r"(?!(A|An|The|All|Each)\b)[A-Z]", sentence), place
            assert sentence.endswith("."), place
            described += 1
    assert described > 100


def documented_fields(name: str) -> set[str]:
    page = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    entries = re.findall(r"^- ((?:`[\w-]+`(?:, )?)+): (.*(?:\n  .*)*)$", page, re.MULTILINE)
    (fields,) = [fields for names, fields in entries if name in re.findall(r"`([\w-]+)`", names)]
    return set(re.findall(r"`(\w+)`", fields))


@pytest.mark.parametrize("name", [name for name, command in commands() if "json" in {p.name for p in command.params}])
def test_the_fields_of_every_document_are_in_its_page(name: str) -> None:
    returned = typing.get_type_hints(inspect.unwrap(GROUP.commands[name].callback))["return"]
    while not is_dataclass(returned) and not hasattr(returned, "model_fields"):
        (returned,) = typing.get_args(returned)
        if typing.get_origin(returned) is output.Printed:
            (returned,) = typing.get_args(returned)
    assert documented_fields(name) >= names_of(returned)


def names_of(document_class: Any) -> set[str]:
    """Of the document and the lists in it that are its content."""
    if hasattr(document_class, "model_fields"):
        return set(document_class.model_fields)
    hints = typing.get_type_hints(document_class)
    listed = [each for hint in hints.values() for each in typing.get_args(hint) if is_dataclass(each)]
    of_this_file = [each for each in listed if each.__module__ == LogLine.__module__]
    inner = [names_of(each) for each in of_this_file]
    return {field.name for field in fields(document_class)}.union(*inner)


def test_the_shell_completes_recipes_artifacts_aliases_and_runs(
    repository: ArtifactRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = published(repository, tmp_path / "a", "one")
    move_alias(repository.store, "sf", "best", made.ref, by="me", reason="")
    recorded(repository, "run-1", made)
    (tmp_path / "here" / "mine.yaml").write_text("")
    assert completion.recipe_names("tiny-l") == ["tiny-loop", "tiny-losses"]
    assert completion.recipe_names("mi") == ["mine.yaml"]
    assert completion.artifact_names("sf") == ["sf/best", str(made.ref)]
    assert completion.artifact_names(f"sft/{made.key[:4]}") == [str(made.ref)]
    assert completion.run_ids("run") == ["run-1"]
    monkeypatch.setenv("ALIGNMENT_STORE", "ftp://nowhere")
    assert completion.artifact_names("sf") == []
    words = {"_ALIGNMENT_COMPLETE": "complete_bash", "COMP_WORDS": "alignment plan tiny-lo", "COMP_CWORD": "2"}
    done = CliRunner().invoke(app, [], env=words, prog_name="alignment")
    assert done.stdout.split() == ["tiny-loop", "tiny-losses"]


def test_the_page_for_agents_names_commands_and_codes_that_there_are() -> None:
    page = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) < 60
    named = set(re.findall(r"alignment ([a-z][\w-]*)", page))
    assert named - {"COMMAND"} <= set(GROUP.commands)
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)} == set(ExitCode)
    shown = re.search(r"```bash\n(.*?)```", page, re.DOTALL)
    assert shown is not None
    lines = [line.partition("#")[0].split()[1:] for line in shown[1].splitlines()]
    for line in lines:
        command = GROUP.commands[line[0]]
        accepted = {flag for parameter in command.params for flag in parameter.opts}
        assert {word for word in line if word.startswith("--")} <= accepted, line
        if line[0] in ("recipes", "runs", "artifacts"):
            assert document(*line[:-1]).keys() == {line[0]}
