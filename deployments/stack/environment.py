"""The environment variables that point every command, flow and job to the stack's services.

A service is selected as a whole: if the user's own variables point at another store, Ray cluster or Prefect API, none
of the stack's variables for that service are used, so that an endpoint is never combined with credentials of another.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from deployments.stack.files import read_variables
from rlhf_core.config.texts import names_a_host
from rlhf_core.errors import StackError, one_line
from rlhf_core.recipe.known_recipes import RECIPES_VARIABLE
from rlhf_core.system.paths import user_path
from rlhf_core.system.variables import folder_of

HOME = Path(__file__).resolve().parents[2]  # the root of a checkout, or the environment's site-packages
IS_INSTALLED = HOME.name in ("site-packages", "dist-packages")
BUCKET = "alignment"
RECIPES = HOME / "deployments" / "recipes"

# The variables that select an external service instead of starting one, and the others that belong to each service.
SELECTORS: Mapping[str, tuple[str, ...]] = {
    "s3": ("ALIGNMENT_STORE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
    "ray": ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"),
    "prefect": ("PREFECT_API_URL",),
}
_ALSO: Mapping[str, tuple[str, ...]] = {
    "s3": (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_PROFILE",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_EC2_METADATA_DISABLED",
    ),
    "ray": ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"),
    "prefect": ("PREFECT_HOME", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING"),
}
QUIET: Mapping[str, str] = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def stack_folder() -> Path:
    """Return the folder of the stack's state: ALIGNMENT_STACK_DIR, or the default of a checkout or an installation.

    Raises VariableError.
    """
    chosen = folder_of("ALIGNMENT_STACK_DIR")
    if chosen is None:
        # site-packages is lost with its environment, and the stack's folder has the artifacts
        chosen = user_path("~/.local/share/alignment/stack") if IS_INSTALLED else HOME / ".local-stack"
    return chosen.resolve()


def python_path() -> str:
    """Return PYTHONPATH for the processes of the stack, which run in any folder."""
    # site-packages is in `sys.path` anyway, and must not come before the standard library
    ours = "" if IS_INSTALLED else str(HOME)
    return os.pathsep.join(filter(None, (ours, os.environ.get("PYTHONPATH"))))


def environment_file(folder: Path) -> Path:
    return folder / "stack.env"


def recorded_environment(folder: Path) -> dict[str, str]:
    """Return the variables written by the last `up`; empty if there was none.

    Raises StackError if the file is damaged.
    """
    file = environment_file(folder)
    return read_variables(file) if file.is_file() else {}


def stack_environment() -> dict[str, str]:
    """Return the variables of the services that the stack started, and the switches that disable telemetry.

    Raises StackError if there is no stack.
    """
    recorded = recorded_environment(stack_folder())
    if not recorded:
        raise StackError(f"there is no local stack in {stack_folder()}: start it with `alignment up`")
    return recorded


def external_services(environment: Mapping[str, str], recorded: Mapping[str, str]) -> frozenset[str]:
    """Return the services (s3, ray, prefect) for which `environment` names one that the stack did not start."""
    return frozenset(
        service
        for service, names in SELECTORS.items()
        if any(environment.get(name) and environment[name] != recorded.get(name) for name in names)
    )


def merged_environment(environment: Mapping[str, str], recorded: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` with the variables of the stack's services, except those that it names external ones for."""
    merged = dict(environment)
    external = external_services(environment, recorded)
    of_service = {name: service for service in SELECTORS for name in (*SELECTORS[service], *_ALSO[service])}
    owned = {of_service[name] for name in recorded if name in of_service} - external
    for name, service in of_service.items():
        if service in owned:
            merged.pop(name, None)  # a stray AWS_SESSION_TOKEN would invalidate the stack's credentials
    for name, value in recorded.items():
        service_of_name = of_service.get(name)
        if service_of_name is None:
            merged.setdefault(name, value)
        elif service_of_name in owned:
            merged[name] = value
    return merged


def require_api_url(url: str | None) -> None:
    """Raise StackError if it is no address."""
    if url is None:
        return
    is_text = url.isprintable() and " " not in url
    if not (is_text and names_a_host(url) and urlsplit(url).scheme in ("http", "https")):
        raise StackError(f"PREFECT_API_URL={one_line(url)} is not an address of a server, such as http://host:4200/api")


def load_stack_environment() -> None:
    """Set this process's variables: those of the stack, if there is one, and the folder of the shipped recipes.

    Call it before Prefect is imported.
    """
    os.environ.setdefault(RECIPES_VARIABLE, str(RECIPES))
    recorded = recorded_environment(stack_folder())
    merged = merged_environment(os.environ, recorded)
    for name in set(os.environ) - set(merged):
        del os.environ[name]
    os.environ.update(merged)
