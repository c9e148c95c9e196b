"""A made-up run for `alignment ui --demo` and tests, with what the runs of demo.py lack: datasets of several formats,
stages side by side, attempts that were killed, preempted and stuck, and a stage that failed.
"""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from deployments.ui.demo import STARTED
from rlhf_core.artifacts.attempt import Attempt, AttemptOutcome
from rlhf_core.artifacts.manifest import ArtifactRef, Kind, Manifest, MetricValue
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.spec import StageSpec
from rlhf_core.data.reading import row_text, write_info, write_rows
from rlhf_core.pipeline.record import NodeRecord, Outcome, RunRecord, write_record
from rlhf_core.tracking.protocol import METRICS_FILE

RUN_ID = "de" * 16
PROMPTS = 45  # rows of the dataset of prompts
_BEGAN = STARTED + timedelta(days=1)
_STEPS = 12
# Seconds since the run's start: start, end, how it ended, and of these seconds those that it waited for room.
_Attempt = tuple[int, int, AttemptOutcome, int]
_EARLIER: Sequence[_Attempt] = ((-3700, -3600, "published", 0),)  # of another run
_ATTEMPTS: Mapping[str, Sequence[_Attempt]] = {
    "prompts": ((0, 6, "published", 0),), "conversations": ((0, 11, "published", 0),),
    "pairs": ((1, 8, "published", 0),), "test": ((1, 4, "published", 0),),
    "overlap.prompts": ((7, 10, "published", 0),), "base": _EARLIER, "sft": ((13, 120, "published", 4),),
    "evaluation.sft": ((140, 176, "published", 0),),
    "dpo": ((124, 180, "preempted", 0), (182, 260, "published", 25)),
    "rl": ((264, 300, "killed", 0), (303, 360, "stuck", 0), (362, 470, "published", 12)),
    "evaluation.rl": ((474, 486, "failed", 0),),
}  # fmt: skip
_REASONS = {
    "preempted": "its node was drained", "killed": "its job was killed, or its node was lost",
    "stuck": "the phase `generate` took 40 s, and 3 s before",
    "failed": "StageError: the scorer `exact` needs an answer, and row 3f2c has none",
}  # fmt: skip


