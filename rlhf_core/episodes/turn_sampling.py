"""Sampling of a single reply, of which an environment or a program may choose the temperature and top_p."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlhf_core.config.numbers import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE
from rlhf_core.rollout.engine import SamplingParameters
from rlhf_core.types import Completion


def of_reply(run: SamplingParameters, temperature: Any, top_p: Any) -> SamplingParameters:
    """Return the parameters of a reply. run: those of the run; one that samples greedily stays greedy.

    temperature, top_p: None for those of the run. Raises ValueError for a value that cannot be sampled or trained.
    """
    lowest = LOWEST_TEMPERATURE if run.temperature else 0.0
    if temperature is not None and not _is_in(temperature, lowest, HIGHEST_TEMPERATURE):
        raise ValueError(
            f"temperature of {temperature!r:.100}; replies are sampled at {LOWEST_TEMPERATURE:g} to "
            f"{HIGHEST_TEMPERATURE:g}"
        )
    if top_p is not None and (not _is_in(top_p, 0, 1) or top_p == 0):
        raise ValueError(f"top_p of {top_p!r:.100}; it is a share above 0, up to 1")
    if run.temperature == 0:
        return run
    if top_p is not None and top_p != run.top_p and not run.top_k:
        raise ValueError(
            f"top_p of {top_p:g}, but this run samples from all tokens: set `sampling.top_k`, since training needs the "
            "tokens that were kept at each place"
        )
    return replace(
        run,
        temperature=run.temperature if temperature is None else float(temperature),
        top_p=run.top_p if top_p is None else float(top_p),
    )


def sampled_at(reply: Completion, parameters: SamplingParameters, run: SamplingParameters) -> Completion:
    """Return the reply with its temperature, if that is not the run's."""
    same = parameters.temperature == run.temperature
    return reply if same else replace(reply, temperature=parameters.temperature)


def _is_in(value: Any, lowest: float, highest: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and lowest <= value <= highest
