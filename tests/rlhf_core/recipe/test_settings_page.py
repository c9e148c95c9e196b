"""The tables of docs/reference/settings.md match the models."""

from functools import cache
from pathlib import Path

import pytest

from rlhf_core.recipe import settings_page
from rlhf_core.recipe.loading import load_recipe
from rlhf_core.recipe.settings_page import BEGIN, END, rewrite, undescribed

DOCS = Path(__file__).parents[3] / "docs"
SETTINGS = DOCS / "reference/settings.md"

reference = cache(settings_page.reference)


def row(section: str, key: str) -> str:
    """The table row of `key` below the heading `section`."""
    table = reference().partition(f"### {section}\n")[2].partition("\n### ")[0]
    return next(line for line in table.splitlines() if line.startswith(f"| `{key}` |"))


def test_the_documentation_has_every_setting_as_it_is() -> None:
    text = SETTINGS.read_text(encoding="utf-8")
    assert rewrite(text) == text, f"run: python -m rlhf_core.recipe.settings_page docs/reference/{SETTINGS.name}"


def test_every_setting_says_what_it_means() -> None:
    assert undescribed() == []


def test_a_row_has_type_default_and_meaning() -> None:
    assert (
        row("GRPOConfig", "clip_high")
        == "| `clip_high` | number > 0, ≤ 20 | `0.2` | yes | the ratio is clipped at 1 + this |"
    )
    assert row("OptimizerConfig", "betas").startswith("| `betas` | 2 of: number ≥ 0, < 1 | `[0.9, 0.95]` | yes |")
    assert row("LoraConfig", "rank").startswith("| `rank` | integer 1 to 512 | **needed** | yes |")


def test_the_blocks_of_every_algorithm_are_in_the_table_of_rl() -> None:
    assert row("RLConfig", "dr_grpo").startswith("| `dr_grpo` | [DrGRPOConfig](#drgrpoconfig) | none | yes |")
    assert "`ppo`, `reinforce++`," in row("RLConfig", "algorithm")


def test_settings_that_stay_out_of_the_key_are_told_apart() -> None:
    assert "| no |" in row("SFTConfig", "log_every")
    assert "| no |" in row("Placement", "workers"), "every place of it is operational"
    assert "| yes |" in row("VerifierReward", "pattern"), "operational as a monitor, not as a reward"
    assert "| yes |" in row("Recipe", "seed")
    assert "| no |" in row("Recipe", "name")


def test_links_lead_to_headings() -> None:
    text = reference()
    headings = {line.removeprefix("### ").lower() for line in text.splitlines() if line.startswith("### ")}
    links = {part.partition(")")[0] for part in text.split("](#")[1:]}
    assert links <= headings
    assert "ppoconfig" in links


def test_a_text_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks the mark"):
        rewrite("# Every setting\n")
    assert rewrite(f"a\n{BEGIN}\nold\n{END}\nb\n").startswith(f"a\n{BEGIN}\n\n### Recipe\n")


def test_the_example_is_a_recipe(tmp_path: Path) -> None:
    example = (DOCS / "guides/recipes.md").read_text(encoding="utf-8").partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "greetings.yaml").write_text(example, encoding="utf-8")
    assert load_recipe(str(tmp_path / "greetings.yaml")).recipe.name == "greetings"