def write_demo_run(repository: ArtifactRepository) -> None:
    """Publish the run `assistant`, which has failed at its last evaluation."""
    refs = {name: _ref(name) for name in [*_ATTEMPTS, "report"]}
    records = []
    for name, kind, parents, metrics, files in _results():
        inputs = {role: refs[parent] for role, parent in parents.items()}
        attempts = _attempts(name)
        manifest = Manifest(
            kind=kind, name=name, recipe="assistant", stage=refs[name].stage, key=refs[name].key, files=(),
            parents=inputs, user_files={}, pins={}, config={}, seed=0, metrics=metrics, code_revision="demo",
            libraries={}, device_seconds=sum(each.device_seconds for each in attempts), attempts=attempts,
            device="cpu", started_at=attempts[-1].started_at, finished_at=attempts[-1].seen_at,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            _write(Path(folder), files)
            repository.publish(manifest, Path(folder))
        outcome: Outcome = "reused" if name == "base" else "computed"
        records.append(_record(name, outcome, metrics=metrics))
    failed = {"model": refs["rl"], "dataset": refs["test"]}
    repository.write_spec(
        StageSpec(
            name="evaluation.rl", stage="evaluation", stage_version=1, key=refs["evaluation.rl"].key, config={},
            inputs=failed, user_files={}, seed=0, libraries={},
        )
    )  # fmt: skip
    records += [_record("evaluation.rl", "failed", error=_REASONS["failed"]), _record("report", "not run")]
    record = RunRecord(
        run_id=RUN_ID, recipe={"name": "assistant", "seed": 0}, overrides=(), started_at=_BEGAN,
        finished_at=_BEGAN + timedelta(seconds=488), nodes=tuple(records),
    )  # fmt: skip
    write_record(repository.store, record)


def _record(name: str, outcome: Outcome, **fields: Any) -> NodeRecord:
    return NodeRecord(name=name, ref=_ref(name), outcome=outcome, attempts=_attempts(name), **fields)


def _ref(name: str) -> ArtifactRef:
    stages = {"prompts": "dataset", "conversations": "dataset", "pairs": "dataset", "test": "dataset"}
    stage = stages.get(name, name.partition(".")[0])
    return ArtifactRef(stage=stage, key=hashlib.sha256(f"assistant {name}".encode()).hexdigest())


def _attempts(name: str) -> tuple[Attempt, ...]:
    return tuple(
        Attempt(
            id=f"{name} {number}", run_id=RUN_ID if start >= 0 else "an earlier run", host="node-1", device="cpu",
            gpus=0, cores=2, started_at=_BEGAN + timedelta(seconds=start), seen_at=_BEGAN + timedelta(seconds=end),
            outcome=outcome, waited=waited, reason=_REASONS.get(outcome, ""),
        )
        for number, (start, end, outcome, waited) in enumerate(_ATTEMPTS.get(name, ()))
    )  # fmt: skip


_Result = tuple[str, Kind, Mapping[str, str], dict[str, MetricValue], Mapping[str, Any]]


def _results() -> Iterator[_Result]:
    """Yield name, kind, parents, metrics and files of each stage; of a dataset its rows and its info."""
    for name, (rows, info) in _datasets().items():
        metrics: dict[str, MetricValue] = {"rows": len(rows), "read": info["sources"][0]["read"]}
        yield name, Kind.DATASET, {"exclude.test": "test"} if name == "prompts" else {}, metrics, {"": (rows, info)}
    overlap = {"dataset": "prompts", "held_out.test": "test"}
    yield "overlap.prompts", Kind.REPORT, overlap, {}, {"overlap.json": {"held_out": ["test"]}}
    yield "base", Kind.BASE_MODEL, {}, {}, {"config.json": {}}
    sft = {"model": "base", "dataset": "conversations"}
    counts: dict[str, MetricValue] = {"loss": 0.8, "rows_read": 12, "rows_dropped_too_long": 1}
    yield "sft", Kind.POLICY, sft, counts, {"config.json": {}}
    yield "evaluation.sft", Kind.EVALUATION, {"model": "sft", "dataset": "test"}, {"exact": 0.4}, _EVALUATED
    yield "dpo", Kind.POLICY, {"model": "sft", "dataset": "pairs"}, {"accuracy": 0.7}, {"config.json": {}}
    draw = random.Random(0)
    lines = [
        {
            "step": step, "time": float(step), "reward": step / _STEPS, "seconds/generate": 5 + draw.random(),
            "seconds/score": 0.5, "seconds/train": 2 + draw.random() / 2, "seconds/publish": 0.3,
        }
        for step in range(_STEPS)
    ]  # fmt: skip
    rl = {"model": "dpo", "dataset": "prompts", "reference": "sft"}
    yield "rl", Kind.POLICY, rl, {"reward": 0.9}, {METRICS_FILE: "".join(json.dumps(line) + "\n" for line in lines)}


_COMPLETION = {"text": "4", "finish_reason": "stop", "scores": {"exact": 1.0}}
_EVALUATED = {
    "samples.jsonl": json.dumps({"id": "a", "prompt": "2 + 2 =", "answer": "4", "completions": [_COMPLETION]}) + "\n"
}


def _datasets() -> Mapping[str, tuple[list[dict[str, Any]], dict[str, Any]]]:
    prompts = [
        {"prompt": [{"role": "user", "content": f"{n} + {2 * n} ="}], "answer": str(3 * n), "task": "sums"}
        for n in range(PROMPTS)
    ]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 17, "b": 25}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    conversations: list[dict[str, Any]] = [
        {
            "messages": [
                {"role": "system", "content": "Use the tool for sums."},
                {"role": "user", "content": "What is 17 + 25?"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "42", "name": "add"},
                {"role": "assistant", "content": "It is 42.", "reasoning_content": "The tool says 42."},
            ],
            "tools": tools,
        },
        *(
            {
                "messages": [
                    {"role": "user", "content": f"Tell me about the number {n}."},
                    {"role": "assistant", "content": f"{n} is {'even' if n % 2 == 0 else 'odd'}.\n\n" * 3},
                ]
            }
            for n in range(11)
        ),
    ]
    pairs = [
        {"prompt": [{"role": "user", "content": f"Is {n} even?"}], "chosen": "Yes." if n % 2 == 0 else "No.",
         "rejected": "I would rather not say.", "margin": 0.5}
        for n in range(6)
    ]  # fmt: skip
    test = [{"prompt": [{"role": "user", "content": f"{n} + 1000 ="}], "answer": str(n + 1000)} for n in range(8)]
    dropped = {"bad_rows": 2, "excluded": 3, "duplicates": 4, "near_duplicates": 0, "not_drawn": 0, "over_limit": 0}
    bad = {"rows": 2, "reasons": {"there is no column `prompt`": 2}, "examples": ["sums.jsonl line 7: no `prompt`"]}
    near = {
        "policy": "report", "threshold": 0.8, "rows": 1, "near_excluded": 0,
        "examples": [{"row": "12 + 24 =", "resembles": "12 +  24 ="}],
    }  # fmt: skip
    found = {"dropped": dropped, "bad_rows": bad, "near_duplicates": near, "tasks": {"sums": PROMPTS}}
    return {
        "test": (test, _info("prompts", test)),
        "prompts": (prompts, _info("prompts", prompts, read=PROMPTS + 7) | found),
        "conversations": (conversations, _info("conversations", conversations)),
        "pairs": (pairs, _info("preferences", pairs)),
    }  # fmt: skip


def _info(row_format: str, rows: Sequence[Any], read: int | None = None) -> dict[str, Any]:
    source = {"type": "files", "paths": ["sums.jsonl"]}
    read = len(rows) if read is None else read
    return {"format": row_format, "sources": [{"source": source, "read": read, "used": len(rows), "repeated": 0}]}


def _write(folder: Path, files: Mapping[str, Any]) -> None:
    for path, content in files.items():
        if not path:
            rows, info = content
            with_ids = [{"id": hashlib.sha256(row_text(row).encode()).hexdigest()[:16], **row} for row in rows]
            write_rows(folder, ((row["id"], row_text(row)) for row in with_ids))
            write_info(folder, info)
        elif isinstance(content, str):
            (folder / path).write_text(content, encoding="utf-8")
        else:
            (folder / path).write_text(json.dumps(content), encoding="utf-8")
