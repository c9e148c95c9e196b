"""Write the tables of docs/reference/{results,benchmarks}.md from benchmarks/results/: `python -m benchmarks.report`.

A row names its measurements and the text around their figures. `{grpo:.3f}` is a figure, or its list, a value a seed or
a precision; `{ours[memory_mib]:,.0f and}` joins the values of a list by "and". Bold are values that are significant, or
with `>1` or `<1` at the end those that are better than what they are compared with.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.record import Measurement, read

DOCS = Path(__file__).resolve().parents[1] / "docs" / "reference"
NOTICE = "written by `python -m benchmarks.report` from benchmarks/results/"
BEGIN, END = f"<!-- from here {NOTICE} -->", f"<!-- until here {NOTICE} -->"
UNKNOWN = "not recorded"
_SPEC = re.compile(r"(?P<number>[^ ]*)(?: (?P<joiner>and|to))?(?: (?P<bold>[<>]1))?")


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    measurements: tuple[str, ...]  # names of files; the figures of several are joined into lists
    text: str
    measure: str = ""  # of a recipe's result


def row(what: str, measurements: str, text: str, measure: str = "") -> Row:
    return Row(what, tuple(measurements.split()), text, measure)


RESULTS = (
    row("`tiny`: SFT → GRPO, 40 steps", "tiny", "{sft:.3f} → {rl:.3f}", "exact"),
    row("`tiny` with PPO, a reward model of pairs", "tiny-preference", "{sft:.3f} → {ppo:.3f}", "preferred"),
    row("… DPO on the same pairs", "tiny-preference", "{sft:.3f} → {dpo:.3f}", "preferred"),
    row("… KTO on labels of one side", "tiny-preference", "{sft:.3f} → {kto:.3f}", "preferred"),
    row(
        "`tiny-losses`: 11 other preference losses", "tiny-losses",
        "{sft:.3f} → {most[preferred]:.3f to} in {most[models]} of {models} models, {other[preferred]:.3f} in one",
        "preferred",
    ),
    row("`tiny-best-of-n`: SFT on its own best answers", "tiny-best-of-n", "{sft:.3f} → {again:.3f}", "exact"),
    row("`tiny-online-dpo`: DPO on its own answers", "tiny-online-dpo", "{sft:.3f} → {dpo:.3f}", "exact"),
    row(
        "`tiny-conditional`, prompted for a right answer", "tiny-conditional", "{sft:.3f} → {conditional_sft:.3f}",
        "exact",
    ),
    row(
        "`tiny-distillation`, from demonstrations and a teacher", "tiny-distillation",
        "teacher: {rl:.3f}; student: {distilled:.3f}", "exact",
    ),
    row("… from its own samples and a teacher", "tiny-distillation", "SFT: {sft:.3f} → {on_policy:.3f}", "exact"),
    row("`tiny-self-distillation`", "tiny-self-distillation", "{sft:.3f} → {self_taught:.3f}", "exact"),
    row("`tiny-process`: GRPO by a process reward model", "tiny-process", "{sft:.3f} → {rl:.3f}", "exact word"),
    row("`tiny-ratings`: PPO by a reward model of ratings", "tiny-ratings", "{sft:.3f} → {rl:.3f}", "preferred"),
    row(
        "`tiny-merge`: the mean of a GRPO and a DPO model", "tiny-merge", "GRPO: {rl:.3f}; mean: {mean:.3f}",
        "both at once, sampled",
    ),
    row(
        "`tiny-loop`: rounds of DPO behind a gate", "tiny-loop", "{sft:.3f} → {last_accepted:.3f}",
        "exact, last accepted",
    ),
    row(
        "`tiny`, 8 RL algorithms, 60 steps", "tiny-algorithms",
        "{sft:.3f} → {least_and_most[seed_0]:.3f to}, {least_and_most[seed_1]:.3f to}, {least_and_most[seed_2]:.3f to}",
        "exact",
    ),
    row("`tiny-game`: an environment of several turns", "tiny-game", "{sft:.3f} → {rl:.3f}", "{items} games won"),
    row("`tiny-tools`: a Python tool", "tiny-tools", "{sft:.3f} → {rl:.3f}", "{items} products"),
    row("`tiny-agent`: a program over the OpenAI API", "tiny-agent", "{sft:.3f} → {rl:.3f}", "{items} words"),
    row("`tiny-vision`: squares in a picture", "tiny-vision", "{sft:.3f} → {rl:.3f}", "{items} pictures"),
    row(
        "`smollm2` (135 M, LoRA): SFT, then GRPO, seed 0", "smollm2",
        "base {base:.3f} → SFT {sft:.3f} → GRPO {rl:.3f}, {rl_gain:+.3f} ({rl_gain_interval:+.3f to})",
        "exact, {items} items",
    ),
    row(
        "`smollm2-best-of-n`, seed 0", "smollm2-best-of-n", "base {base:.3f} → SFT {sft:.3f} → {again:.3f}",
        "exact, {items} items",
    ),
    row(
        "`smollm2-dpo`, seed 0", "smollm2-dpo", "{before:.3f} → {after:.3f}",
        "chosen has the higher reward, {items} held-out pairs",
    ),
)  # fmt: skip

BENCHMARKS = (
    row(
        "SFT on one GPU, Qwen3-0.6B's shape, 16 sequences of 1,024", "gpu",
        "{sft-long[tokens_per_second]:,.0f} tokens a second, MFU {sft-long[mfu]:.1%}, {sft-long[peak_gib]:.1f} GiB",
    ),
    row(
        "GRPO update on one GPU, 8 prompts of 2,048 with 8 completions of 256", "gpu",
        "{grpo-tree[tokens_per_second]:,.0f} tokens a second; TRL {grpo-trl[tokens_per_second]:,.0f} and "
        "{grpo-trl-bf16-weights[tokens_per_second]:,.0f}: {grpo-tree[of_trl]:.1f and >1} times",
    ),
    row(
        "… for a model without a correct tree", "gpu",
        "{grpo-packed[tokens_per_second]:,.0f}: {grpo-packed[of_trl]:.2f and >1} times TRL",
    ),
    row("`make demo`: install done, empty store to the report", "demo", "{seconds:min and}"),
    row("GRPO against TRL, equal lengths, 25 M", "grpo-25m", "{25m[of_trl]:.2f and >1} times the tokens a second"),
    row("… 1 M", "grpo-1m", "{1m[of_trl]:.2f and >1} times"),
    row("… 135 M, 2 prompts", "grpo-135m", "{135m[of_trl]:.2f and >1} times"),
    row("… ragged lengths, 25 M, completions of mean 64", "grpo-25m-ragged", "{25m[of_trl]:.1f and >1} times"),
    row("… ragged lengths, 135 M, completions of mean 28", "grpo-135m-ragged", "{135m[of_trl]:.1f and >1} times"),
    row(
        "Memory of GRPO against TRL, equal lengths, 25 M", "memory-grpo-25m",
        "{25m[ours][memory_of_trl]:.2f and <1}; with selective checkpointing "
        "{25m[ours-selective][memory_of_trl]:.2f and <1}",
    ),
    row("… of SFT, 25 M", "memory-sft-25m", "{25m[ours][memory_of_trl]:.2f and <1}"),
    row(
        "… of GRPO at 1 M, where processes outweigh the model", "memory-grpo-1m",
        "{1m[ours][memory_of_trl]:.1f <1}, float32",
    ),
    row("DPO against TRL, 25 M", "dpo-25m", "{25m[of_trl]:.2f and >1} times the pairs a second"),
    row("SFT against TRL, 25 M", "sft-25m", "{25m[of_trl]:.2f and >1} times the tokens a second"),
    row(
        "A tree of shared tokens against padded rows, 8 groups of 8, 25 M", "layouts-float32 layouts-bfloat16",
        "{8 groups of 8[speed]:.1f and >1} times as fast",
    ),
    row(
        "Sampling beside training, `max_lag: 1`, seeds 0 to 2", "asynchronous",
        "the same reward in {lag 1[time_to_reward_of_rounds]:.2f <1} of the time",
    ),
    row(
        "Episodes of 1 to 8 turns that need not repeat to the bit", "episodes",
        "{1 to 8 turns[concurrent][speed]:.2f >1} times the tokens a second; "
        "slow environments {1 to 8 turns, slow environment[concurrent][speed]:.2f >1}",
    ),
    row(
        "Compiled layers, float32, a run and one with cached code", "compiling-1 compiling-2",
        "{speed:.2f and >1} times as fast, after a first pass of {first_pass_seconds:.1f and} s",
    ),
    row(
        "Log-probs in chunks, 2,048 x 32,000, float32", "logprobs",
        "{2048 x 32000[float32][train][chunked][mib]:,.0f} MiB in place of "
        "{2048 x 32000[float32][train][plain][mib]:,.0f}; {2048 x 32000[float32][train][chunked][seconds]:.2f} s in "
        "place of {2048 x 32000[float32][train][plain][seconds]:.2f}",
    ),
    row(
        "Divergences in chunks, forward KL", "divergence",
        "{2048 x 32000[float32][forward_kl][memory_of_whole]:.2f <1} of the memory, "
        "{2048 x 32000[float32][forward_kl][processor_of_whole]:.1f} times the processor time",
    ),
    row(
        "Ranks that share tokens: 1, 2 and 4", "sequence-parallel",
        "{8 heads, one of 1,024[ranks 1][mib]:.0f}, {8 heads, one of 1,024[ranks 2][mib]:.0f} and "
        "{8 heads, one of 1,024[ranks 4][mib]:.0f} MiB of activations a rank; "
        "{8 heads, one of 1,024[ranks 1][processor_seconds]:.1f}, "
        "{8 heads, one of 1,024[ranks 2][processor_seconds]:.1f} and "
        "{8 heads, one of 1,024[ranks 4][processor_seconds]:.1f} CPU seconds",
    ),
    row(
        "Memory of 4 ranks that are replicas, share tokens, share weights, 57 M, ZeRO 2", "parallelism",
        "{4x1x1/2[mib]:.0f}, {1x4x1/2[mib]:.0f} and {1x1x4/2[mib]:.0f} MiB a rank; of one {1x1x1/2[mib]:.0f}",
    ),
    row("Training paused for a checkpoint of {megabytes:.0f} MB", "checkpoint", "{paused_milliseconds:.0f} ms"),
    row(
        "A publish with its proof, 25 M, float32", "publish",
        "{25m[float32][seconds]:.3f} s; with all weights read back {25m[float32][read_whole_seconds]:.3f} s",
    ),
    row(
        "Publishes of 1 GiB on one node, in the time of the folder", "publish-transports",
        "`ipc` {ipc[of_folder]:.2f <1}; `collective` {collective[of_folder]:.2f <1}",
    ),
    row("… between two nodes", "publish-nodes", "`collective` {collective[of_folder]:.2f <1}"),
    row(
        "Loading under ZeRO 3 on 2 ranks, {weights_mib:.0f} MiB of weights", "loading",
        "peak of {divided[peak_mib]:.0f} MiB in place of {whole[peak_mib]:.0f}",
    ),
    row(
        "… {weights_mib:,.0f} MiB", "loading-1b",
        "peak of {divided[peak_mib]:,.0f} MiB in place of {whole[peak_mib]:,.0f}",
    ),
    row(
        "Merging an adapter into {weights_mib:.0f} MiB", "merging",
        "peak of {by tensors[peak_mib]:,.0f} MiB; by peft {whole[peak_mib]:,.0f}",
    ),
    row(
        "Planned memory of a worker of SFT, 135 M, all weights and LoRA, ZeRO 0, 2 and 3", "plan-memory-135m",
        "{lowest and highest[planned_of_peak]:.2f to} of the peak",
    ),
    row("… 300 M", "plan-memory-300m", "{lowest and highest[planned_of_peak]:.2f to} of the peak"),
    row(
        "… 25 M, without ZeRO 3", "plan-memory", "{without ZeRO 3[planned_of_peak]:.2f to} of the peak"
    ),
    row(
        "A dataset of {rows:,} texts, near-duplicates counted", "data",
        "{and count near-duplicates[processor_seconds]:,.0f} CPU seconds, "
        "{and count near-duplicates[memory_mib]:,.0f} MiB",
    ),
    row(
        "From a file of {rows:,} rows to packed batches: read, tokenise, pack", "data-to-batches",
        "{ours[processor_seconds]:,.0f} CPU seconds, {ours[memory_mib]:,.0f} MiB",
    ),
    row(
        "The driver's work for a step of 16 million tokens, GRPO", "driver",
        "{grpo[processor_seconds]:.2f} CPU seconds, peak of {grpo[peak_gib]:.2f} GiB",
    ),
    row(
        "Formulas of a step against runs, 1 and 2 ranks and engines", "step-model",
        "{equal[ranks 1, engines 1][predicted_of_measured]:.2f} and "
        "{equal[ranks 2, engines 2][predicted_of_measured]:.2f} of the measured time; ragged lengths "
        "{ragged[ranks 1, engines 1][predicted_of_measured]:.2f} and "
        "{ragged[ranks 2, engines 2][predicted_of_measured]:.2f}",
    ),
    row("512 bundles reserved on 64 simulated nodes", "placement", "{512 bundles[median_seconds]:.2f} s, median"),
    row(
        "A reward server under load, one of two workers killed", "reward-server",
        "{answered:,} of {texts:,} texts answered, {texts_per_second:.0f} a second",
    ),
)  # fmt: skip


class Figure:
    """One value, or the values of seeds or precisions, which a row's text formats."""

    def __init__(self, values: Sequence[float], significant: Sequence[bool]):
        self._values, self._significant = values, significant

    def __format__(self, spec: str) -> str:
        parsed = _SPEC.fullmatch(spec)
        if parsed is None:
            raise ValueError(f"`{spec}` is no format of a figure: write a number's, then and, to, >1 or <1")
        shown = [_number(value, parsed["number"]) for value in self._values]
        joiner = f" {parsed['joiner']} " if parsed["joiner"] else ", "
        parts = []
        for is_bold, run in groupby(zip(shown, self._bold(parsed["bold"]), strict=True), key=lambda each: each[1]):
            text = joiner.join(value for value, _ in run)
            parts.append(f"**{text}**" if is_bold else text)
        return joiner.join(parts)

    def _bold(self, rule: str | None) -> Sequence[bool]:
        if rule is None:
            return self._significant
        return [value > 1 if rule == ">1" else value < 1 for value in self._values]


