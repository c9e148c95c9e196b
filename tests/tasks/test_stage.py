"""What a stage's job is submitted with."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.config.loading import load_recipe
from rlhf_core.pipeline.graph import build_graph
from tasks.stage import RunSettings, _request

RECIPE = """
name: r
data: {d: {format: prompts, source: {type: files, paths: [d.jsonl]}}}
base: {source: {type: scratch}}
rl:
  algorithm: grpo
  dataset: d
  steps: 1
  prompts_per_step: 1
  sampling: {max_tokens: 8}
  rollout: {max_length: 64}
  grpo:
    rewards: {judge: {type: http, url_variable: JUDGE_URL, header_variable: JUDGE_HEADER}}
    optimizer: {learning_rate: 1e-3}
"""


def test_a_job_gets_the_variables_that_its_config_names_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("JUDGE_URL", "JUDGE_HEADER", "ANOTHER", "HF_TEST"):
        monkeypatch.setenv(name, f"of {name}")
    (tmp_path / "d.jsonl").write_text("{}\n", encoding="utf-8")
    (tmp_path / "r.yaml").write_text(RECIPE, encoding="utf-8")
    graph = build_graph(load_recipe(str(tmp_path / "r.yaml")), {})
    settings = RunSettings("run", "store", tmp_path, 0, {}, {})
    environment = _request(graph["rl"], settings).environment
    assert environment["JUDGE_URL"] == "of JUDGE_URL"
    assert environment["JUDGE_HEADER"] == "of JUDGE_HEADER"
    assert "ANOTHER" not in environment
    others = _request(graph["base"], settings).environment
    assert others["HF_TEST"] == "of HF_TEST"
    assert "JUDGE_URL" not in others
