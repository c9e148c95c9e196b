"""A small recipe as text, its last section `rl`, so that more can be appended to it or after it."""

RECIPE = """
name: small
data:
  talks:
    format: conversations
    source: {type: files, paths: [talks.jsonl]}
  questions:
    format: prompts
    source: {type: function, path: tasks.py, function: questions}
base:
  source: {type: scratch, hidden_size: 64}
rl:
  algorithm: grpo
  dataset: questions
  steps: 10
  prompts_per_step: 4
  sampling: {max_tokens: 8}
  rollout: {max_length: 64}
  grpo:
    rewards: {own: {type: function, path: reward.py}}
    optimizer: {learning_rate: 1e-4}
"""
