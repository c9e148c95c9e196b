from __future__ import annotations

import pytest

from rlhf_core.evaluation.summary import Answered, ScoredCompletion, flat_metrics, summarise, uniformity


def completion(text: str, exact: float, form: float, reason: str = "stop") -> ScoredCompletion:
    return ScoredCompletion(text, len(text), reason, {"exact": exact, "form": form})


PROMPTS = [
    Answered("a", "sums", completion("12", 1, 0), (completion("12", 1, 1), completion("13", 0, 1))),
    Answered("b", "sums", completion("9", 0, 0.5), (completion("9", 0, 1), completion("9", 0, 1))),
    Answered("c", "words", completion("nusnu", 0, 1, "length"), (completion("sun", 0, 0), completion("nus", 1, 0))),
]


def test_metrics_of_all_prompts_and_of_each_task() -> None:
    results = summarise(PROMPTS, pass_at=(1, 2), seed=0)
    everything = results["all"]
    assert everything["prompts"] == 3
    reasons = {"length": 1, "stop": 2}
    assert everything["greedy"] == {"completions": 3, "length": 8 / 3, "blank": 0, "finish_reasons": reasons}
    assert everything["sampled"] == {"completions": 6, "length": 2.0, "blank": 0, "finish_reasons": {"stop": 6}}
    assert everything["distinct_share"] == pytest.approx((1 + 0.5 + 1) / 3)
    exact = everything["scorers"]["exact"]
    assert exact["passed"] == 1
    assert exact["pass@1"]["value"] == pytest.approx(1 / 3)  # greedy
    assert exact["sampled_pass@1"]["value"] == pytest.approx((0.5 + 0 + 0.5) / 3)
    assert exact["pass@2"]["value"] == pytest.approx(2 / 3)
    assert exact["pass@2"]["low"] <= 2 / 3 <= exact["pass@2"]["high"]
    form = everything["scorers"]["form"]
    assert form["mean_score"] == pytest.approx(0.5)
    assert form["passed"] == 1  # 0.5 is no pass
    assert list(results["tasks"]) == ["sums", "words"]
    assert results["tasks"]["sums"]["scorers"]["exact"]["pass@1"]["value"] == 0.5
    assert results["tasks"]["words"]["greedy"]["finish_reasons"] == {"length": 1}


def test_flat_metrics_name_the_other_scorers() -> None:
    metrics = flat_metrics(summarise(PROMPTS, pass_at=(1, 2), seed=0), main_scorer="exact")
    assert metrics["pass@1"] == pytest.approx(1 / 3)
    assert metrics["pass@1_low"] < 1 / 3 < metrics["pass@1_high"]
    assert metrics["form/pass@1"] == pytest.approx(1 / 3)
    assert metrics["pass@2"] == pytest.approx(2 / 3)
    assert metrics["diversity"] == pytest.approx(2.5 / 3)
    assert metrics["completion_length"] == pytest.approx(8 / 3)
    assert metrics["mean_score"] == pytest.approx(1 / 3)


def test_greedy_alone() -> None:
    alone = [Answered(p.id, p.task, p.greedy, ()) for p in PROMPTS]
    results = summarise(alone, pass_at=(1,), seed=0)
    assert results["all"]["sampled"] is None
    assert "diversity" not in flat_metrics(results, main_scorer="exact")
    with pytest.raises(ValueError, match="pass@8 needs at least 8 samples of each prompt, there are 0"):
        summarise(alone, pass_at=(1, 8), seed=0)


@pytest.mark.parametrize(
    ("greedy", "sampled", "said"),
    [
        (["", "\n\n"], [" \u200b"], "all 3 completions are blank: "),
        (["a\nb", "a\nb"], [], "all 2 completions are the same: a\\nb"),
        (["", ""], ["a"], "all 2 greedy completions are blank: "),
        (["a", "a"], ["a", "b"], "all 2 greedy completions are the same: a"),
        (["a", ""], [""], ""),
        ([""], [], ""),
    ],
)
def test_completions_without_any_difference_are_said(greedy: list[str], sampled: list[str], said: str) -> None:
    found = uniformity(greedy, sampled)
    assert found.startswith(said)
    assert bool(found) == bool(said)
