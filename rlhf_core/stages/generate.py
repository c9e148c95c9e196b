"""Generate: a model and prompts in; completions of each prompt, with log-probs and rewards, out."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.sampled import GenerateConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.chat import Tokenizer, decode_completion, load_tokenizer, stop_token_ids
from rlhf_core.data.formats import row_id
from rlhf_core.data.prompts import fit_prompts
from rlhf_core.data.reading import read_rows, row_policy, write_dataset
from rlhf_core.errors import StageError
from rlhf_core.models.folder import stored_dtype
from rlhf_core.rewards import Reward, open_scorers
from rlhf_core.rollout.engine import EngineSettings, SamplingParameters
from rlhf_core.rollout.engines import Sampler
from rlhf_core.stages.cluster import Cluster, EngineSpec
from rlhf_core.training.randomness import derived_seed
from rlhf_core.types import Completion, Prompt

Row = dict[str, Any]


def run(config: GenerateConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster) -> Output:
    """A killed job begins again, and samples the same: a seed depends on its prompt and its number alone."""
    model, dataset = inputs["model"], inputs["dataset"].folder
    tokenizer = load_tokenizer(model.folder)
    room = config.rollout.max_length - config.sampling.max_tokens
    fitted = fit_prompts(read_rows(dataset), tokenizer, max_tokens=room, policy=row_policy(dataset))
    if not fitted.rows:
        raise StageError("the dataset has no prompt to complete")
    context.progress(0, len(fitted.rows), "start engines")
    rows: list[Row] = []
    with ExitStack() as stack:
        rewards = stack.enter_context(open_scorers(config.rewards, context))
        spec = EngineSpec(model, EngineSettings(config.rollout, stored_dtype(model.folder), context.seed))
        engines = stack.enter_context(cluster.engines(spec, context))
        started = time.monotonic()
        for start in range(0, len(fitted.rows), config.prompts_per_call):
            prompts = fitted.rows[start : start + config.prompts_per_call]
            rows += completed(config, prompts, engines, tokenizer, rewards, context.seed)
            context.progress(len(rows), len(fitted.rows), "sample")
        seconds = time.monotonic() - started
    folder = context.workdir / "dataset"
    write_dataset(folder, rows, {"format": config.made_format})
    metrics = {**_metrics(rows), **fitted.metrics()}
    context.log(0, {**{name: float(value) for name, value in metrics.items()}, "sampling_seconds": seconds})
    return Output(Kind.DATASET, folder, metrics)


def completed(
    config: GenerateConfig,
    prompts: Sequence[Prompt],
    engines: Sampler,
    tokenizer: Tokenizer,
    rewards: Mapping[str, Reward],
    seed: int,
) -> Iterator[Row]:
    """A row of the format `completions` for each prompt."""
    each = config.samples
    seeds = [derived_seed(seed, f"generate: {prompt.id}, sample {n}") for prompt in prompts for n in range(each)]
    parameters = SamplingParameters.of(config.sampling, stop_token_ids(tokenizer), seeds)
    sampled = engines.generate([prompt.token_ids for prompt in prompts for _ in range(each)], parameters)
    texts = [decode_completion(tokenizer, completion.token_ids) for completion in sampled]
    asked = [prompt for prompt in prompts for _ in range(each)]
    judged = {
        name: reward(texts, [prompt.text for prompt in asked], [prompt.row for prompt in asked]).rewards
        for name, reward in rewards.items()
    }
    for place, prompt in enumerate(prompts):
        completions = [
            _entry(config, texts[index], sampled[index], {name: values[index] for name, values in judged.items()})
            for index in range(place * each, (place + 1) * each)
        ]
        row: Row = {"prompt": prompt.row["prompt"], "completions": completions}
        row |= {"tools": prompt.row["tools"]} if "tools" in prompt.row else {}
        yield {"id": row_id(row), **row}


def _entry(config: GenerateConfig, text: str, completion: Completion, rewards: Mapping[str, float]) -> Row:
    entry: Row = {"text": text, "logprob": math.fsum(completion.logprobs)}
    if rewards:
        entry["reward"] = math.fsum(config.rewards[name].weight * value for name, value in rewards.items())
        entry["rewards"] = dict(rewards)
    return entry


def _metrics(rows: Sequence[Row]) -> dict[str, int | float]:
    entries = [entry for row in rows for entry in row["completions"]]
    metrics: dict[str, int | float] = {"rows": len(rows), "completions": len(entries)}
    if "reward" in entries[0]:
        metrics["reward"] = math.fsum(entry["reward"] for entry in entries) / len(entries)
        metrics["best_reward"] = math.fsum(max(e["reward"] for e in row["completions"]) for row in rows) / len(rows)
    return metrics
