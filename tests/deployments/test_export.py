"""`alignment export`: a folder that transformers loads, its card, the hub, and GGUF."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from deployments.cli.main import app
from rlhf_core.artifacts.manifest import ArtifactRef, Kind, Manifest
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.registry import move_alias
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.inference.model_card import public
from tests.rlhf_core.artifacts.manifests import manifest
from tests.rlhf_core.stages.supervised_runs import base_model
from tests.services import http_server

pytestmark = pytest.mark.parts

IDS = torch.tensor([[3, 1, 4, 1, 5]])
COMMIT = "c" * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_model(tmp_path_factory.mktemp("model"), hidden=64).folder


class Shelf:
    """A store with a base of the hub, a dataset, a policy, an adapter, and evaluations of them."""

    def __init__(self, url: str, folder: Path, scratch: Path) -> None:
        self.repository = ArtifactRepository(open_store(url))
        self._scratch = scratch
        source = {"type": "hub", "repository": "some/base", "revision": "main"}
        base = self.add("base", folder, "base", Kind.BASE_MODEL, config={"source": source}, pins={"hf://x": COMMIT})
        files = {"type": "files", "paths": ["/home/ann/rows.jsonl", "https://ann:word@host/rows?sig=key"]}
        gathered = {"type": "hub", "repository": "some/rows", "split": "train"}
        data = self.add(
            "talks", None, "dataset", Kind.DATASET, metrics={"rows": 1234, "dropped": 5},
            config={"mix": [{"source": files, "weight": 1.0}, {"source": gathered, "weight": 1.0}]},
        )  # fmt: skip
        settings = {"epochs": 2, "server": {"api_key": "sk-1", "url": "http://ann:pw@judge:80/v1?token=t"}}
        parents = {"model": base, "dataset": data}
        self.policy = self.add("sft", folder, "sft", Kind.POLICY, config=settings, parents=parents, recipe="bot")
        self.evaluation = self.add(
            "evaluation.sft", None, "evaluation", Kind.EVALUATION, parents={"model": self.policy, "dataset": data},
            metrics={"pass@1": 0.4312, "pass@1_low": 0.38, "pass@1_high": 0.4831, "prompts": 200},
            config={"dataset": "held_out"},
        )  # fmt: skip
        adapted = peft.get_peft_model(
            AutoModelForCausalLM.from_pretrained(str(folder)),
            peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        )
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.5)
        made = scratch / "lora"
        adapted.save_pretrained(str(made))
        AutoTokenizer.from_pretrained(folder).save_pretrained(made)
        self.adapter = self.add("lora", made, "sft", Kind.ADAPTER, parents=parents)
        on_policy = {"model": self.policy, "dataset": data}
        self.second_adapter = self.add("lora on sft", made, "sft", Kind.ADAPTER, parents=on_policy)
        move_alias(self.repository.store, "bot", "best", self.policy, by="a", reason="")

    def add(self, name: str, folder: Path | None, stage: str, kind: Kind, **changes: Any) -> ArtifactRef:
        if folder is None:
            folder = self._scratch / name
            folder.mkdir()
            (folder / "rows.txt").write_text(name)
        stored: Manifest = self.repository.publish(manifest(name, stage, kind=kind, **changes), folder)
        return stored.ref


@pytest.fixture
def shelf(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    monkeypatch.setenv("ALIGNMENT_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("ALIGNMENT_STACK_DIR", str(tmp_path / "no stack"))
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "cache"))
    return Shelf(str(tmp_path / "store"), folder, tmp_path)


def export(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["export", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout.strip()


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["export", *arguments])
    assert done.exit_code == 1, done.output
    return done.stderr.strip().splitlines()[-1]


def logits(folder: Path, **loading: Any) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **loading)
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


def test_a_model_is_a_folder_that_transformers_loads_with_a_card(shelf: Shelf, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert export("bot/best", "--to", str(out), "--license", "apache-2.0") == str(out)
    assert torch.equal(logits(out), logits(folder))
    assert AutoTokenizer.from_pretrained(out).vocab_size > 0
    card = ModelCard.load(out / "README.md")
    data = card.data
    assert (data.license, data.base_model, data.library_name, data.datasets, data.model_name) == (
        "apache-2.0", "some/base", "transformers", ["some/rows"], "bot",
    )  # fmt: skip
    assert [(r.metric_type, r.metric_value, r.dataset_name) for r in data.eval_results] == [
        ("pass@1", 0.4312, "held_out"), ("prompts", 200, "held_out"),
    ]  # fmt: skip
    for line in (
        "| pass@1 | 0.431 (0.380–0.483) |",
        "| talks | files rows.jsonl, https://host/rows; hub some/rows train | rows 1234, dropped 5 |",
        f"3. `{shelf.policy}` sft: policy, from ",
        '    "url": "http://judge:80/v1"',
        '    "api_key": "(left out)",',
    ):
        assert line in card.text, card.text
    for hidden in ("sk-1", "ann", "word", "sig=", "token=t", str(tmp_path), "/home"):
        assert hidden not in str(card), hidden
    assert "exists already" in refused("best", "--to", str(out))
    assert sorted(path.name for path in tmp_path.glob("*export*")) == []


def test_an_adapter_names_its_base_or_is_merged(shelf: Shelf, folder: Path, tmp_path: Path) -> None:
    told = json.loads(export(shelf.adapter.full, "--to", str(tmp_path / "adapter"), "--json"))
    assert told == {"target": str(tmp_path / "adapter"), "card": None}
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("some/base", COMMIT)
    card = ModelCard.load(tmp_path / "adapter" / "README.md")
    assert (card.data.library_name, "AutoPeftModelForCausalLM" in card.text) == ("peft", True)
    adapted = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), str(tmp_path / "adapter")
    )
    export(shelf.adapter.full, "--to", str(tmp_path / "merged"), "--merge")
    with torch.no_grad():
        expected = adapted(input_ids=IDS).logits
    torch.testing.assert_close(logits(tmp_path / "merged"), expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(expected, logits(folder), atol=1e-2)
    said = refused(shelf.second_adapter.full, "--to", str(tmp_path / "none"))
    assert "which is not on the hub as far as its manifest says: give --merge for the whole model, or --base" in said
    assert not (tmp_path / "none").exists()
    export(shelf.second_adapter.full, "--to", str(tmp_path / "named"), "--base", "me/sft")
    config = json.loads((tmp_path / "named" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("me/sft", None)


def test_what_is_no_model_is_refused(shelf: Shelf, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert (
        refused(shelf.evaluation.full, "--to", out)
        == f"error: {shelf.evaluation} is of the kind evaluation, not a model"
    )
    assert "is not an adapter: omit --merge and --base" in refused("best", "--to", out, "--merge")
    assert "`owner` is not a name on the hub" in refused("best", "--to", "hub:owner")
    assert "--public is for a repository on the hub" in refused("best", "--to", out, "--public")


def test_an_error_leaves_no_folder(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlhf_core.inference.exporting.model_card", interrupted)
    before = sorted(tmp_path.iterdir())
    assert CliRunner().invoke(app, ["export", "best", "--to", str(tmp_path / "out")]).exit_code == 130
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != "cache"] == before


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"hf_token": "x", "max_tokens": 5, "token": ""}, {"hf_token": "(left out)", "max_tokens": 5, "token": ""}),
        (["/home/someone/x/model", "~/x/data.jsonl", "../up/rows.jsonl", "here/rows.jsonl"],
         ["model", "data.jsonl", "rows.jsonl", "here/rows.jsonl"]),
        ("s3://key:secret@host/bucket/x?sig=1", "s3://host/bucket/x"),
        ("file:///home/someone/x", "x"),
        ({"headers": {"Authorization": "Bearer x"}}, {"headers": "(left out)"}),
        ("/ is a sign\nof text", "/ is a sign\nof text"),
    ],
)  # fmt: skip
def test_settings_are_shown_without_secrets_and_places(value: Any, shown: Any) -> None:
    assert public(value) == shown


def test_the_hub_gets_one_commit_with_all_files(shelf: Shelf, folder: Path, tmp_path: Path) -> None:
    """Against a server that speaks the calls of an upload."""
    seen: list[tuple[str, dict[str, Any]]] = []
    files: dict[str, bytes] = {}

    class Hub(BaseHTTPRequestHandler):
        @property
        def repository(self) -> str:
            return f"http://{self.headers['Host']}/me/bot"

        def do_POST(self) -> None:
            path, body = self.path.partition("?")[0], self.rfile.read(int(self.headers["Content-Length"]))
            if path == "/api/models/me/bot/commit/main":
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                answer: dict[str, Any] = {"commitUrl": f"{self.repository}/commit/1", "commitOid": COMMIT}
                seen.append((path, {"auth": self.headers["Authorization"]}))
            else:
                asked = json.loads(body)
                seen.append((path, asked))
                answer = {"url": self.repository, "name": "me/bot", "id": "1"}
                if path.endswith("/preupload/main"):
                    modes = [
                        {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked["files"]
                    ]
                    answer = {"files": modes}
            self.answer(answer)

        def do_GET(self) -> None:
            self.answer({"id": "me/bot", "sha": COMMIT, "siblings": []})

        do_HEAD = do_GET  # noqa: N815

        def answer(self, answer: dict[str, Any]) -> None:
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with http_server(Hub) as endpoint:
        environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_secret"}
        environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "hub")}
        done = subprocess.run(
            [sys.executable, "-m", "deployments.cli.main", "export", "best", "--to", "hub:me/bot"],
            env=environment, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
    assert done.returncode == 0, (done.stderr, seen)
    assert done.stdout.splitlines()[-1] == f"{endpoint}/me/bot/commit/1"
    created = dict(seen)["/api/repos/create"]
    assert (created["name"], created["organization"], created["visibility"]) == ("bot", "me", "private")
    assert [path for path, _ in seen].count("/api/models/me/bot/commit/main") == 1
    assert files.keys() == {path.name for path in folder.iterdir()} | {"README.md"}
    assert files["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert "hf_secret" not in done.stdout + done.stderr + files["README.md"].decode()


def test_a_dry_run_prints_the_card_and_keeps_nothing(shelf: Shelf, tmp_path: Path) -> None:
    assert "| pass@1 | 0.431 (0.380–0.483) |" in export("best", "--to", str(tmp_path / "out"), "--dry-run")
    assert not (tmp_path / "out").exists()
