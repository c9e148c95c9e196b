"""Commands whose streams, arguments, paths and disks fail: one sentence and exit code 1, never a traceback."""

from __future__ import annotations

import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.cli.failures import explanation
from deployments.cli.main import app
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.repository import ArtifactRepository, blob_path
from tests.rlhf_core.artifacts.manifests import manifest, published
from tests.rlhf_core.recipes import put, write

ALIGNMENT = f"{sys.executable} -m deployments.cli.main"


@pytest.fixture(autouse=True)
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArtifactRepository:
    """The store of the commands, which run in an empty folder."""
    monkeypatch.setenv("ALIGNMENT_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return ArtifactRepository(LocalStore(tmp_path / "store"))


def said(*arguments: str) -> str:
    """The one sentence with which the command ends."""
    done = CliRunner().invoke(app, [*arguments], input="")
    assert (done.exit_code, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    return str(line)


@pytest.mark.parametrize(
    ("shell", "sentence"),
    [
        ("artifacts >&-", "error: standard output is closed: give the command one, such as >/dev/null"),
        ("artifacts <&-", "error: standard input is closed: give the command one, such as </dev/null"),
        ("artifacts >/dev/full", "error: standard output cannot be written (No space left on device): free space"),
        ("--help >/dev/full", "error: standard output cannot be written (No space left on device): free space"),
        ("artifacts | true", ""),
    ],
)
@pytest.mark.parts
def test_standard_streams(shell: str, sentence: str) -> None:
    done = subprocess.run(f"{ALIGNMENT} {shell}", shell=True, capture_output=True, text=True, check=False)
    assert (done.stdout, len(done.stderr.splitlines())) == ("", 1 if sentence else 0)
    assert done.stderr.startswith(sentence)
    assert done.returncode == (1 if sentence else 0)  # of a pipeline, that of its last command


@pytest.mark.parametrize("arguments", [("alias", "a/b", "c/d", "--reason"), ("rounds", "tiny", "--skip"), ("show",)])
def test_arguments_that_are_not_utf_8(arguments: tuple[str, ...]) -> None:
    assert said(*arguments, "\udcff") == (
        "error: the argument `\\udcff` is not UTF-8: write it again, or rename the file"
    )


@pytest.mark.parametrize("name", ["/", "..", "", "/a/b", "a//b"])
def test_what_can_be_no_name_is_said_as_it_was_given(name: str) -> None:
    assert f"has no artifact or alias `{name}`" in said("show", name)
    assert f"has no artifact or alias `{name}`" in said("verify", name)
    assert f"has no run `{name}`: it has none yet" in said("report", name)


@pytest.mark.parametrize("variable", ["ALIGNMENT_STORE", "ALIGNMENT_STACK_DIR"])
def test_paths_that_lead_nowhere(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "~nobody-here/x")
    assert "is `~nobody-here/x`: unknown user ~nobody-here" in said("artifacts")
    if variable == "ALIGNMENT_STACK_DIR":
        Path("loop").symlink_to("loop")
        monkeypatch.setenv(variable, str(Path("loop").absolute()))
        assert said("artifacts").endswith("here/loop`: this link leads to itself: correct it, or give another path")


def test_a_recipe_without_rounds_has_none() -> None:
    assert said("rounds", "tiny").startswith("error: the recipe tiny has no `loop`")


def test_the_text_of_users_is_no_markup(repository: ArtifactRepository, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "file").write_text("x")
    odd = "[/red] [bold] :warning:"
    parent = published(repository, tmp_path / "parent", "parent")
    changes = {"user_files": {odd: "0" * 64}, "pins": {odd: odd}, "parents": {odd: parent.ref}, "metrics": {odd: odd}}
    made = repository.publish(manifest(odd, **changes), tmp_path / "made")
    for arguments, times in ((["artifacts"], 3), (["lineage", str(made.ref)], 5)):
        shown = CliRunner().invoke(app, arguments)
        assert (shown.exit_code, shown.output.count(odd)) == (0, times), shown.output


def test_a_pull_that_fails_is_not_in_the_way_of_the_next(repository: ArtifactRepository, tmp_path: Path) -> None:
    made = published(repository, tmp_path / "a", "one")
    path = blob_path(made.files[0].sha256)
    repository.store.put(path, b"oni")
    assert "it is damaged; run `alignment repair`" in said("pull", str(made.ref), "there/pulled")
    assert list(Path("there").iterdir()) == []
    repository.store.put(path, b"one")
    assert CliRunner().invoke(app, ["pull", str(made.ref), "there/pulled"]).exit_code == 0
    assert Path("there/pulled/name.txt").read_text() == "one"
    Path("there/pulled/name.txt").write_text("the copy is the user's")


def test_what_is_a_defect_keeps_its_traceback() -> None:
    full = OSError(28, "No space left on device", "/some/file")
    assert "is full: free space there" in str(explanation(full))
    assert "`ulimit -f`" in str(explanation(RuntimeError("I/O error: File too large (os error 27)")))
    assert explanation(FileNotFoundError(2, "No such file", "/x")) == (
        "/x: No such file: correct the path, or what may be done there"
    )
    nowhere = FileNotFoundError(2, "No usable temporary directory found in ['/x']")
    assert "set TMPDIR to a folder that can be written" in str(explanation(nowhere))
    assert explanation(ValueError("a defect")) is None


def test_a_terminal_that_lacks_a_sign_has_its_number(tmp_path: Path) -> None:
    recipe = write(tmp_path, put("rl", value=None))
    done = CliRunner(charset="ascii").invoke(app, ["plan", recipe])
    assert (done.exit_code, "\\u2248" in done.output) == (0, True), done.output


@pytest.mark.parametrize(
    ("variable", "file", "why"),
    [
        ("SSL_CERT_FILE", "/nowhere", "No such file or directory"),
        ("PREFECT_API_SSL_CERT_FILE", "/etc", "Is a directory"),
        ("AWS_CA_BUNDLE", __file__, "[X509: NO_CERTIFICATE_OR_CRL_FOUND] no certificate or crl found"),
    ],
)
def test_files_of_certificates(variable: str, file: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error that the libraries raise names no file."""
    monkeypatch.setenv(variable, file)
    with pytest.raises(OSError) as caught:  # noqa: PT011 (of ssl, of three classes)
        ssl.create_default_context(cafile=file)
    assert caught.value.filename is None
    assert str(explanation(caught.value)).startswith(f"{variable} is {file}, not a file of certificates")
