"""Evaluation: a model and held-out prompts in; pass@1, pass@k with intervals, and every completion out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache, partial
from typing import Any

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.chat.feedback import require_turns_follow
from rlhf_core.chat.image_messages import images_of_row
from rlhf_core.config.stages.evaluation import EvaluationConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.prompts import fit_prompts
from rlhf_core.data.reading import (
    IMAGES_FOLDER,
    copy_images,
    read_rows,
    require_all_read,
    require_seen_by_all,
    row_policy,
)
from rlhf_core.environments import open_environments, rows_to_play
from rlhf_core.episodes.rollouter import Rollouter
from rlhf_core.episodes.shown_images import ShownImages
from rlhf_core.errors import StageError
from rlhf_core.evaluation.answering import answer
from rlhf_core.evaluation.stored import write_evaluation
from rlhf_core.evaluation.summary import Answered, flat_metrics, summarise, uniformity
from rlhf_core.models.folders.folder import stored_dtype
from rlhf_core.models.vision import RowImages, open_processor
from rlhf_core.rewards import open_rewards
from rlhf_core.rewards.known_answers import Asked, require_known_answers
from rlhf_core.rollout.engine import EngineSettings
from rlhf_core.stages.cluster import Cluster, EngineSpec
from rlhf_core.stages.partial_rows import PartialRows
from rlhf_core.training.counts import require_counts
from rlhf_core.types import Prompt


def run(config: EvaluationConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster) -> Output:
    model = inputs["model"]
    tokenizer = load_tokenizer(model.folder)
    room = config.rollout.max_length - config.sampling.max_tokens
    dataset = inputs["dataset"].folder
    processor, most = open_processor(model.folder), config.rollout.max_images
    images = RowImages(processor, dataset / IMAGES_FOLDER, most)
    shown = None if processor is None else ShownImages(processor, context.workdir / "shown_images", most)
    if config.environment.appends_turns:
        require_turns_follow(tokenizer)
    with ExitStack() as stack, PartialRows(config.checkpoint, context) as kept:
        environments = stack.enter_context(open_environments(config.environment, context, tokenizer))
        rows = rows_to_play(read_rows(dataset), environments)
        fitted = fit_prompts(rows, tokenizer, max_tokens=room, policy=row_policy(dataset), images=images)
        require_all_read(dataset, fitted)
        prompts = fitted.rows
        if not prompts:
            raise StageError("the dataset has no prompts to evaluate on")
        require_seen_by_all((prompt.row for prompt in prompts), config.text_readers_of)
        scorers = stack.enter_context(open_rewards(config.scorers, context))
        asked = [Asked(f"row {prompt.id}", prompt.text, prompt.row) for prompt in prompts]
        require_known_answers(config.scorers, scorers, asked, "scorers")

        @cache
        def rollouter() -> Rollouter:
            """Start the engines: not before a prompt is to be answered."""
            context.progress(0, len(prompts), "start engines")
            # In the precision that it was saved in: a model is judged as it is, not as another would round it.
            spec = EngineSpec(model, EngineSettings(config.rollout, stored_dtype(model.folder), context.seed))
            engines = stack.enter_context(cluster.engines(spec, context))
            return Rollouter(engines, tokenizer, config.rollout, environments, images=shown)

        def answered_from(first: int, part: Sequence[Prompt]) -> list[Any]:
            play = rollouter().play
            answers = answer(
                part, play, scorers, sampling=config.sampling, samples=config.samples, seed=context.seed, first=first,
                progress=partial(context.progress, first, len(prompts)),
            )  # fmt: skip
            return [asdict(each) for each in answers]

        started = time.monotonic()
        answered: list[Answered] = []
        for first in range(0, len(prompts), config.prompts_per_call):
            part = prompts[first : first + config.prompts_per_call]
            of_part = kept.rows(f"answered-{first}-{len(part)}", partial(answered_from, first, part))
            answered += map(Answered.of, of_part)
            context.progress(len(answered), len(prompts), "scores")
        sampling_seconds = time.monotonic() - started
        completions = [completion for each in answered for completion in (each.greedy, *each.sampled)]
        require_counts({
            "prompts answered": (len(prompts), sum(a.id == p.id for a, p in zip(answered, prompts, strict=False))),
            "completions": (len(prompts) * (1 + config.samples), len(completions)),
            "scores": (len(completions) * len(config.scorers), sum(len(each.scores) for each in completions)),
        })  # fmt: skip

    sampled = [completion.text for each in answered for completion in each.sampled]
    if note := uniformity([each.greedy.text for each in answered], sampled):
        print(f"note: {note}", flush=True)
    results = summarise(answered, pass_at=config.pass_at, seed=context.seed)
    folder = context.workdir / "evaluation"
    write_evaluation(folder, results, map(_sample, prompts, answered))
    copy_images({digest for p in prompts for digest in images_of_row(p.row)}, folder, (dataset / IMAGES_FOLDER,))
    metrics = {**flat_metrics(results, main_scorer=next(iter(config.scorers))), **fitted.metrics()}
    context.log(0, {**metrics, "sampling_seconds": sampling_seconds})
    return Output(
        kind=Kind.EVALUATION,
        folder=folder,
        metrics=metrics,
    )


def _sample(prompt: Prompt, answer: Answered) -> dict[str, Any]:
    """Return the line of a prompt in `samples.jsonl`, its greedy completion first."""
    return {
        "id": prompt.id,
        "prompt": prompt.text,
        "answer": prompt.row.get("answer"),
        "task": prompt.row.get("task"),
        **({"images": images} if (images := images_of_row(prompt.row)) else {}),
        "completions": [
            {"text": c.text, "scores": c.scores, "tokens": c.tokens, "finish_reason": c.finish_reason}
            | ({} if c.messages is None else {"messages": c.messages})
            for c in (answer.greedy, *answer.sampled)
        ],
    }
