"""Rewards of text for TRL's GRPOTrainer, as its page on custom reward functions describes them."""

import re


def format_reward(completions, **kwargs):
    """1 for a completion that thinks before it answers."""
    pattern = r"^<think>.*?</think>\s*<answer>.*?</answer>$"
    return [1.0 if re.match(pattern, content, re.DOTALL) else 0.0 for content in completions]


def accuracy_reward(prompts, completions, ground_truth, log_extra=None, log_metric=None, **kwargs):
    """1 for the right answer; None where the row is no question with an answer."""
    extracted = [re.sub(r".*<answer>|</answer>.*", "", text, flags=re.DOTALL) for text in completions]
    if log_extra:
        log_extra("extracted", extracted)
        log_extra("length", [len(text) for text in completions])
    if log_metric:
        log_metric("with_answer", sum(truth is not None for truth in ground_truth) / len(prompts))
    return [None if gt is None else float(c == gt) for c, gt in zip(extracted, ground_truth, strict=True)]


async def shortness(completions, **kwargs):
    return [-float(len(text)) for text in completions]


def of_the_trainer(completions, completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def of_its_state(completions, **kwargs):
    return [float(kwargs["trainer_state"].global_step) for _ in completions]


def exactly_its_columns(completions, ground_truth):
    return [float(c == gt) for c, gt in zip(completions, ground_truth, strict=True)]
