"""Trial of a recipe's template: it must end, and rows must have its fields. A template is a program, so the trial runs
in a process that can be killed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import TemplateSyntaxError

from rlhf_core.errors import RewardError
from rlhf_core.processes.lines import ProcessError
from rlhf_core.processes.trial import tried
from rlhf_core.rewards.templates import TextTemplate

_TRIAL_SECONDS = 10
_TRIAL_MEMORY = 2**32  # bytes


def template_problem(
    template: str, rows: Sequence[Mapping[str, Any]], texts: Mapping[str, str], *, lenient: bool = False
) -> str | None:
    """Return why the template cannot be rendered for one of the rows; None if it can.

    texts: stand-ins for completions, by their names in the template. lenient: check only that rendering ends, with or
    without an error.
    """
    request = {"template": template, "rows": list(rows), "texts": dict(texts), "lenient": lenient}
    return _problem(json.dumps(request, default=str))


@lru_cache(maxsize=32)
def _problem(request: str) -> str | None:
    try:
        return tried(_TRIAL_SECONDS, _TRIAL_MEMORY, problem_of_rows, request)
    except TimeoutError:
        return f"the template is not written within {_TRIAL_SECONDS} s: correct its loops"
    except MemoryError:
        return f"the template needs over {_TRIAL_MEMORY // 2**30} GiB of memory: correct it"
    except ProcessError as error:
        return f"the template could not be rendered (its process {error})"


def problem_of_rows(request: str) -> str | None:
    """Return `template_problem` in this process. request: its arguments, as JSON."""
    trial = json.loads(request)
    try:
        template = TextTemplate(trial["template"])
    except TemplateSyntaxError as error:  # a filter that there is none of
        return f"line {error.lineno} of the template: {error.message}"
    try:
        for row in trial["rows"]:
            template(row, prompt=str(row["prompt"][-1]["content"]), **trial["texts"])
    except RewardError as error:
        return None if trial["lenient"] else " ".join(str(error).split())
    return None
