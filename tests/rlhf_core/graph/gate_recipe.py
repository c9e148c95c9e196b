"""A recipe with a gate. Import it as tests.rlhf_core.graph.gate_recipe."""

from __future__ import annotations

from pathlib import Path

RECIPE = """
name: bot
data:
  talks: {format: conversations, source: {type: files, paths: [rows.jsonl]}, on_overlap: allow}
  held_out: {format: prompts, source: {type: files, paths: [rows.jsonl]}}
base: {source: {type: scratch, context_length: 64}}
sft: {dataset: talks, batch_size: 2, max_length: 64, optimizer: {learning_rate: 1e-3}, lora: {rank: 4}}
evaluation: &evaluation
  dataset: held_out
  samples: 0
  pass_at: [1]
  scorers: {exact: {type: verifier}, style: {type: verifier}}
  sampling: {max_tokens: 8}
  rollout: {max_length: 64}
chat: {<<: *evaluation, stage: evaluation, sampling: {max_tokens: 6}}
gate:
  candidate: sft
  baseline: base
  better: {exact: {by: 0.01}}
  not_worse: {style: {evaluation: chat, than: 0.01}}
  model: bot
report: null
"""


def write(folder: Path) -> str:
    """The path of the recipe in `folder`, with its rows."""
    (folder / "rows.jsonl").write_text('{"prompt": "What is two and two?", "completion": "four", "answer": "four"}\n')
    (folder / "bot.yaml").write_text(RECIPE)
    return str(folder / "bot.yaml")
