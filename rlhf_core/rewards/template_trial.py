"""Does a template of the recipe end, and does a row have what it asks for? Tried in a process of its own, which may be
ended: a template is a program."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import TemplateSyntaxError

from rlhf_core.children import how_it_ended
from rlhf_core.errors import RewardError
from rlhf_core.rewards.templates import TextTemplate

_TRIAL_SECONDS = 10
_TRIAL_MEMORY = 2**32  # bytes
_OUT_OF_MEMORY, _CANNOT_BE_WRITTEN = 3, 4  # exit statuses of the trial


def template_problem(
    template: str, rows: Sequence[Mapping[str, Any]], texts: Mapping[str, str], *, lenient: bool = False
) -> str | None:
    """Why the template cannot be written for one of the rows; None if it can.

    texts: what stands in the place of completions, by the names that the template has for them. lenient: only whether
    it ends, with or without an error.
    """
    request = {"template": template, "rows": list(rows), "texts": dict(texts), "lenient": lenient}
    return _tried(json.dumps(request, default=str))


@lru_cache(maxsize=32)
def _tried(request: str) -> str | None:
    command = [sys.executable, "-m", "rlhf_core.rewards.template_trial"]
    try:
        tried = subprocess.run(
            command, input=request.encode(), timeout=_TRIAL_SECONDS, capture_output=True, check=False
        )
    except subprocess.TimeoutExpired:
        return f"the template is not written within {_TRIAL_SECONDS} s: correct its loops"
    if tried.returncode == 0:
        return None
    if tried.returncode == _OUT_OF_MEMORY:
        return f"the template needs over {_TRIAL_MEMORY // 2**30} GiB of memory: correct it"
    said = tried.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    if tried.returncode == _CANNOT_BE_WRITTEN:
        return said
    return f"the template could not be tried ({said or f'its process {how_it_ended(tried.returncode)}'})"


def _try() -> int:
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = _TRIAL_MEMORY if most == resource.RLIM_INFINITY else min(_TRIAL_MEMORY, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    request = json.load(sys.stdin)
    try:
        template = TextTemplate(request["template"])
    except MemoryError:
        return _OUT_OF_MEMORY
    except TemplateSyntaxError as error:  # a filter that there is none of
        print(f"line {error.lineno} of the template: {error.message}", file=sys.stderr)
        return _CANNOT_BE_WRITTEN
    try:
        for row in request["rows"]:
            template(row, prompt=str(row["prompt"][-1]["content"]), **request["texts"])
    except MemoryError:
        return _OUT_OF_MEMORY
    except RewardError as error:
        if request["lenient"]:
            return 0
        print(" ".join(str(error).split()), file=sys.stderr)
        return _CANNOT_BE_WRITTEN
    return 0


if __name__ == "__main__":
    sys.exit(_try())
