"""Agents of other frameworks, as programs that play an episode. `PROGRAMS` lists all."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_core.errors import RecipeError
from rlhf_core.processes import openrlhf_agents, trl_environments, verifiers_environments
from rlhf_core.processes.user_code import why_unfit


@dataclass(frozen=True, slots=True)
class Form:
    # Returns what an episode calls, from the function of the file, its options, and its name for messages. Raises
    # RecipeError if the function is not one of the framework's.
    player: Callable[[Callable[..., Any], Mapping[str, Any], str], Callable[..., Any]]
    prepare: Callable[[], None] = lambda: None  # called before the file is run


PROGRAMS: Mapping[str, Form] = {
    "openrlhf": Form(openrlhf_agents.player, openrlhf_agents.stand_in),  # of `executor`
    "trl": Form(trl_environments.player),  # of `agent`
    "verifiers": Form(verifiers_environments.player, verifiers_environments.without_monitor),  # of `agent`
}


def prepare(kind: str, form: str) -> None:
    """Prepare this process for a file with a program of another framework, before the file is run."""
    if kind == "program" and form in PROGRAMS:
        PROGRAMS[form].prepare()


def player_of(form: str, function: Callable[..., Any], options: Mapping[str, Any], name: str) -> Callable[..., Any]:
    """Return what an episode calls, as a program of ours. Raises RecipeError if the function does not fit its form."""
    try:
        inspect.signature(function).bind(**options)
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"{name} must take its options {sorted(options)}, by these names: {why_unfit(error)}"
        ) from error
    return PROGRAMS[form].player(function, options, name)
