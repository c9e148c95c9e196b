"""Messages to a webhook, on a real HTTP server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, get_args
from uuid import UUID

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_UI_URL, temporary_settings
from prefect.states import Failed

from flows import notifications
from flows.alignment import alignment
from flows.notifications import notify, notify_failure
from flows.rounds import notify_verdict
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.rounds import RoundEnd, Verdict
from rlhf_core.artifacts.store import Store
from rlhf_core.config.notify import NotifyConfig
from rlhf_core.errors import RecipeError
from rlhf_core.recipe.loading import load_recipe
from tests.rlhf_core.recipe_text import RECIPE
from tests.services import free_ports, http_server

pytestmark = pytest.mark.parts

RUN = "0d1b9f5e-8c0a-4c5e-9d54-0a8a3c1f2b6d"
PATH = "/services/hidden-word"
PROMPTS = ArtifactRef(stage="round_prompts", key="a" * 64)


@dataclass
class Webhook:
    url: str = ""
    status: int = 200
    seconds: float = 0.0
    messages: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture
def webhook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Webhook]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == PATH
            hook.messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            time.sleep(hook.seconds)
            self.send_response(hook.status)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    hook = Webhook()
    monkeypatch.setattr(notifications, "_said", set())
    with http_server(Handler) as address, temporary_settings({PREFECT_UI_URL: "http://prefect.test"}):
        hook.url = address + PATH
        monkeypatch.setenv("ALIGNMENT_WEBHOOK", hook.url)
        yield hook


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def test_an_event_is_sent_once_for_a_run_that_is_retried(webhook: Webhook, store: Store) -> None:
    for _ in range(2):
        notify("refused", "round 3: worse", NotifyConfig(), recipe="tiny", store=store, run_id=RUN)
    notify("refused", "round 4: worse", NotifyConfig(), recipe="tiny", store=store, run_id=RUN)
    notify("refused", "round 3: worse", NotifyConfig(), recipe="tiny", store=store, run_id="another")
    assert [(message["text"], message["run"]) for message in webhook.messages] == [
        ("round 3: worse", RUN),
        ("round 4: worse", RUN),
        ("round 3: worse", "another"),
    ]
    kept = [store.get(path) for path in store.list("runs")]
    assert len(kept) == 3
    assert not any(b"hidden-word" in content for content in kept if content)


def test_slack_gets_text_that_names_nobody(webhook: Webhook, store: Store) -> None:
    slack = NotifyConfig(form="slack")
    notify("over_budget", "<!channel> a & b", slack, recipe="tiny", store=store, run_id="")
    assert webhook.messages == [{"text": "*over budget* tiny: &lt;!channel&gt; a &amp; b"}]


def test_events_that_are_not_asked_for_and_no_webhook_send_nothing(
    webhook: Webhook, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    notify("promoted", "x", NotifyConfig(on=("failed",)), recipe="tiny", store=store, run_id=RUN, say=said.append)
    notify("promoted", "x", None, recipe="tiny", store=store, run_id=RUN, say=said.append)
    monkeypatch.delenv("ALIGNMENT_WEBHOOK")
    notify("promoted", "x", NotifyConfig(), recipe="tiny", store=store, run_id=RUN, say=said.append)
    assert (webhook.messages, said, [*store.list("runs")]) == ([], [], [])
    named = NotifyConfig(webhook="TEAM_WEBHOOK")
    notify("promoted", "x", named, recipe="tiny", store=store, run_id=RUN, say=said.append)
    assert said == [
        "no notification of `promoted` was sent: TEAM_WEBHOOK is not set where the flow runs: set it to the URL of the "
        "webhook"
    ]


@pytest.mark.parametrize("failure", ["status", "slow", "closed", "no url"])
def test_a_webhook_that_fails_is_said_once_without_its_url(
    failure: str, webhook: Webhook, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "SECONDS", 0.3)
    webhook.status, webhook.seconds = (404, 0.0) if failure == "status" else (200, 1.0)
    if failure == "closed":
        monkeypatch.setenv("ALIGNMENT_WEBHOOK", f"http://127.0.0.1:{free_ports(1)[0]}{PATH}")
    if failure == "no url":
        monkeypatch.setenv("ALIGNMENT_WEBHOOK", "hidden-word")
    said: list[str] = []
    began = time.monotonic()
    for number in range(2):
        notify("stuck", f"phase {number}", NotifyConfig(), recipe="tiny", store=store, run_id=RUN, say=said.append)
    assert time.monotonic() - began < 3
    (sentence,) = said
    assert sentence.startswith("no notification of `stuck` was sent: ")
    assert "hidden-word" not in sentence
    if failure == "status":
        assert "status code 404" in sentence


def test_the_verdict_of_a_round_is_an_event(webhook: Webhook, store: Store) -> None:
    recipe = load_recipe("tiny-loop").recipe
    for number, verdict in enumerate(get_args(Verdict)):
        end = RoundEnd(number=number, verdict=verdict, reason="why", record=None, candidate=None, prompts=PROMPTS,
                       ended_at=datetime.now(UTC), run_id=RUN)  # fmt: skip
        notify_verdict(end, recipe, store, RUN, print)
    told = {message["event"]: message["text"] for message in webhook.messages}
    verdicts = list(get_args(Verdict))
    assert told == {
        "promoted": f"round {verdicts.index('accepted')}: why",
        "refused": f"round {verdicts.index('refused')}: why",
    }


def flow_run(recipe: str) -> FlowRun:
    return FlowRun(id=UUID(RUN), flow_id=UUID(RUN), name="n", parameters={"recipe": recipe, "overrides": []})


def test_the_hook_of_a_failed_flow_follows_its_recipe(
    webhook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALIGNMENT_STORE", str(tmp_path / "store"))
    failed = Failed(message="Flow run encountered an exception: StageError: sft: out of memory")
    (tmp_path / "r.yaml").write_text(RECIPE + "\nnotify: null\n")
    notify_failure(alignment, flow_run(str(tmp_path / "r.yaml")), failed)
    assert webhook.messages == []
    for _ in range(2):
        notify_failure(alignment, flow_run("no-such-recipe"), failed)
    (message,) = webhook.messages
    assert (message["event"], message["recipe"]) == ("failed", "no-such-recipe")
    assert message["text"] == "StageError: sft: out of memory"
    assert message["page"] == f"http://prefect.test/runs/flow-run/{RUN}"


def test_a_url_in_a_recipe_is_refused_and_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE + f"\nnotify: {{webhook: 'https://hooks.test{PATH}'}}\n")
    with pytest.raises(RecipeError, match=r"notify\.webhook") as raised:
        load_recipe(str(tmp_path / "r.yaml"))
    assert "hidden-word" not in str(raised.value)
