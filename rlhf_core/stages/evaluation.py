"""Evaluation: a model and held-out prompts in; pass@1, pass@k with intervals, and every completion out."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Protocol

from rlhf_core.actors.engines import EngineGroup
from rlhf_core.actors.placement import connect
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.evaluation import EvaluationConfig
from rlhf_core.data.chat import Tokenizer, decode_completion, load_tokenizer, stop_token_ids
from rlhf_core.data.prompts import to_prompts
from rlhf_core.data.reading import read_rows
from rlhf_core.errors import RewardError, StageError
from rlhf_core.evaluation.summary import Answered, ScoredCompletion, flat_metrics, summarise
from rlhf_core.rewards import Reward, build_reward
from rlhf_core.rollout.engine import SamplingParameters
from rlhf_core.stages.contract import Input, Output, StageContext
from rlhf_core.stages.workers import reserved_engines
from rlhf_core.types import Completion, Prompt

_STEPS = 3  # what progress counts: greedy completions, sampled ones, scores


class Engines(Protocol):
    def generate(self, prompts: Sequence[Sequence[int]], parameters: SamplingParameters) -> list[Completion]: ...


def run(config: EvaluationConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    model = inputs["model"]
    tokenizer = load_tokenizer(model.folder)
    room = config.rollout.max_length - config.sampling.max_tokens
    prompts = to_prompts(read_rows(inputs["dataset"].folder), tokenizer, max_tokens=room)
    if not prompts:
        raise StageError("the dataset has no prompts to evaluate on")
    context.progress(0, _STEPS, "start engines")
    with ExitStack() as stack:
        scorers: dict[str, Reward] = {}
        for name, scorer in config.scorers.items():
            scorers[name] = build_reward(scorer, context)
            stack.callback(scorers[name].close)
        connect()
        engines = stack.enter_context(
            EngineGroup(
                model.manifest.ref, context, config.rollout, dtype=stored_dtype(model.folder), seed=context.seed
            )
        )
        engines.wait_ready()
        started = time.monotonic()
        answered = evaluate(config, prompts, engines, tokenizer, scorers, context)
        sampling_seconds = time.monotonic() - started

    results = summarise(answered, pass_at=config.pass_at, seed=context.seed)
    folder = context.workdir / "evaluation"
    write_results(folder, results, prompts, answered)
    metrics = flat_metrics(results, main_scorer=next(iter(config.scorers)))
    context.log(0, {**metrics, "sampling_seconds": sampling_seconds})
    return Output(
        kind=Kind.EVALUATION,
        folder=folder,
        metrics=metrics,
        devices=reserved_engines(config.rollout),
    )


def evaluate(
    config: EvaluationConfig,
    prompts: Sequence[Prompt],
    engines: Engines,
    tokenizer: Tokenizer,
    scorers: Mapping[str, Reward],
    context: StageContext,
) -> list[Answered]:
    """Every prompt answered once greedily and `samples` times at random, each completion scored by every scorer."""
    stop = stop_token_ids(tokenizer)
    context.progress(0, _STEPS, "greedy")
    greedy = engines.generate(
        [prompt.token_ids for prompt in prompts],
        SamplingParameters(
            temperature=0.0, top_p=1.0, max_tokens=config.sampling.max_tokens, stop_token_ids=stop, seed=context.seed
        ),
    )
    context.progress(1, _STEPS, "sampled")
    sampled = engines.generate(
        [prompt.token_ids for prompt in prompts for _ in range(config.samples)],
        SamplingParameters(
            temperature=config.sampling.temperature, top_p=config.sampling.top_p,
            max_tokens=config.sampling.max_tokens, stop_token_ids=stop, seed=context.seed,
        ),
    )  # fmt: skip
    # Prompt by prompt, the greedy completion first.
    completions: list[tuple[Prompt, Completion]] = []
    for index, prompt in enumerate(prompts):
        own = sampled[index * config.samples : (index + 1) * config.samples]
        completions += [(prompt, completion) for completion in (greedy[index], *own)]
    context.progress(2, _STEPS, "scores")
    scored = _score(completions, tokenizer, scorers)
    context.progress(3, _STEPS, "scores")
    each = config.samples + 1
    answered = []
    for index, prompt in enumerate(prompts):
        first, *others = scored[index * each : (index + 1) * each]
        answered.append(Answered(prompt.id, str(prompt.row.get("task") or "all"), first, tuple(others)))
    return answered


def _score(
    completions: Sequence[tuple[Prompt, Completion]], tokenizer: Tokenizer, scorers: Mapping[str, Reward]
) -> list[ScoredCompletion]:
    texts = [decode_completion(tokenizer, completion.token_ids) for _, completion in completions]
    asked = [prompt.text for prompt, _ in completions]
    rows = [prompt.row for prompt, _ in completions]
    scores = {name: _scores(name, scorer, texts, asked, rows) for name, scorer in scorers.items()}
    return [
        ScoredCompletion(
            text=text,
            tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
            scores={name: values[index] for name, values in scores.items()},
        )
        for index, (text, (_, completion)) in enumerate(zip(texts, completions, strict=True))
    ]


def _scores(
    name: str, scorer: Reward, texts: Sequence[str], asked: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> list[float]:
    """A scorer that gives one number for a completion gives its score. Raises RewardError outside 0-1."""
    result = scorer(texts, asked, rows)
    scores = [reward if score is None else score for reward, score in zip(result.rewards, result.scores, strict=True)]
    for text, score in zip(texts, scores, strict=True):
        if not 0 <= score <= 1:
            raise RewardError(f"scorer {name} gave {score} for {text!r}; an evaluation needs scores of 0 to 1")
    return scores


def write_results(
    folder: Path, results: Mapping[str, Any], prompts: Sequence[Prompt], answered: Sequence[Answered]
) -> None:
    """`results.json`, and `samples.jsonl` with a line for each prompt, its greedy completion first."""
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    with (folder / "samples.jsonl").open("w", encoding="utf-8", newline="\n") as file:
        for prompt, answer in zip(prompts, answered, strict=True):
            line = {
                "id": prompt.id,
                "prompt": prompt.text,
                "answer": prompt.row.get("answer"),
                "task": prompt.row.get("task"),
                "completions": [
                    {"text": c.text, "scores": c.scores, "tokens": c.tokens, "finish_reason": c.finish_reason}
                    for c in (answer.greedy, *answer.sampled)
                ],
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def stored_dtype(folder: Path) -> Literal["float32", "bfloat16"]:
    """The precision the model was saved in: a model is judged as it is, not as another precision would round it."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype not in ("float32", "bfloat16"):
        raise StageError(f"{folder}/config.json: the model's dtype is {dtype!r}; expected float32 or bfloat16")
    return "float32" if dtype == "float32" else "bfloat16"
