"""What a run that fails before any job tells its webhook, on a real Prefect server."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from prefect.blocks.system import Secret
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, PREFECT_LOCAL_STORAGE_PATH, temporary_settings

from rlhf_core.errors import RecipeError
from tests.flows.few import few
from tests.rlhf_core.recipe_text import RECIPE
from tests.services import http_server

pytestmark = pytest.mark.system


def test_a_run_that_fails_says_so_at_the_webhook_of_a_secret_block(
    tmp_path: Path, prefect_api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[dict[str, str]] = []

    class Webhook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    recipe, home = tmp_path / "r.yaml", tmp_path / "prefect"
    recipe.write_text(RECIPE + "\nnotify: {webhook_block: team-webhook}\n")
    monkeypatch.setenv("ALIGNMENT_STORE", str(tmp_path / "store"))
    settings = {PREFECT_API_URL: prefect_api, PREFECT_HOME: home, PREFECT_LOCAL_STORAGE_PATH: home / "storage"}
    with http_server(Webhook) as url, temporary_settings(settings):
        Secret(value=url).save("team-webhook", overwrite=True)
        with pytest.raises(RecipeError):
            few(str(recipe), [])
        with get_client(sync_client=True) as client:
            runs = {str(run.id) for run in client.read_flow_runs()}
    (message,) = messages
    assert message["event"] == "failed"
    assert message["run"] in runs
    assert message["text"].startswith("RecipeError: data.questions: tasks.py: there is no such file")
    assert message["page"].endswith(f"/runs/flow-run/{message['run']}")
