"""Generate: a model and prompts in; completions of each prompt, with log-probs and rewards, out."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from itertools import product
from typing import Any

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import Tokenizer, load_tokenizer
from rlhf_core.chat.sampled_tokens import tokenizer_digest
from rlhf_core.config.engines.rollout import SamplingConfig
from rlhf_core.config.stages.sampled import GenerateConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.fitting import Fitted
from rlhf_core.data.formats import Row
from rlhf_core.data.prompts import fit_prompts
from rlhf_core.data.reading import (
    IMAGES_FOLDER,
    read_rows,
    require_all_read,
    require_seen_by_all,
    row_policy,
    write_dataset,
)
from rlhf_core.episodes.rollouter import Rollouter, Start
from rlhf_core.errors import StageError
from rlhf_core.evaluation.intervals import bootstrap
from rlhf_core.models.folders.folder import stored_dtype
from rlhf_core.models.vision import ImageProcessor, RowImages, open_processor
from rlhf_core.rewards import open_rewards
from rlhf_core.rl.reward_models import read_reward_models
from rlhf_core.rl.roles import require_same_tokens
from rlhf_core.rl.rows import completion_entry, completions_row, with_rewards
from rlhf_core.rl.stored import stored, trajectory_of
from rlhf_core.rollout.engine import EngineSettings
from rlhf_core.stages.cluster import Cluster, EngineSpec
from rlhf_core.stages.partial_rows import PartialRows
from rlhf_core.stages.readers import Readers, reward_counts, totals
from rlhf_core.training.counts import require_counts
from rlhf_core.training.randomness import derived_seed
from rlhf_core.types import Prompt, Trajectory


def run(config: GenerateConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster) -> Output:
    """Sample the completions. The seed of each depends on its prompt and its number alone."""
    with PartialRows(config.checkpoint, context) as kept:
        return _run(config, inputs, context, cluster, kept)


def _run(
    config: GenerateConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster, kept: PartialRows
) -> Output:
    model, longest = inputs["model"], config.rollout.max_length
    tokenizer, processor = load_tokenizer(model.folder), open_processor(model.folder)
    fitted = _prompts(config, inputs, tokenizer, processor)
    judges = read_reward_models(config.model_rewards, "rewards", inputs, longest)
    readers = Readers(
        config, inputs, judges, context, cluster, kept, processor,
        temperature=config.sampling.temperature, compares=config.reference is not None,
    )  # fmt: skip
    done, total = 0, len(fitted.rows) * config.samples * (1 + readers.passes)
    sampled: list[Trajectory] = []
    judged: dict[str, list[float]] = {name: [] for name in config.rewards}
    with ExitStack() as stack:
        scorers = stack.enter_context(open_rewards(config.text_rewards, context))

        @cache
        def rollouter() -> Rollouter:
            """Start the engines: not before a prompt is to be completed."""
            context.progress(len(sampled), total, "start engines")
            spec = EngineSpec(model, EngineSettings(config.rollout, stored_dtype(model.folder), context.seed))
            return Rollouter(stack.enter_context(cluster.engines(spec, context)), tokenizer, config.rollout)

        def completions_of(prompts: Sequence[Prompt]) -> list[Any]:
            part = completed(prompts, config.samples, config.sampling, rollouter(), context.seed)
            rewards = totals(scorers, part)
            return [
                {"trajectory": stored(each), "rewards": of_each} for each, of_each in zip(part, rewards, strict=True)
            ]

        started = time.monotonic()
        for start in range(0, len(fitted.rows), config.prompts_per_call):
            prompts = fitted.rows[start : start + config.prompts_per_call]
            part = kept.rows(f"sampled-{start}-{len(prompts)}", partial(completions_of, prompts))
            for index, row in enumerate(part):
                sampled.append(trajectory_of(row["trajectory"], prompts[index // config.samples]))
                for name, value in row["rewards"].items():
                    judged[name].append(value)
            context.progress(len(sampled), total, "sample")
        seconds = time.monotonic() - started

    def read(count: int) -> None:
        nonlocal done
        done += count
        context.progress(len(sampled) + done, total, "read")

    judged |= readers.judge(lambda _: sampled, read)
    wanted = len(fitted.rows) * config.samples
    require_counts({"completions": (wanted, len(sampled)), **reward_counts(wanted, judged)})
    entries = [_entry(config, t, {name: judged[name][index] for name in judged}) for index, t in enumerate(sampled)]
    compared: dict[str, float] = {}
    if config.reference is not None:
        logprobs, references = readers.compare(sampled, read)
        for entry, of_reference in zip(entries, references, strict=True):
            entry["reference_logprob"] = of_reference
        tokens = sum(int(t.loss_mask.sum()) for t in sampled)
        kls = [of_model - of_reference for of_model, of_reference in zip(logprobs, references, strict=True)]
        compared = kl_metrics(kls, tokens, config.samples, context.seed)
    each, digest = config.samples, tokenizer_digest(tokenizer)
    rows = [
        completions_row(prompt.row["prompt"], prompt.row, entries[index * each : (index + 1) * each], tokenizer=digest)
        for index, prompt in enumerate(fitted.rows)
    ]
    folder = context.workdir / "dataset"
    of_prompts = inputs["dataset"].folder / IMAGES_FOLDER
    images = write_dataset(folder, rows, {"format": config.made_format}, images_from=(of_prompts,))
    metrics = {**_metrics(rows), **compared, **fitted.metrics(), **images}
    context.log(0, {**{name: float(value) for name, value in metrics.items()}, "sampling_seconds": seconds})
    return Output(Kind.DATASET, folder, metrics)


def _prompts(
    config: GenerateConfig, inputs: Mapping[str, Input], tokenizer: Tokenizer, processor: ImageProcessor | None
) -> Fitted[list[Prompt]]:
    """Read the prompts. processor: of the model. Raises StageError if there are none, or images that another model
    cannot read.
    """
    dataset, longest = inputs["dataset"].folder, config.rollout.max_length
    images = RowImages(processor, dataset / IMAGES_FOLDER, config.rollout.max_images)
    room = longest - config.sampling.max_tokens
    rows = read_rows(dataset)
    fitted = fit_prompts(rows, tokenizer, max_tokens=room, policy=row_policy(dataset), images=images)
    require_all_read(dataset, fitted)
    if not fitted.rows:
        raise StageError("the dataset has no prompt to complete")
    require_seen_by_all((prompt.row for prompt in fitted.rows), config.text_readers_of)
    has_images = any(prompt.images for prompt in fitted.rows)
    require_same_tokens(config.token_readers, inputs, "rollout.max_length", longest, images=has_images)
    return fitted


def completed(
    prompts: Sequence[Prompt], samples: int, sampling: SamplingConfig, rollouter: Rollouter, seed: int
) -> list[Trajectory]:
    """Return the completions of each prompt, sampled concurrently."""
    each = product(prompts, range(samples))
    return rollouter.play([Start(prompt, partial(_request_seed, seed, prompt.id, n)) for prompt, n in each], sampling)


def _request_seed(seed: int, prompt: str, sample: int, turn: int) -> int:
    return derived_seed(seed, f"generate: {prompt}, sample {sample}")  # there is one turn


def _entry(config: GenerateConfig, trajectory: Trajectory, rewards: Mapping[str, float]) -> Row:
    entry = completion_entry(trajectory, logprobs=config.keep_tokens)
    return with_rewards(entry, rewards, config.reward_weights) if rewards else entry


def kl_metrics(kls: Sequence[float], tokens: int, samples: int, seed: int) -> dict[str, float]:
    """Return KL(model || reference) in nats per completion, with its interval over prompts, and in nats per token.

    k1 of losses/kl.py. kls: of each completion the difference of its log-probs; tokens: of all completions.
    """
    of_prompts = [math.fsum(kls[start : start + samples]) / samples for start in range(0, len(kls), samples)]
    estimate = bootstrap(of_prompts, seed=seed)
    return {
        "kl": estimate.value,
        "kl_low": estimate.low,
        "kl_high": estimate.high,
        "kl_per_token": math.fsum(kls) / tokens,
    }


def _metrics(rows: Sequence[Row]) -> dict[str, int | float]:
    entries = [entry for row in rows for entry in row["completions"]]
    metrics: dict[str, int | float] = {"rows": len(rows), "completions": len(entries)}
    metrics["truncated_completions"] = sum(entry["finish_reason"] == "length" for entry in entries)
    if "reward" in entries[0]:
        metrics["reward"] = math.fsum(entry["reward"] for entry in entries) / len(entries)
        metrics["best_reward"] = math.fsum(max(e["reward"] for e in row["completions"]) for row in rows) / len(rows)
    return metrics
