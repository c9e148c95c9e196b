"""Metrics as tables show them."""

from rlhf_core.report.formatting import compared_metrics, main_metrics, with_interval


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
