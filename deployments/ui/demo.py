"""A made-up store, for `alignment ui --demo`, tests and measurements: runs of RL on sums of two numbers."""

from __future__ import annotations

import hashlib
import json
import math
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rlhf_core.artifacts.aliases import Evidence
from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.artifacts.logged_rollouts import (
    KEPT_ROLLOUTS,
    Histogram,
    LoggedCompletion,
    LoggedGroup,
    LoggedSequence,
    LoggedStep,
    encode_step,
    rollouts_file,
)
from rlhf_core.artifacts.manifest import ArtifactRef, Kind, Manifest, MetricValue
from rlhf_core.artifacts.promotion import propose
from rlhf_core.artifacts.registry import move_alias
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.rounds import RoundEnd, Rounds
from rlhf_core.contract import Input
from rlhf_core.evaluation.intervals import wilson
from rlhf_core.evaluation.verdict import Criterion, Verdict, judge
from rlhf_core.pipeline.record import NodeRecord, RunRecord, write_record
from rlhf_core.report.rollouts import mean_ratio
from rlhf_core.tracking.protocol import METRICS_FILE, SAMPLES_FILE, VERDICT_FILE

STARTED = datetime(2026, 11, 1, 9, tzinfo=UTC)
_EVALUATED = 40  # prompts
_MARGIN = 0.5  # by which a candidate may seem worse
_Result = tuple[Manifest, Mapping[str, bytes]]  # with its files


def write_demo(
    repository: ArtifactRepository, *, runs: int = 3, steps: int = 20, prompts: int = 4, completions: int = 4
) -> None:
    """Publish runs whose rewards rise with the learning rate, and aliases of their models; the last one waits for a
    person."""
    champion: ArtifactRef | None = None
    accepted: list[_Result] = []  # model and its evaluation
    for number in range(runs):
        results = list(_results(number, steps, prompts, completions))
        for manifest, files in results:
            _publish(repository, manifest, files)
        record = RunRecord(
            run_id=_run_id(number),
            recipe={"name": "sums", "seed": number, "rl": results[1][0].config},
            overrides=(f"seed={number}",), tags=("nightly", "baseline") if number == 0 else ("nightly",),
            started_at=results[0][0].started_at, finished_at=results[-1][0].finished_at,
            nodes=tuple(
                NodeRecord(
                    name=made.name, ref=made.ref, outcome="computed", seconds=60.0, metrics=made.metrics,
                    attempts=made.attempts,
                )
                for made, _ in results
            ),
        )  # fmt: skip
        write_record(repository.store, record)
        accepted = _round(repository, number, accepted or [results[0], results[2]], results)
        model = results[1][0].ref
        if champion is not None and number == runs - 1:
            _propose(repository, number, champion, model)
            break
        champion = move_alias(
            repository.store, "sums", "champion", model, by="demo", reason=f"run {number} was better",
            evidence=Evidence(approved_by="demo"),
        ).manifest  # fmt: skip


