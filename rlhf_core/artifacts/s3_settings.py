"""Validation of the environment variables and files that an S3 client reads."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from ssl import SSLError
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from botocore.exceptions import (
    ConfigParseError,
    EndpointConnectionError,
    HTTPClientError,
    InvalidConfigError,
    InvalidProxiesConfigError,
    InvalidRegionError,
    ProfileNotFound,
    ProxyConnectionError,
)
from botocore.utils import validate_region_name
from tenacity import RetryCallState

from rlhf_core.config.texts import is_unicode, names_a_host
from rlhf_core.errors import StoreError, one_line

_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_LASTING = (FileNotFoundError, PermissionError, SSLError, InvalidProxiesConfigError, ValueError, TypeError)
_SILENT_SECONDS = 5.0  # of retries, before the message


def endpoint() -> tuple[str, str]:
    """Return the variable that names the server, and the server."""
    name = "AWS_ENDPOINT_URL_S3" if os.environ.get("AWS_ENDPOINT_URL_S3") else "AWS_ENDPOINT_URL"
    return name, os.environ.get(name) or "AWS S3"


def region() -> str | None:
    return next((os.environ[name] for name in _REGIONS if os.environ.get(name)), None)


def check_settings(url: str) -> None:
    """Raise StoreError, which names the variable, for a setting that prevents every request. url: the store's."""
    if not is_unicode(url):
        raise StoreError(f"{one_line(url)} is not valid UTF-8: correct the store's URL, ALIGNMENT_STORE")
    for name in _CREDENTIALS:
        value = os.environ.get(name, "")
        if not (value.isascii() and (value.isprintable() or not value)):
            raise StoreError(f"{name} contains an invalid character: copy the credential again")
    for name in _REGIONS:
        try:
            validate_region_name(os.environ.get(name) or "us-east-1")
        except InvalidRegionError:
            raise StoreError(
                f"{name}={one_line(os.environ[name])} is not a region, such as us-east-1: correct or unset it"
            ) from None
    bundle = os.environ.get("AWS_CA_BUNDLE")
    if bundle and not Path(bundle).exists():
        raise StoreError(f"AWS_CA_BUNDLE={one_line(bundle)}: there is no such file: correct or unset it")
    _check_proxies()


def _check_proxies() -> None:
    for scheme, proxy in getproxies().items():
        url = proxy if "://" in proxy else f"http://{proxy}"
        if scheme in ("http", "https") and not names_a_host(url):
            raise StoreError(f"{scheme}_proxy is not a proxy's address, such as http://host:3128: correct or unset it")


def client_problem(error: BaseException, server: str) -> str | None:
    """Return why no request could be sent to `server`; None if it was sent, or the server is at fault."""
    if isinstance(error, ProfileNotFound):
        profile = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
        return f"AWS_PROFILE={profile}: ~/.aws/config has no such profile: correct or unset it"
    if isinstance(error, ConfigParseError | InvalidConfigError):
        return f"the settings of S3 clients cannot be read ({error}): correct that file"
    if is_lasting(error):
        why = " ".join(str(error.__context__).split())
        return (
            f"no request can be made to {server} ({why}): correct AWS_CA_BUNDLE, the variables of proxies or the "
            "credentials"
        )
    if isinstance(error, ProxyConnectionError | EndpointConnectionError) and (proxy := _through_proxy(server)):
        return (
            f"no S3 server answers at {server} through the proxy of {proxy}: correct {proxy}, or name the server in "
            "no_proxy"
        )
    return None


def is_lasting(error: BaseException) -> bool:
    """Return whether the client failed to make its request for a permanent reason."""
    return type(error) is HTTPClientError and isinstance(error.__context__, _LASTING)


def _through_proxy(server: str) -> str:
    """Return the variable that sends requests for `server` through a proxy; empty if none does."""
    scheme, host = urlsplit(server).scheme or "https", urlsplit(server).hostname or ""
    return f"{scheme}_proxy" if scheme in getproxies() and not proxy_bypass(host) else ""


class WaitingNote:
    """Prints once, on standard error, that a call is retried."""

    def __init__(self) -> None:
        self._printed = False

    def __call__(self, state: RetryCallState) -> None:
        if not self._printed and (state.seconds_since_start or 0.0) > _SILENT_SECONDS:
            self._printed = True
            print(f"waiting for the S3 server at {endpoint()[1]}", file=sys.stderr, flush=True)
