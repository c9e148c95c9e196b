"""The two stages that make a recipe a round: its prompts, and its verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages.loop import GateConfig, RoundConfig, RoundPromptsConfig
from rlhf_core.contract import Input, Output
from rlhf_core.data.reading import read_rows, row_policy, write_dataset
from rlhf_core.errors import StageError
from rlhf_core.stages import round as round_stage
from rlhf_core.stages import round_prompts
from tests.rlhf_core.stages.context import LocalContext, local_input

pytestmark = pytest.mark.parts


def prompts(folder: Path, *questions: str) -> Input:
    rows = [{"id": f"id-{q}", "prompt": [{"role": "user", "content": q}]} for q in questions]
    write_dataset(folder, rows, {"format": "prompts", "on_long_row": "drop"})
    return local_input(folder, Kind.DATASET)


class Loop:
    """Rounds of prompts, one after the other."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.made: list[Input] = []
        self.stored = True  # the rounds before the last one are in the store

    def take(self, dataset: Input, count: int) -> Output:
        number = len(self.made)
        context = LocalContext(self.folder / f"work{number}", name="round_prompts")
        context.artifacts = {made.manifest.ref.path: made for made in self.made if self.stored}
        inputs = {"dataset": dataset, **({"previous": self.made[-1]} if self.made else {})}
        previous = "previous_prompts" if self.made else None
        output = round_prompts.run(RoundPromptsConfig(dataset="d", previous=previous, count=count), inputs, context)
        parents = {"previous": self.made[-1].manifest.ref} if self.made else {}
        ref = {"stage": "round_prompts", "key": f"{number}" * 64, "parents": parents}
        self.made.append(Input(local_input(output.folder, Kind.DATASET).manifest.model_copy(update=ref), output.folder))
        return output


def asked(output: Output) -> list[str]:
    return [row["prompt"][0]["content"] for row in read_rows(output.folder)]


def test_no_prompt_is_used_twice_also_where_the_dataset_has_changed(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    dataset = prompts(tmp_path / "d", "a", "b", " a", "c", "d", "e")
    first = loop.take(dataset, 2)
    assert asked(first) == ["a", "b"]
    assert first.metrics == {"rows": 2, "used_before": 0}
    assert row_policy(first.folder) == row_policy(dataset.folder)
    assert asked(loop.take(dataset, 2)) == ["c", "d"]
    assert asked(loop.take(prompts(tmp_path / "more", "f", "d", "a  ", "e", "g"), 3)) == ["f", "e", "g"]
    with pytest.raises(StageError) as raised:
        loop.take(dataset, 1)
    assert str(raised.value) == (
        "a round needs 1 prompts that no earlier one had, and 0 are left after 7 were used: add rows to the loop's "
        "dataset, or lower loop.prompts_per_round"
    )


def test_a_round_needs_the_prompts_of_the_last_one_only(tmp_path: Path) -> None:
    """Those of all before it may be gone from the store."""
    loop = Loop(tmp_path)
    loop.stored = False
    dataset = prompts(tmp_path / "d", "a", "b", "c", "d")
    assert [asked(loop.take(dataset, 1)) for _ in range(4)] == [["a"], ["b"], ["c"], ["d"]]


def test_rounds_of_a_release_that_listed_no_used_prompts_are_read_one_by_one(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    dataset = prompts(tmp_path / "d", "a", "b", "c", "d")
    for _ in range(2):
        (loop.take(dataset, 1).folder / round_prompts.USED_FILE).unlink()
    assert [asked(loop.take(dataset, 1)) for _ in range(2)] == [["c"], ["d"]]


def evaluation(folder: Path, scores: list[float]) -> Input:
    folder.mkdir()
    rows = [
        {"id": str(i), "completions": [{"scores": {"exact": score, "form": 0.0}}]} for i, score in enumerate(scores)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return local_input(folder, Kind.EVALUATION)


def verdict(folder: Path, margin: float, before: list[float], after: list[float]) -> Output:
    names = dict.fromkeys(("accepted", "candidate", "prompts", "accepted_evaluation", "candidate_evaluation"), "x")
    inputs = {
        "accepted_evaluation": evaluation(folder / "before", before),
        "candidate_evaluation": evaluation(folder / "after", after),
    }
    config = RoundConfig(gate=GateConfig(margin=margin), **names)
    return round_stage.run(config, inputs, LocalContext(folder / "work", name="round"))


HALF = [1.0, 0.0] * 50


@pytest.mark.parametrize(
    ("margin", "before", "after", "accepted"),
    [
        (0.0, HALF, [1.0] * 100, 1),  # surely better
        (0.0, HALF, HALF, 0),  # not worse on these prompts, but it could be on others
        (0.04, HALF, HALF, 1),  # by at most 3.7 points
        (0.0, [1.0] * 100, HALF, 0),
        (-0.3, HALF, [1.0] * 100, 1),  # must be better by 0.3, and is by 0.4 at least
        (-0.45, HALF, [1.0] * 100, 0),
    ],
)
def test_a_candidate_is_accepted_if_the_interval_says_so(
    tmp_path: Path, margin: float, before: list[float], after: list[float], accepted: int
) -> None:
    output = verdict(tmp_path, margin, before, after)
    assert (output.kind, output.metrics["accepted"]) == (Kind.ROUND, accepted)


@pytest.mark.parametrize(("start_margin", "accepted"), [(0.6, 1), (0.5, 0)])
def test_a_candidate_that_is_as_good_as_the_last_one_must_not_be_far_below_the_start(
    tmp_path: Path, start_margin: float, accepted: int
) -> None:
    """The lower end is -0.5 less the half width of the interval, 0.1."""
    names = ("accepted", "candidate", "prompts", "accepted_evaluation", "candidate_evaluation", "start_evaluation")
    scores = {"accepted_evaluation": HALF, "candidate_evaluation": HALF, "start_evaluation": [1.0] * 100}
    inputs = {name: evaluation(tmp_path / name, of_model) for name, of_model in scores.items()}
    gate = GateConfig(margin=0.04, start_margin=start_margin)
    output = round_stage.run(
        RoundConfig(gate=gate, **dict.fromkeys(names, "x")), inputs, LocalContext(tmp_path / "work", name="round")
    )
    assert (output.metrics["accepted"], output.metrics["difference"]) == (accepted, 0.0)
    assert output.metrics["difference_to_start"] == -0.5
    assert "; against the loop's start, exact, greedy: -0.500 (" in str(output.metrics["reason"])


def test_the_reason_has_the_figures(tmp_path: Path) -> None:
    assert verdict(tmp_path, 0.04, HALF, HALF).metrics["reason"] == (
        "exact, greedy: +0.000 (-0.037 to +0.037) on 100 prompts; the lower end is at least -0.040"
    )


def test_evaluations_of_other_prompts_are_no_verdict(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="round: the two evaluations have different prompts"):
        verdict(tmp_path, 0.0, HALF, [1.0] * 3)