def _number(value: float, spec: str) -> str:
    if spec == "min":
        return f"{value // 60:.0f} min {value % 60:.0f} s"
    if spec.endswith("%"):
        return f"{value:{spec}}".replace("%", " %")
    return str(value) if spec == ".3f" and value in (0, 1) else f"{value:{spec}}"


def figures(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Return what the texts format: the figures of all measurements, those of the same name side by side."""
    return _joined([each.figures for each in measurements], measurements[0].significant, "")


def _joined(
    values: Sequence[Mapping[str, Any]], significant: Mapping[str, Sequence[bool]], place: str
) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for name in values[0]:
        parts = [each[name] for each in values]
        if isinstance(parts[0], dict):
            joined[name] = _joined(parts, significant, f"{place}{name}.")
        else:
            flat = [value for part in parts for value in (part if isinstance(part, list) else [part])]
            joined[name] = Figure(flat, significant.get(f"{place}{name}", [False] * len(flat)))
    return joined


def source(measurements: Sequence[Measurement], links: dict[str, int], *, with_machine: bool) -> str:
    """Return the cell that says where the figures are from, a link to the lab if it has them.

    links: the number of each place in the lab, to which new ones are added; a row of the table is shorter without them.
    """
    first = measurements[0]
    commit = first.commit or f"commit {UNKNOWN}"
    text = f"{first.machine or f'machine {UNKNOWN}'}, {commit}" if with_machine else commit
    return f"[{text}][{links.setdefault(first.lab, len(links) + 1)}]" if first.lab else text


def table(rows: Sequence[Row], head: Sequence[str], *, with_machine: bool) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    before, links = "", dict[str, int]()
    for each in rows:
        measurements = [read(name) for name in each.measurements]
        texts = [each.what, each.measure, each.text] if each.measure else [each.what, each.text]
        cells = [text.format_map(figures(measurements)) for text in texts]
        place = source(measurements, links, with_machine=with_machine)
        lines.append(f"| {' | '.join(cells)} | {'the same' if place == before else place} |")
        before = place
    if links:
        lines += ["", *(f"[{number}]: ../lab/{place}" for place, number in links.items())]
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """Return the text of both pages, with the tables of now between their marks."""
    results = table(
        RESULTS, ("recipe or method", "measure", "before → after, one value a seed", "commit"), with_machine=False
    )
    benchmarks = table(BENCHMARKS, ("what", "figure", "machine and commit"), with_machine=True)
    tables = {DOCS / "results.md": results, DOCS / "benchmarks.md": benchmarks}
    return {page: _filled(page.read_text(encoding="utf-8"), new) for page, new in tables.items()}


def _filled(page: str, new: str) -> str:
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise LookupError(f"a page lacks its marks: {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{new}\n{END}{after}"


def main() -> int:
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
