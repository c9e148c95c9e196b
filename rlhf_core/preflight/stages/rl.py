"""Checks of RL: its models, its hint, and whether its rewards can reach its thresholds."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_core.config.rl.settings import POLICY_INPUT
from rlhf_core.config.rl.shaping import ShapingConfig
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.graph.drafting import Draft
from rlhf_core.models.folders.folder import sampled_otherwise
from rlhf_core.preflight.stages.bounds import Bounds, bounds_of_sum
from rlhf_core.preflight.stages.context import CheckContext, Note
from rlhf_core.preflight.stages.hints import hint_problem
from rlhf_core.preflight.stages.trained import adapter_problems, engine_problems, few_rows

_BYTES_PER_LOGGED_TOKEN = 26  # compressed: its text, and six numbers; docs/operate/ui.md has the measurement
_LEAST_SIZE = 1e6


def check(config: RLConfig, node: Draft, context: CheckContext) -> Iterator[str | Note]:
    block, critic = f"{node.section}.{config.block}", config.settings.critic_settings
    yield from engine_problems(config.engine, node, context)
    yield from adapter_problems(config.lora, "lora", POLICY_INPUT, node, context)
    if critic is not None:
        yield from adapter_problems(critic.lora, f"{config.block}.critic.lora", config.critic_input, node, context)
    yield from _engine_differences(config, node, context)
    yield from (f"{block}.{problem}" for problem in _thresholds(config))
    teacher = config.settings.teacher
    if teacher is not None and teacher.hint is not None:
        problem = hint_problem(config, teacher.hint, context.models.get(node.name), context)
        yield from () if problem is None else (f"{block}.teacher.hint: `{config.dataset}`: {problem}",)
    yield from _logged(config, node)
    more = "a step has prompts more than once"
    yield from few_rows(config.dataset, "prompts_per_step", config.prompts_per_step, more, node, context)


def _logged(config: RLConfig, node: Draft) -> Iterator[Note]:
    """Yield the size of the logged rollouts, if it counts."""
    log = config.log_rollouts
    if log is None:
        return
    prompts, steps = min(log.prompts, config.prompts_per_step), min(log.steps, config.steps)
    tokens = steps * prompts * config.settings.group_size * config.rollout.max_length
    if (size := tokens * _BYTES_PER_LOGGED_TOKEN) >= _LEAST_SIZE:
        text = f"{node.section}.log_rollouts: up to {size / 1e6:.0f} MB of rollouts are logged, of {steps} steps"
        yield Note(text)


def _engine_differences(config: RLConfig, node: Draft, context: CheckContext) -> Iterator[str]:
    """Yield the reasons why engines and trainer would compute different results."""
    model = context.models.get(node.name)
    for setting, tokens in config.sequence_lengths().items():
        # A sequence beyond the model's context is a problem of every stage.
        if model is not None and (model.context is None or tokens <= model.context):
            problem = sampled_otherwise(model.settings, tokens)
            if problem is not None:
                yield f"{node.section}.{setting}={tokens} is too long for this model: {problem}"


def _thresholds(config: RLConfig) -> Iterator[str]:
    settings = config.settings
    bounds = bounds_of_sum(settings.rewards.values(), environment=config.environment.bounds)
    if bounds is None:
        return
    clip = settings.shaping.clip
    shaped = _shaped(bounds, settings.shaping)
    if shaped[0] == shaped[1] and settings.rewards and settings.teacher is None:
        yield f"rewards: all completions get the reward {shaped[0]:g}, so nothing tells them apart: add another"
        return
    if clip is not None and (shaped[0] >= clip[1] or shaped[1] <= clip[0]):
        yield (
            f"shaping.clip is [{clip[0]:g}, {clip[1]:g}], rewards are from {shaped[0]:g} to {shaped[1]:g}: all would "
            "be the same, and nothing would be learned: give it a range within these"
        )
    least = None if settings.cross_entropy is None else settings.cross_entropy.least_reward
    highest = shaped[1] if clip is None else min(shaped[1], clip[1])
    if least is not None and not settings.shaping.normalize and least > highest:
        yield (
            f"cross_entropy.least_reward is {least:g}, and rewards are at most {highest:g}: no completion would be "
            "imitated: lower it"
        )


def _shaped(bounds: Bounds, shaping: ShapingConfig) -> Bounds:
    """Return the bounds before `clip` and `normalize`."""
    low, high = bounds
    if shaping.overlong is not None:
        low -= shaping.overlong.penalty
    if shaping.truncation is not None and shaping.truncation.reward is not None:
        low, high = min(low, shaping.truncation.reward), max(high, shaping.truncation.reward)
    elif shaping.truncation is not None and shaping.truncation.factor is not None and low > 0:
        low *= shaping.truncation.factor
    return low, high
