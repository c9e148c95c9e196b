"""Every causal architecture of transformers is computed as in docs/reference/models.md; each kind: test_layouts.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers

from benchmarks.architectures import examine

pytestmark = [pytest.mark.endurance("architectures"), pytest.mark.slow("the largest are hundreds of modules")]

PAGE = Path(__file__).resolve().parents[3] / "docs/reference/models.md"
LAYOUTS = dict(re.findall(r"^\| ([\w-]+) \| \w+ \| ([^|]+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", [*LAYOUTS])
def test_it_is_laid_out_as_documented_and_equals_the_oracle(model_type: str) -> None:
    transformers.logging.set_verbosity_error()
    entry = examine(model_type)
    assert (entry.verdict, entry.wrong) == (LAYOUTS[model_type], "")
