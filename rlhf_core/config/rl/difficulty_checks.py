"""Checks of `select` and `replay` against the other settings of RL."""

from __future__ import annotations

from rlhf_core.config.rl.settings import RLSettings


def scored_reward(config: RLSettings, setting: str) -> str:
    """Return the name of the reward whose scores are pass rates. Raises ValueError, for `setting`, if it is not one."""
    scorers, filtering = config.settings.scorers, config.settings.filtering
    if filtering is not None and filtering.score is not None:
        return filtering.score
    sure = [name for name, reward in scorers.items() if reward.gives_scores]
    names = sure or list(scorers)
    if len(names) != 1:
        raise ValueError(
            f"{setting} needs one reward that gives scores from 0 to 1, such as a verifier, and of {config.block}."
            f"rewards these may: {', '.join(names) or 'none'}; remove the others, or name one as filtering.score"
        )
    return names[0]


def require_scores(config: RLSettings) -> None:
    """Raise ValueError if `select` or `replay` cannot tell prompts apart by their scores."""
    for setting, is_set in {"select": config.select is not None, "replay": config.replay is not None}.items():
        if not is_set:
            continue
        scored_reward(config, setting)
        if config.max_lag:
            raise ValueError(
                f"{setting}: with asynchronous.max_lag={config.max_lag} prompts are drawn before the scores of earlier "
                "ones are known; remove one of them"
            )


def require_replayable(config: RLSettings) -> None:
    """Raise ValueError if replayed groups would train nothing, or with a wrong ratio."""
    replay, settings = config.replay, config.settings
    if replay is None:
        return
    if settings.group_size < 2:
        raise ValueError("replay: a group of one completion has no mixed outcome; raise group_size")
    if replay.share * config.prompts_per_step < 1:
        raise ValueError(
            f"replay.share={replay.share:g} of prompts_per_step={config.prompts_per_step} is less than one prompt: "
            "raise one of them"
        )
    example = settings.mismatch_example
    if example is not None and "mismatch" not in settings.model_fields_set:
        raise ValueError(
            f"replay: completions are up to max_age={replay.max_age} updates older than the weights that are trained "
            f"on them, and nothing corrects for it: give {config.block}.mismatch, such as {example}, or, to train on "
            f"them as they are, {config.block}.mismatch: null"
        )
    if config.validation is not None and config.ema_decay is not None:
        raise ValueError(
            "replay: a validation of the moving average (ema_decay) is a publish of its own, so the age of a "
            "group would not be known in steps; remove one of them"
        )