def _publish(repository: ArtifactRepository, manifest: Manifest, files: Mapping[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for path, data in files.items():
            (Path(folder) / path).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / path).write_bytes(data)
        repository.publish(manifest, Path(folder))


def _round(
    repository: ArtifactRepository, number: int, accepted: Sequence[_Result], results: Sequence[_Result]
) -> list[_Result]:
    """Write a round of the loop `nightly`, whose candidate is accepted; return its model and the evaluation."""
    candidate, evaluation, before = results[1][0], results[3][0], accepted[1][0]
    verdict = _verdict(accepted[1], results[3], Criterion("difference", "exact", "greedy", -_MARGIN, strict=False))
    rounds, run_id = Rounds(repository.store, "nightly"), _run_id(number)
    parents = {
        "accepted": accepted[0][0].ref, "accepted_evaluation": before.ref, "candidate": candidate.ref,
        "candidate_evaluation": evaluation.ref, "prompts": results[0][0].ref,
    }  # fmt: skip
    config = {**dict.fromkeys(parents, ""), "gate": {"scorer": "exact", "margin": _MARGIN}}
    record = _manifest(number, "round", Kind.ROUND, parents, verdict.metrics(), evaluation.started_at, config)
    with tempfile.TemporaryDirectory() as folder:
        verdict.write(Path(folder) / "round")
        repository.publish(record, Path(folder) / "round")
    start = rounds.current(run_id).model_copy(update={"started_at": evaluation.started_at})
    rounds.start(start)
    reason = f"exact {evaluation.metrics['exact']:.3f}, before {before.metrics['exact']:.3f}"
    rounds.accept(start, candidate.ref, reason, record.ref)
    rounds.end(
        RoundEnd(
            number=start.number, verdict="accepted", reason=reason, record=record.ref, candidate=candidate.ref,
            prompts=None, ended_at=evaluation.finished_at, run_id=run_id,
        )
    )  # fmt: skip
    return [results[1], results[3]]


def _verdict(before: _Result, after: _Result, criterion: Criterion) -> Verdict:
    with tempfile.TemporaryDirectory() as folder:
        inputs = [Input(manifest, Path(folder) / manifest.key) for manifest, _ in (before, after)]
        for item, (_, files) in zip(inputs, (before, after), strict=True):
            item.folder.mkdir()
            (item.folder / SAMPLES_FILE).write_bytes(files[SAMPLES_FILE])
        return Verdict([judge(inputs[0], inputs[1], criterion)])


def _run_id(number: int) -> str:
    """Return an id of a run; as those of Prefect, ids sort by time."""
    return f"{number:04x}" + hashlib.sha256(f"run {number}".encode()).hexdigest()[4:32]


def _propose(repository: ArtifactRepository, number: int, champion: ArtifactRef, model: ArtifactRef) -> None:
    parents = {"candidate": model, "baseline": champion}
    metrics: dict[str, MetricValue] = {
        "accepted": 1,
        "reason": "exact is not worse by its interval, and the completions are shorter",
    }
    gate = _manifest(
        number, "gate", Kind.GATE, parents, metrics, STARTED + timedelta(hours=number), {"approval": "required"}
    )
    _publish(repository, gate, {VERDICT_FILE: b"{}"})
    propose(repository.store, "sums", gate.ref, by="demo")


def _results(number: int, steps: int, prompts: int, completions: int) -> Iterator[_Result]:
    draw = random.Random(number)
    started = STARTED + timedelta(hours=number)
    rate = 1e-3 * (number + 1)
    base = _manifest(number, "base", Kind.BASE_MODEL, {}, {}, started)
    yield base, {"config.json": b"{}"}
    skill = [1 - math.exp(-3 * (number + 1) * step / (steps * 3)) for step in range(steps)]
    lines = [
        {
            "step": step, "time": started.timestamp() + 3 * step, "reward": skill[step] + draw.gauss(0, 0.02),
            "kl": 0.1 * skill[step], "completion_length": 12 - 4 * skill[step], "entropy": 2 - skill[step],
            "learning_rate": rate,
        }
        for step in range(steps)
    ]  # fmt: skip
    files = {METRICS_FILE: "".join(json.dumps(line) + "\n" for line in lines).encode()}
    for step in range(steps):
        logged = _step(draw, step + 1, skill[step], prompts, completions)
        files[f"{KEPT_ROLLOUTS}/{rollouts_file(step + 1)}"] = encode_step(logged)
    config = {"algorithm": "grpo", "steps": steps, "grpo": {"optimizer": {"learning_rate": rate}}}
    rl = _manifest(number, "rl", Kind.POLICY, {"model": base.ref}, {"reward": skill[-1], "kl": 0.1}, started, config)
    yield rl, files
    for model, right in (("base", 0.1), ("rl", skill[-1])):
        rows = [_evaluated(draw, row, right) for row in range(_EVALUATED)]
        exact = wilson(sum(row["completions"][0]["scores"]["exact"] == 1 for row in rows), _EVALUATED)
        metrics: dict[str, MetricValue] = {"exact": exact.value, "exact_low": exact.low, "exact_high": exact.high}
        parents = {"model": base.ref if model == "base" else rl.ref}
        scorers = {"scorers": {"exact": {"type": "exact"}}}
        evaluation = _manifest(number, f"evaluation.{model}", Kind.EVALUATION, parents, metrics, started, scorers)
        yield evaluation, {SAMPLES_FILE: "".join(json.dumps(row) + "\n" for row in rows).encode()}


def _manifest(
    number: int,
    name: str,
    kind: Kind,
    parents: Mapping[str, ArtifactRef],
    metrics: Mapping[str, MetricValue],
    started: datetime,
    config: Mapping[str, Any] | None = None,
) -> Manifest:
    ended = started + timedelta(minutes=1)
    attempt = Attempt(
        id=f"demo {number} {name}", run_id=_run_id(number), host="demo", device="cpu", gpus=0, cores=1,
        started_at=started, seen_at=ended, outcome="published",
    )  # fmt: skip
    return Manifest(
        kind=kind, name=name, recipe="sums", stage=name.partition(".")[0],
        key=hashlib.sha256(f"{number} {name}".encode()).hexdigest(), files=(), parents=dict(parents), user_files={},
        pins={},
        config=dict(config or {}), seed=number, metrics=dict(metrics), code_revision="demo", libraries={},
        device_seconds=60.0, device="cpu",
        started_at=started, finished_at=ended, attempts=(attempt,),
    )  # fmt: skip


def _evaluated(draw: random.Random, row: int, right: float) -> dict[str, Any]:
    a, b = row, row * 7 % 40
    text = str(a + b) if draw.random() < right else str(a + b + draw.randint(1, 9))
    score = float(text == str(a + b))
    completion = {"text": text, "finish_reason": "stop", "scores": {"exact": score}}
    return {"id": f"row {row}", "prompt": f"{a} + {b} =", "answer": str(a + b), "completions": [completion]}


def _step(draw: random.Random, step: int, skill: float, prompts: int, completions: int) -> LoggedStep:
    groups = [_group(draw, f"{step}-{i}", skill, completions) for i in range(prompts)]
    rewards = [completion.reward or 0.0 for group in groups for completion in group.completions]
    right = sum(reward == 1.0 for reward in rewards)
    ratios = [mean_ratio(completion) or 1.0 for group in groups for completion in group.completions]
    middle = (min(ratios) + max(ratios)) / 2
    low = sum(ratio < middle for ratio in ratios)
    return LoggedStep(
        step=step, prompts=prompts, completions=len(rewards),
        histograms={
            "reward": Histogram(edges=(0.0, 0.5, 1.0), counts=(len(rewards) - right, right)),
            "ratio": Histogram(edges=(min(ratios), middle, max(ratios)), counts=(low, len(ratios) - low)),
        },
        groups=tuple(groups),
    )  # fmt: skip


def _group(draw: random.Random, row: str, skill: float, completions: int) -> LoggedGroup:
    a, b = draw.randint(0, 99), draw.randint(0, 99)
    texts = [str(a + b) if draw.random() < skill else str(a + b + draw.randint(1, 20)) for _ in range(completions)]
    rewards = [float(text == str(a + b)) for text in texts]
    mean = sum(rewards) / completions
    return LoggedGroup(
        id=row, prompt=({"role": "user", "content": f"{a} + {b} ="},), answer=str(a + b),
        completions=tuple(
            _completion(draw, f"{a} + {b} =", text, reward, reward - mean)
            for text, reward in zip(texts, rewards, strict=True)
        ),
    )  # fmt: skip


def _completion(draw: random.Random, prompt: str, text: str, reward: float, advantage: float) -> LoggedCompletion:
    sampled = [*text, "<end>"]
    engine = [-abs(draw.gauss(0, 1)) for _ in sampled]
    sequence = LoggedSequence(
        texts=(prompt, *sampled), token_ids=(1, *(ord(sign[0]) for sign in sampled)),
        trained=(False, *[True] * len(sampled)),
        engine_logprobs=tuple(engine), trainer_logprobs=tuple(each + draw.gauss(0, 0.01) for each in engine),
        entropies=tuple(abs(each) / 2 for each in engine),
        reference_logprobs=tuple(each - 0.1 for each in engine), advantages=(advantage,) * len(sampled),
    )  # fmt: skip
    return LoggedCompletion(
        text=text, finish_reason="stop", turns=1, reward=reward, rewards={"exact": reward}, weighted={"exact": reward},
        score=reward, versions=((len(sampled), 1),), sequences=(sequence,),
    )  # fmt: skip
