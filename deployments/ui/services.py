"""The services as their page shows them: address, whether they answer, and how to sign in. Never a secret itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from deployments.stack.environment import external_services, recorded_environment, stack_folder
from deployments.stack.services import api_headers
from rlhf_core.artifacts.store import Store
from rlhf_core.errors import AlignmentError, StackError, reason_of

_SECONDS = 3.0  # that a service has to answer


@dataclass(frozen=True, slots=True)
class Login:
    """A variable with a secret, what asks for it, and the command that prints it."""

    variable: str
    asked: str
    command: str


@dataclass(frozen=True, slots=True)
class ServiceView:
    name: str
    what: str
    address: str  # empty: none is configured
    link: str  # empty: it has no page of its own
    is_of_stack: bool  # started by `alignment up`
    problem: str  # empty: it answers
    logins: Sequence[Login]  # of the variables that are set


# The variables that sign in, by service as the stack names it, and what asks for each.
_LOGINS: Mapping[str, Mapping[str, str]] = {
    "prefect": {
        "PREFECT_API_AUTH_STRING": "the UI asks for it once, in one field: the whole value, USER:PASSWORD",
        "PREFECT_API_KEY": "clients send it as a key",
    },
    "ray": {"RAY_AUTH_TOKEN": "the dashboard asks for it once, as a token"},
    "s3": {
        "AWS_ACCESS_KEY_ID": "the access key of an S3 client",
        "AWS_SECRET_ACCESS_KEY": "the secret key of an S3 client",
        "AWS_PROFILE": "the profile that has the keys",
    },
}


def read_services(store: Store, environment: Mapping[str, str]) -> list[ServiceView]:
    """Return Prefect, Ray and the store, as far as the variables of `environment` configure them."""
    recorded = recorded_environment(stack_folder())
    external = external_services(environment, recorded)
    api = environment.get("PREFECT_API_URL", "")
    ray = environment.get("RAY_API_SERVER_ADDRESS") or environment.get("RAY_ADDRESS", "")
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL", "")
    is_s3 = store.url.startswith("s3://")
    checks: Mapping[str, Callable[[], None]] = {
        "prefect": lambda: _get(f"{api}/admin/version", api_headers(environment)),
        "ray": lambda: _ask_ray(ray, environment.get("RAY_AUTH_TOKEN", "")),
        "s3": store.reach,
    }
    with ThreadPoolExecutor(len(checks)) as pool:
        problems = dict(zip(checks, pool.map(_problem, checks.values()), strict=True))

    def view(name: str, title: str, what: str, address: str, link: str) -> ServiceView:
        is_of_stack = name not in external and any(variable in recorded for variable in _LOGINS[name])
        command = "alignment env | grep {}" if is_of_stack else 'echo "${}"'
        logins = [
            Login(variable, asked, command.format(variable))
            for variable, asked in _LOGINS[name].items()
            if environment.get(variable) and (name != "s3" or is_s3)
        ]
        problem = problems[name] if address else "not configured"
        return ServiceView(title, what, address, link, is_of_stack, problem, logins)

    server = _without_login(environment.get("PREFECT_UI_URL") or api.removesuffix("/api"))
    dashboard = _without_login(ray)
    at = f" at {_without_login(endpoint)}" if is_s3 and endpoint else ""
    return [
        view("prefect", "Prefect", "runs, their states and schedules; starts recipes from a form", server, server),
        view(
            "ray", "Ray", "jobs, their logs, and the machines they run on", dashboard,
            dashboard if dashboard.startswith("http") else "",
        ),
        view("s3", "Store", "all results; these pages read it", f"{store.url}{at}", ""),
    ]  # fmt: skip


def _problem(check: Callable[[], None]) -> str:
    try:
        check()
    except httpx.HTTPStatusError as error:  # whose message has the address, and a login in it
        return f"it answers with status {error.response.status_code}"
    except (httpx.HTTPError, httpx.InvalidURL, AlignmentError) as error:
        return reason_of(error)
    return ""


def _get(url: str, headers: Mapping[str, str]) -> None:
    httpx.get(url, timeout=_SECONDS, headers=headers).raise_for_status()


def _ask_ray(address: str, token: str) -> None:
    if not address.startswith("http"):
        raise StackError("this is no dashboard: set RAY_API_SERVER_ADDRESS to one, such as http://host:8265")
    _get(f"{address}/api/jobs/", {"Authorization": f"Bearer {token}"} if token else {})


def _without_login(url: str) -> str:
    """Return a URL without the user and password that it may have, and without its query."""
    if "://" not in url:
        return url.rpartition("@")[2]
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
