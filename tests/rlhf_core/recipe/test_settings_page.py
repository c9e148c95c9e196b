"""The pages of docs/reference/settings match the models."""

import re
from functools import cache
from pathlib import Path

from rlhf_core.recipe import settings_page
from rlhf_core.recipe.loading import load_recipe
from rlhf_core.recipe.recipe import Recipe
from rlhf_core.recipe.settings_page import undescribed

DOCS = Path(__file__).parents[3] / "docs"
SETTINGS = DOCS / "reference/settings"

pages = cache(settings_page.pages)


def entry(page: str, heading: str, key: str) -> str:
    """The entry of `key` below `heading`, in one line."""
    section = re.split(r"^#+ ", pages()[page].partition(f"# {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    entries = re.split(r"^- ", section, flags=re.MULTILINE)
    return next(" ".join(text.split()) for text in entries if text.startswith(f"`{key}` "))


def test_the_documentation_has_every_setting_as_it_is() -> None:
    written = {file.name: file.read_text(encoding="utf-8") for file in SETTINGS.glob("*")}
    assert written == pages(), (
        "run: python -m rlhf_core.recipe.settings_page docs/reference/settings, and delete pages that it does not write"
    )


def test_every_setting_says_what_it_means() -> None:
    assert undescribed() == []


def test_each_stage_has_a_page_of_its_own_with_its_settings_first() -> None:
    stages = {name for name in Recipe.block_names() if (block := Recipe.block_class(name, None)) and block}
    assert {f"{name}.md" for name in stages} | {"README.md", "data.md", "shared.md"} == set(pages())
    for name in stages:
        assert pages()[f"{name}.md"].startswith(f"# {name}\n")
    assert [line for line in pages()["preference.md"].splitlines() if line.startswith("#")][:5] == [
        "# preference",
        "## preference.reference",
        "## preference.losses: dpo",
        "## preference.losses: robust_dpo",
        "## preference.losses: ipo",
    ]


def test_an_entry_has_type_default_and_meaning() -> None:
    assert (
        entry("rl.md", "rl.grpo", "clip_high")
        == "`clip_high` (number > 0, ≤ 20; default `0.2`): the ratio is clipped at 1 + this"
    )
    assert entry("shared.md", "optimizer", "betas").startswith(
        "`betas` (2 of: number ≥ 0, < 1; default `[0.9, 0.95]`):"
    )
    assert entry("shared.md", "lora", "rank").startswith("`rank` (integer 1 to 512; **required**):")


def test_the_blocks_of_every_algorithm_are_entries_of_rl() -> None:
    assert entry("rl.md", "rl", "dr_grpo").startswith("`dr_grpo` ([dr_grpo](#rldr_grpo))")
    assert "`ppo`, `reinforce++`," in entry("rl.md", "rl", "algorithm")


def test_settings_that_stay_out_of_the_key_are_told_apart() -> None:
    out = "; not in the key)"
    assert out in entry("sft.md", "sft", "log_every")
    assert "Not in the key." in pages()["shared.md"].partition("## placement (Placement)\n")[2].partition("\n##")[0]
    assert out not in entry("shared.md", "monitors, rewards, scorers: verifier", "pattern"), "operational as a monitor"
    assert out not in entry("README.md", "The recipe", "seed")
    assert out in entry("README.md", "The recipe", "name")


def test_headings_of_a_page_differ_and_links_lead_to_one() -> None:
    headings = {
        page: [
            re.sub(r"[^\w\- ]", "", found.lower()).replace(" ", "-") for found in re.findall(r"^#+ (.*)", text, re.M)
        ]
        for page, text in pages().items()
    }
    assert [page for page, names in headings.items() if len(names) != len(set(names))] == []
    links = [
        (target or page, anchor)
        for page, text in pages().items()
        for target, anchor in re.findall(r"\]\(([^)#/]*)#([^)]*)\)", text)
    ]
    assert [link for link in links if link[1] not in headings[link[0]]] == []
    assert ("shared.md", "optimizer") in links


def test_the_example_is_a_recipe(tmp_path: Path) -> None:
    example = (DOCS / "guides/recipes.md").read_text(encoding="utf-8").partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "greetings.yaml").write_text(example, encoding="utf-8")
    assert load_recipe(str(tmp_path / "greetings.yaml")).recipe.name == "greetings"
