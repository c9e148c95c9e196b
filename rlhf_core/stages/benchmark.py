"""Benchmark: a model and tasks of lm-evaluation-harness in; scores with intervals, and every answer, out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import load_tokenizer, stop_token_ids
from rlhf_core.config.stages.benchmark import BenchmarkConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.evaluation.harness.answering import EngineAnswers, run_harness
from rlhf_core.evaluation.harness.records import flat_metrics, sample_rows, summarise
from rlhf_core.evaluation.stored import write_evaluation
from rlhf_core.models.folders.folder import stored_dtype
from rlhf_core.rollout.engine import EngineSettings
from rlhf_core.rollout.engines import Engines
from rlhf_core.stages.cluster import Cluster, EngineSpec
from rlhf_core.stages.partial_rows import PartialRows


def run(config: BenchmarkConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster) -> Output:
    """Raises StageError for a task that cannot be loaded, or that the model cannot be asked."""
    model = inputs["model"]
    tasks = None if config.task_folder is None else context.user_folder(config.task_folder)
    settings = {
        **config.model_dump(mode="json", exclude={"models", "rollout", "checkpoint", "stage", "seed"}),
        "folder": None if tasks is None else str(tasks),
        "model": str(model.folder),
        "max_length": config.rollout.max_length,
        "seed": context.seed,
        "cache": str(context.workdir / "datasets"),
    }
    with ExitStack() as stack, PartialRows(config.checkpoint, context) as kept:

        @cache
        def engines() -> Engines:
            """Start the engines: not before the tasks are loaded, and nothing is left to compute without them."""
            context.progress(0, 0, "start engines")
            spec = EngineSpec(model, EngineSettings(config.rollout, stored_dtype(model.folder), context.seed))
            return stack.enter_context(cluster.engines(spec, context))

        answers = EngineAnswers(engines, stop_token_ids(load_tokenizer(model.folder)), context.seed)
        started = time.monotonic()
        context.progress(0, 0, "load tasks")
        rows, aggregates = run_harness(
            settings, {"score": answers.score, "generate": answers.generate}, kept.rows,
            folder=tasks or context.workdir, progress=context.progress,
        )  # fmt: skip
        seconds = time.monotonic() - started
    results = summarise(rows, aggregates, context.seed)
    folder = context.workdir / "evaluation"
    write_evaluation(folder, results, sample_rows(rows, results))
    metrics = flat_metrics(results)
    context.log(0, {**metrics, "sampling_seconds": seconds})
    return Output(Kind.EVALUATION, folder, metrics)
