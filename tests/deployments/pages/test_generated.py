"""The generated pages of the reference are current, and a licence that is not compatible is found."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from deployments.pages import api, commands, licences

REFERENCE = Path(__file__).resolve().parents[3] / "docs/reference"


def test_the_page_of_commands_is_current() -> None:
    text = (REFERENCE / "commands.md").read_text(encoding="utf-8")
    assert commands.page() == text, "run: python -m deployments.pages.commands docs/reference/commands.md"


def test_the_page_of_commands_has_arguments_options_and_defaults() -> None:
    section = commands.page().partition("### serve\n")[2].partition("\n### ")[0]
    assert "alignment serve MODEL [OPTION …]" in section
    assert "- `--port INTEGER` (default `8000`): Port to listen on.\n" in section
    assert "- `--rollout KEY=VALUE`, any number of times: " in section
    assert "- `MODEL` (**required**): " in section
    assert "alignment cluster slurm RECIPE [KEY=VALUE …] [OPTION …]" in commands.page()


def test_the_page_of_the_api_is_current() -> None:
    text = (REFERENCE / "api.md").read_text(encoding="utf-8")
    assert api.page() == text, "run: python -m deployments.pages.api docs/reference/api.md"


def test_a_public_name_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "PUBLIC", {"Results": ("rlhf_core.artifacts.opening: open_stores",)})
    with pytest.raises(LookupError, match=r"^rlhf_core\.artifacts\.opening has no open_stores: correct PUBLIC"):
        api.page()


def test_every_name_that_the_guides_import_is_in_the_page_of_the_api() -> None:
    page = api.page()
    assert all(f"### `{module}`" in page for module in ("rlhf_core.losses.kl", "rlhf_core.contract"))
    assert "def estimate(" in page
    assert "class RewardEntry" in page


def test_the_page_of_licences_has_every_package_and_is_current() -> None:
    text = (REFERENCE / "licences.md").read_text(encoding="utf-8")
    assert licences.page() == text, "run: python -m deployments.pages.licences docs/reference/licences.md"
    assert len(licences.locked(licences.CPU)) > 200


@pytest.mark.parametrize(
    ("expression", "compatible"),
    [
        ("MIT", True),
        ("MPL-2.0 AND (Apache-2.0 OR MIT)", True),
        ("Artistic-1.0-Perl OR GPL-2.0-or-later", True),
        ("GPL-3.0-only", False),
        ("MIT AND AGPL-3.0-only", False),
        ("", False),
    ],
)
def test_a_licence_is_compatible_by_one_of_its_alternatives(expression: str, compatible: bool) -> None:
    assert licences.is_known(expression) == compatible


def test_an_incompatible_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "strict-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: strict\nVersion: 1.0\nLicense-Expression: AGPL-3.0-only\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert metadata.version("strict") == "1.0"
    with pytest.raises(licences.LicenceError, match=r"^strict has a licence that is unknown or not compatible"):
        licences.licence("strict")
    with pytest.raises(licences.LicenceError, match=r"^absent-package is not installed"):
        licences.licence("absent-package")
