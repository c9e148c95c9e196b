"""Table of data formats. A new one is a file in rlhf_core/data/formats, and one line here."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_core.config.plugins import Table
from rlhf_core.errors import did_you_mean


@dataclass(frozen=True, slots=True)
class FormatEntry:
    implementation: str  # "package.module:Class", a data.formats.base.Format; imported only where rows are read
    truncation_problem: str = ""  # why a row may not be cut at its end; empty: it may


FORMATS: Table[FormatEntry] = Table("formats", FormatEntry, {
    "text": FormatEntry("rlhf_core.data.formats.text:Text"),
    "conversations": FormatEntry("rlhf_core.data.formats.conversations:Conversations"),
    "preferences": FormatEntry("rlhf_core.data.formats.preferences:Preferences"),
    "unpaired": FormatEntry("rlhf_core.data.formats.unpaired:Unpaired"),
    "completions": FormatEntry(
        "rlhf_core.data.formats.completions:Completions", "a completion that is cut has another reward"
    ),
    "stepwise": FormatEntry(
        "rlhf_core.data.formats.stepwise:Stepwise", "a completion that is cut ends in the middle of a step"
    ),
    "reward_bench": FormatEntry(
        "rlhf_core.data.formats.reward_bench:RewardBench", "a completion that is cut has another reward"
    ),
    "prompts": FormatEntry("rlhf_core.data.formats.prompts:Prompts", "a prompt that is cut asks another question"),
})  # fmt: skip


def known_format(name: str) -> str:
    """Return `name`. Raises ValueError, with the nearest name, if there is no such format."""
    if name not in FORMATS:
        raise ValueError(f"there is no format `{name}`{did_you_mean(name, FORMATS)}; there are {', '.join(FORMATS)}")
    return name
