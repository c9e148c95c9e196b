"""Imported by the process of which `forked_children.FORKS` are forks."""

from rlhf_core.warm.preloading import preload

preload((
    "deepspeed",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.entrypoints.openai.chat_completion.protocol",
    "vllm.tool_parsers.hermes_tool_parser",
    "rlhf_core.rl.worker",
    "rlhf_core.rollout.child_engine",
    "rlhf_core.rollout.vllm.engine",
    "rlhf_core.rollout.vllm.tool_calls",
    "rlhf_core.stages.sft",
))  # fmt: skip

from tests import known_layouts  # noqa: E402 (which loads torch)

known_layouts.remember()
