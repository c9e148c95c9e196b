"""Errors in Prefect's settings, which it reads from the environment on import, in one sentence."""

from __future__ import annotations

import io
import os
import sys
import tomllib
from collections.abc import Mapping
from contextlib import redirect_stderr
from typing import Any

from pydantic import ValidationError

from deployments.stack.environment import require_api_url
from rlhf_core.errors import StackError, one_line

_FOLLOWS = "default_factory_not_called"  # the type of an error that another one causes


def import_prefect() -> None:
    """Import Prefect, which takes a second. Raises StackError if it cannot read one of its settings."""
    require_api_url(os.environ.get("PREFECT_API_URL") or None)
    printed = io.StringIO()  # it prints an error too
    try:
        with redirect_stderr(printed):
            from prefect.settings import get_current_settings

            url = get_current_settings().api.url
    except ValidationError as error:
        problem = next(detail for detail in error.errors() if detail["type"] != _FOLLOWS)
        raise StackError(_sentence(problem)) from error
    except tomllib.TOMLDecodeError as error:
        raise StackError(f"Prefect's profiles.toml in PREFECT_HOME is not TOML ({error}): correct it") from error
    sys.stderr.write(printed.getvalue())
    require_api_url(url)


def _sentence(problem: Mapping[str, Any]) -> str:
    """Describe the error with its variable: pydantic has only the field."""
    field = str(problem["loc"][-1]).upper() if problem["loc"] else ""
    names = sorted(name for name in os.environ if name.startswith("PREFECT_") and name.endswith(field))
    matching = [name for name in names if os.environ[name].casefold() == str(problem["input"]).casefold()]
    if matching:
        value = one_line(os.environ[matching[0]])
        return f"Prefect cannot read {matching[0]}={value} ({problem['msg']}): correct or unset it"
    where = f"`{field.lower()}`" if field else "one of its settings"
    return f"Prefect cannot read {where} ({problem['msg']}): correct the PREFECT_… variable, or Prefect's profile"
