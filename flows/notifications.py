"""Messages about runs to a webhook: `notify`, and the hook that the flows have for failures."""

from __future__ import annotations

import hashlib
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from http.client import HTTPException
from threading import Thread
from typing import Any

from prefect.blocks.system import Secret
from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow
from prefect.logging.loggers import flow_run_logger
from prefect.utilities.urls import url_for

from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.artifacts.store import Store
from rlhf_core.config.notify import Event, NotifyConfig
from rlhf_core.config.texts import names_a_host
from rlhf_core.errors import AlignmentError, ConflictError, StoreError, one_line, shortened
from rlhf_core.recipe.loading import load_recipe

SECONDS = 10.0  # of silence that end a request; one that never ends is left alone after twice as many

_LONGEST = 1000  # characters of a message
_said: set[str] = set()


def notify(
    event: Event,
    text: str,
    settings: NotifyConfig | None,
    *,
    recipe: str,
    store: Store | None,
    run_id: str = "",
    say: Callable[[str], None] = print,
) -> None:
    """Send a message once for this event and text of the run, however often the run is retried.

    settings: the recipe's `notify`; None: nothing is sent. store: remembers what was sent; None, or no `run_id`: the
    message is sent in any case.
    A webhook that fails raises nothing; `say` gets the reason, once in a process.
    """
    if settings is None or event not in settings.on:
        return
    text = shortened(one_line(text), _LONGEST)
    try:
        url = _url(settings)
        if url and _is_new(store, run_id, event, text):
            _send(url, _message(settings.form, event, text, recipe, run_id))
    except (_NotSentError, StoreError) as error:
        sentence = f"no notification of `{event}` was sent: {error}"
        if sentence not in _said:
            _said.add(sentence)
            say(sentence)


def notify_failure(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Notify of a run that failed or crashed, as a hook of its flow."""
    name, overrides = str(flow_run.parameters.get("recipe", "")), flow_run.parameters.get("overrides", [])
    settings: NotifyConfig | None = NotifyConfig()
    try:
        recipe = load_recipe(name, overrides).recipe
        settings, name = recipe.notify, recipe.name
    except AlignmentError:
        pass  # which is why it failed: the stack's webhook is told
    try:
        store = open_store(store_url())
    except AlignmentError:
        store = None
    text = (state.message or str(state.name)).removeprefix("Flow run encountered an exception: ")
    notify("failed", text, settings, recipe=name, store=store, run_id=str(flow_run.id),
           say=flow_run_logger(flow_run, flow).warning)  # fmt: skip


class _NotSentError(Exception):
    """Its message has no URL."""


def _url(settings: NotifyConfig) -> str:
    """Return the webhook's URL; empty if it is not set. Raises _NotSentError if that is a mistake."""
    if settings.webhook_block:
        where = f"the Prefect Secret block `{settings.webhook_block}`"
        try:
            block: Any = Secret.load(settings.webhook_block)
            url = str(block.get())
        except Exception as error:  # of Prefect or of its server
            raise _NotSentError(f"{where} cannot be read ({type(error).__name__}): create it, or remove it") from None
    else:
        where, url = settings.webhook, os.environ.get(settings.webhook, "")
        if not url and "webhook" in settings.model_fields_set:
            raise _NotSentError(f"{where} is not set where the flow runs: set it to the URL of the webhook")
    if url and not (url.startswith(("http://", "https://")) and names_a_host(url)):
        raise _NotSentError(f"{where} has no http(s) URL: correct it")
    return url


def _is_new(store: Store | None, run_id: str, event: Event, text: str) -> bool:
    """Mark the message as sent. Return False if it was."""
    if store is None or not run_id:
        return True
    digest = hashlib.sha256(f"{event} {text}".encode()).hexdigest()[:16]
    try:
        store.put_if_absent(f"runs/{run_id}/notified/{event}-{digest}.json", json.dumps({"text": text}).encode())
    except ConflictError:
        return False
    return True


def _message(form: str, event: Event, text: str, recipe: str, run_id: str) -> dict[str, str]:
    page = (run_id and url_for("flow-run", obj_id=run_id)) or ""
    if form == "json":
        return {"event": event, "recipe": recipe, "run": run_id, "text": text, "page": page,
                "time": datetime.now(UTC).isoformat(timespec="seconds")}  # fmt: skip
    lines = f"*{event.replace('_', ' ')}* {_escaped(recipe)}: {_escaped(text)}"
    return {"text": f"{lines}\n<{page}|the run>" if page else lines}


def _escaped(text: str) -> str:
    """As Slack asks for: a text could name everyone in a channel."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _send(url: str, message: dict[str, str]) -> None:
    """Raises _NotSentError. The thread bounds the time of the whole; httpx would log the URL."""
    request = urllib.request.Request(  # noqa: S310  the URL was checked
        url, json.dumps(message).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    failures: list[str] = []
    thread = Thread(target=lambda: failures.append(_failure(request)), name="notification", daemon=True)
    thread.start()
    thread.join(2 * SECONDS)
    failure = failures[0] if failures else f"no answer in {2 * SECONDS:.0f} s"
    if failure:
        raise _NotSentError(f"the webhook failed ({failure})")


def _failure(request: urllib.request.Request) -> str:
    """Return why the request failed, without what may quote its URL; empty if it did not."""
    try:
        with urllib.request.urlopen(request, timeout=SECONDS):  # noqa: S310
            return ""
    except urllib.error.HTTPError as error:
        return f"status code {error.code}"
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        return getattr(reason, "strerror", None) or type(reason).__name__
