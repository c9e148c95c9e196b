"""Checks of the models of an RL run that are apart from the policy."""

from __future__ import annotations

from rlhf_core.config.engines.placement import ModelPlacement
from rlhf_core.config.engines.training import SHARED_BY_RANKS
from rlhf_core.config.rl.settings import RLSettings


def require_groups(config: RLSettings) -> None:
    """Raise ValueError if the models of a group cannot share their workers."""
    first: dict[str, str] = {}
    for role, placement in config.own_placements.items():
        if placement.group is None:
            continue
        other = first.setdefault(placement.group, role)
        if placement != config.own_placements[other]:
            raise ValueError(
                f"{_setting(config, role)} and {_setting(config, other)} are in one group, `{placement.group}`, and "
                f"differ in {_difference(placement, config.own_placements[other])}: the models of a group share its "
                "workers; set both alike"
            )
        for setting in SHARED_BY_RANKS:
            shared = [getattr(config.engine_of(each), setting) for each in (role, other)]
            if shared[0] != shared[1]:
                raise ValueError(
                    f"{_setting(config, role)} and {_setting(config, other)} are in one group, `{placement.group}`, "
                    f"and their engines have {setting}={shared[0]} and {shared[1]}; set both alike"
                )
        judge = next((each for each in (role, other) if each.startswith("reward:")), None)
        if config.max_lag and judge is not None and not (role.startswith("reward:") and other.startswith("reward:")):
            raise ValueError(
                f"asynchronous: {_setting(config, judge)}.group has a reward model, which judges completions while the "
                f"other models of `{placement.group}` score or train; give it another group"
            )


def require_equal_draws(config: RLSettings) -> None:
    """Raise ValueError if the critic would draw other random values on workers of its own."""
    if config.dropout and "critic" in config.own_placements:
        raise ValueError(
            f"{_setting(config, 'critic')}: with `dropout` the policy and the critic draw from one random generator, "
            "on the same workers; remove one of them"
        )


def _setting(config: RLSettings, role: str) -> str:
    kind, _, name = role.partition(":")
    place = {"reference": "kl", "reward": f"rewards.{name}"}.get(kind, kind)
    return f"{config.block}.{place}.placement"


def _difference(placement: ModelPlacement, other: ModelPlacement) -> str:
    values, others = placement.model_dump(), other.model_dump()
    return ", ".join(f"{name} ({values[name]} and {others[name]})" for name in values if values[name] != others[name])
