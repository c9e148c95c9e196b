"""Metrics as tables show them."""

import pytest

from rlhf_core.report.formatting import compared_metrics, main_metrics, visible, with_interval


def test_metrics_of_a_table() -> None:
    metrics = {
        "pass@1": 0.43125,
        "pass@1_low": 0.4,
        "pass@1_high": 0.46,
        "none": None,
        "rows": 12,
        "rate": 2e-5,
        "x": 1,
    }
    assert main_metrics(metrics) == "pass@1 0.431, rows 12, rate 2e-05"
    assert with_interval(metrics, "pass@1") == "0.431 (0.400–0.460)"
    assert (with_interval(metrics, "rows"), with_interval(metrics, "none"), with_interval({}, "x")) == ("12", "–", "–")
    assert compared_metrics({"base": {"a": 1, "a_low": 0}, "rl": {"a": 2, "b": 3}}) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("4", "4"),
        ("a\n\nb", "a\n⏎\nb"),
        ("a\n", "a\n⏎"),
        ("", "(empty)"),
        ("  ", "⏎"),
        ("\n", "⏎"),
        ("\n" * 6, "\n".join("⏎" * 6)),
        ("\n" * 7, "\n".join([*"⏎" * 6, "… and 1 more blank lines"])),
        ("x" + "\ny" * 20, "x" + "\ny" * 20),
    ],
)
def test_blank_lines_of_a_completion_are_seen(text: str, shown: str) -> None:
    assert visible(text) == shown
