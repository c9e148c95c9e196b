"""Settings of reward and judge servers: URL, timeouts, retries and templates of the text sent."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from rlhf_core.config.base import Config, operational
from rlhf_core.config.numbers import Attempts, Requests, Seconds
from rlhf_core.config.texts import HeaderVariable, Variable

_JINJA_NAMES = {"loop", "caller", "varargs", "kwargs", "self"}  # in loops and macros
_URL = re.compile(r"https?://(?P<user>[^/@]*@)?[^/@\s]+\S*")


class ServerConfig(Config):
    """One server, or several equal ones.

    A recipe is kept with every result and must not contain secrets: name environment variables instead.
    """

    url: str | None = Field(default=None, description="URL of the server, http:// or https://, without a password")
    urls: tuple[str, ...] = Field(default=(), description="URLs of several equal servers, instead")
    url_variable: Variable | None = Field(
        default=None, description="environment variable with the URL instead, or several separated by spaces"
    )
    header_variable: HeaderVariable | None = Field(
        default=None,
        description="environment variable `ALIGNMENT_HEADER_…` with a header to send, as `Authorization: Bearer abc`",
    )
    timeout_seconds: Seconds = Field(
        default=60.0, description="timeout of a request; one that timed out is not retried"
    )
    attempts: Attempts = operational(
        5,
        description="attempts of a request at each server, retried without connection or at status 429 or 5xx",
    )
    requests_per_server: Requests = operational(4, description="maximum number of concurrent requests to a server")

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if [self.url is not None, bool(self.urls), self.url_variable is not None].count(True) != 1:
            raise ValueError("give one of `url`, `urls` and `url_variable`")
        for url in (self.url,) if self.url is not None else self.urls:
            check_url(url)
        return self

    def named_variables(self) -> Iterator[str]:
        yield from (name for name in (self.url_variable, self.header_variable) if name is not None)


def check_url(url: str) -> None:
    """Raise ValueError if `url` is not a server's URL, or contains a user or a password."""
    parts = _URL.fullmatch(url)
    if parts is None:
        raise ValueError("the URL must begin with http:// or https:// and name a host")
    try:
        host, _ = urlsplit(url).hostname, urlsplit(url).port  # raises where it is no port
    except ValueError as error:
        raise ValueError(f"the URL cannot be used ({error})") from error
    try:
        (host or "").encode("idna")
    except UnicodeError as error:
        raise ValueError(
            f"no host can be called {(host or '')[:80]!r}: each part of it has 1 to 63 characters"
        ) from error
    if parts["user"]:
        raise ValueError("the URL holds a user or password: remove it, and give a header by `header_variable`")


def _template(*variables: str, judged: tuple[str, ...] = ()) -> Callable[[str], str]:
    """Return a validator of templates that use these variables; `judged` ones are required."""

    def check(text: str) -> str:
        names = _names(text)
        if unknown := names - set(variables):
            raise ValueError(f"the template names `{min(unknown)}`; there are {', '.join(variables)}")
        missing = next((name for name in judged if name not in names), None)
        if missing is not None:
            raise ValueError(f"the template does not name `{missing}`, so it would not be judged: add it")
        return text

    return check


def _names(text: str) -> set[str]:
    """Return a template's variables without evaluating it: Jinja's compiler would fold constants, however large."""
    from jinja2 import TemplateSyntaxError, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment()
    try:
        tree = environment.parse(text)
    except TemplateSyntaxError as error:
        raise ValueError(f"syntax error in line {error.lineno} of the template: {error.message}") from error
    except RecursionError as error:
        raise ValueError("not a template that can be read: hundreds of parts inside each other") from error
    defined = {macro.name for macro in tree.find_all(nodes.Macro)} | _JINJA_NAMES | environment.globals.keys()
    names = list(tree.find_all(nodes.Name))
    defined |= {name.name for name in names if name.ctx != "load"}
    return {name.name for name in names} - defined


HintTemplate = Annotated[str, AfterValidator(_template("prompt", "messages", "row"))]
CompletionTemplate = Annotated[
    str, AfterValidator(_template("prompt", "completion", "messages", "row", judged=("completion",)))
]
PairTemplate = Annotated[
    str, AfterValidator(_template("prompt", "first", "second", "messages", "row", judged=("first", "second")))
]
RubricTemplate = Annotated[
    str,
    AfterValidator(_template("prompt", "answers", "criteria", "messages", "row", judged=("answers", "criteria"))),
]
