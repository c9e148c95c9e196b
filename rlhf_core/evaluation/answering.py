"""Samples completions from engines, greedily and at random, and scores every one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

from rlhf_core.config.rollout import SamplingConfig
from rlhf_core.data.chat import Tokenizer, decode_completion, stop_token_ids
from rlhf_core.errors import RewardError
from rlhf_core.evaluation.summary import Answered, ScoredCompletion
from rlhf_core.rewards import Reward
from rlhf_core.rollout.engine import SamplingParameters
from rlhf_core.rollout.engines import Sampler
from rlhf_core.training.randomness import derived_seed
from rlhf_core.types import Completion, Prompt

STEPS = 3  # steps of its progress: greedy completions, sampled completions, scores


def answer(
    prompts: Sequence[Prompt],
    engines: Sampler,
    tokenizer: Tokenizer,
    scorers: Mapping[str, Reward],
    *,
    sampling: SamplingConfig,
    samples: int,
    seed: int,
    progress: Callable[[int, str], None] = lambda done, phase: None,
) -> list[Answered]:
    """Sample one greedy and `samples` random completions of every prompt, and score each with every scorer.

    The same seed gives each sample of a prompt the same random numbers, so that two models can be compared.
    progress: called with the number of completed STEPS and the name of the next one.
    """
    stop = stop_token_ids(tokenizer)
    progress(0, "greedy")
    greedy = engines.generate(
        [prompt.token_ids for prompt in prompts],
        SamplingParameters(
            temperature=0.0, top_p=1.0, max_tokens=sampling.max_tokens, stop_token_ids=stop, seeds=()
        ),
    )  # fmt: skip
    progress(1, "sampled")
    asked = list(product(range(len(prompts)), range(samples)))
    seeds = [derived_seed(seed, f"evaluation: prompt {index}, sample {sample}") for index, sample in asked]
    sampled = engines.generate(
        [prompts[index].token_ids for index, _ in asked], SamplingParameters.of(sampling, stop, seeds)
    )
    # Grouped by prompt, the greedy completion first.
    completions: list[tuple[Prompt, Completion]] = []
    for index, prompt in enumerate(prompts):
        of_prompt = sampled[index * samples : (index + 1) * samples]
        completions += [(prompt, completion) for completion in (greedy[index], *of_prompt)]
    progress(2, "scores")
    scored = _score(completions, tokenizer, scorers)
    progress(3, "scores")
    each = samples + 1
    answered = []
    for index, prompt in enumerate(prompts):
        first, *others = scored[index * each : (index + 1) * each]
        answered.append(Answered(prompt.id, str(prompt.row.get("task") or "all"), first, tuple(others)))
    return answered


def _score(
    completions: Sequence[tuple[Prompt, Completion]], tokenizer: Tokenizer, scorers: Mapping[str, Reward]
) -> list[ScoredCompletion]:
    texts = [decode_completion(tokenizer, completion.token_ids) for _, completion in completions]
    prompt_texts = [prompt.text for prompt, _ in completions]
    rows = [prompt.row for prompt, _ in completions]
    scores = {name: _scores(name, scorer, texts, prompt_texts, rows) for name, scorer in scorers.items()}
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
    name: str, scorer: Reward, texts: Sequence[str], prompt_texts: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> list[float]:
    """The scores, or the rewards of a scorer that returns no scores. Raises RewardError if one is not in 0-1."""
    result = scorer(texts, prompt_texts, rows)
    scores = [reward if score is None else score for reward, score in zip(result.rewards, result.scores, strict=True)]
    for text, score in zip(texts, scores, strict=True):
        if not 0 <= score <= 1:
            raise RewardError(f"scorer {name} returned {score} for {text!r}; an evaluation needs scores from 0 to 1")
    return scores
