"""A recipe that branches: adapters, two reward models, PPO on both, an evaluation; every component is real."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_KEY, temporary_settings

from flows.alignment import alignment
from rlhf_core.artifacts.manifest import Kind, Manifest
from rlhf_core.pipeline.prepare import prepare
from rlhf_core.pipeline.record import read_record
from rlhf_core.tracking.protocol import METRICS_FILE
from tests.flows.conftest import Workplace
from tests.flows.leaks import command_lines, kept_in, shown_by_prefect, shown_by_ray
from tests.flows.test_running import newest_run
from tests.services import http_server

pytestmark = pytest.mark.endurance("two-nodes")

LORA = {"rank": 2}
TRAINING = {
    "batch_size": 4, "max_length": 24, "max_steps": 2,
    "optimizer": {"learning_rate": 1e-2}, "engine": {"dtype": "float32", "zero_stage": 0},
}  # fmt: skip
ANSWERING = {"sampling": {"max_tokens": 4}, "rollout": {"max_length": 24}}
JUDGE = {"type": "http", "url_variable": "JUDGE_URL", "header_variable": "ALIGNMENT_HEADER_JUDGE"}
JUDGING = {
    "scorers": {"exact": {"type": "verifier", "kind": "exact"}, "judge": JUDGE},
    "samples": 2,
    "pass_at": [1, 2],
    **ANSWERING,
}
RECIPE: dict[str, Any] = {
    "name": "whole", "tracking": {"wandb": True, "tensorboard": False},
    "data": {
        name: {"format": data_format, "source": {"type": "files", "paths": [f"{name}.jsonl"]}, "on_overlap": overlap}
        for name, data_format, overlap in (
            ("talks", "conversations", "error"), ("short", "preferences", "allow"), ("high", "preferences", "allow"),
            ("asked", "prompts", "allow"), ("near", "prompts", "error"),
        )
    },
    "base": {
        "dtype": "float32",
        "source": {
            "type": "scratch", "hidden_size": 64, "intermediate_size": 64, "layers": 1, "heads": 2,
            "context_length": 32,
        },
    },
    "sft": {"dataset": "talks", "lora": LORA, **TRAINING},
    "likes_short": {"stage": "reward_model", "dataset": "short", **TRAINING},
    "likes_high": {"stage": "reward_model", "dataset": "high", "lora": LORA, **TRAINING},
    "rl": {
        "algorithm": "ppo", "dataset": "asked", "steps": 2, "prompts_per_step": 2, "lora": LORA, **ANSWERING,
        "ppo": {
            "rewards": {
                "short": {"type": "reward_model", "model": "likes_short"},
                "high": {"type": "reward_model", "model": "likes_high", "weight": 0.5},
            },
            "group_size": 2, "optimizer": {"learning_rate": 1e-2}, "critic": {"optimizer": {"learning_rate": 1e-2}},
        },
        "engine": {"dtype": "float32", "zero_stage": 0},
    },
    "evaluation": {"dataset": "near", "models": ["rl"], **JUDGING},
}  # fmt: skip
READS = {  # node -> the nodes whose results it read
    "sft": {"data.talks", "base"},
    "merge.sft": {"sft", "base"},
    "likes_short": {"data.short", "merge.sft"},
    "likes_high": {"data.high", "merge.sft"},
    "rl": {"data.asked", "merge.sft", "likes_short", "likes_high"},
    "merge.rl": {"rl", "merge.sft"},
    "evaluation.rl": {"data.near", "merge.rl"},
}
KINDS = {
    "sft": Kind.ADAPTER, "merge.sft": Kind.POLICY, "likes_short": Kind.REWARD_MODEL, "likes_high": Kind.REWARD_MODEL,
    "rl": Kind.ADAPTER, "merge.rl": Kind.POLICY, "report": Kind.REPORT,
}  # fmt: skip


def write(folder: Path) -> str:
    def rows(name: str, rows: list[dict[str, str]]) -> None:
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    rows("talks", [{"prompt": f"t{i}", "completion": f"{i}"} for i in range(8)])
    rows("short", [{"prompt": f"s{i}", "chosen": f"{i}", "rejected": f"{i}{i}{i}"} for i in range(8)])
    rows("high", [{"prompt": f"h{i}", "chosen": "9", "rejected": f"{i}"} for i in range(8)])
    for name in ("asked", "near"):
        rows(name, [{"prompt": f"{name[0]}{i}", "answer": f"{i}"} for i in range(4)])
    path = folder / "whole.yaml"
    path.write_text(json.dumps(RECIPE))  # which is YAML too
    return str(path)


class Judge(BaseHTTPRequestHandler):
    """A reward server that answers who knows its token."""

    token = "a token of the judge"

    def do_POST(self) -> None:
        known = self.headers["Authorization"] == f"Bearer {self.token}"
        size = int(self.headers["Content-Length"])
        completions = json.loads(self.rfile.read(size))["completions"]
        answer = json.dumps({"rewards": [1.0] * len(completions)}).encode()
        self.send_response(200 if known else 403)
        self.end_headers()
        self.wfile.write(answer if known else b"")

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A secret in every variable in which a user has one; the S3 server's are in place."""
    found = {
        "HF_TOKEN": f"hf_{secrets.token_hex(17)}", "WANDB_API_KEY": secrets.token_hex(20),
        "PREFECT_API_KEY": f"pnu_{secrets.token_hex(18)}", "token of the judge": secrets.token_hex(16),
        "path of the judge": secrets.token_hex(16),
        **{name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")},
    }  # fmt: skip
    monkeypatch.setattr(Judge, "token", found["token of the judge"])
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("HF_TOKEN", "WANDB_API_KEY", "PREFECT_API_KEY"):
        monkeypatch.setenv(name, found[name])
    monkeypatch.setenv("ALIGNMENT_HEADER_JUDGE", f"Authorization: Bearer {found['token of the judge']}")
    with http_server(Judge) as url:
        monkeypatch.setenv("JUDGE_URL", f"{url}/{found['path of the judge']}")
        with temporary_settings({PREFECT_API_KEY: found["PREFECT_API_KEY"]}):
            yield found


@pytest.mark.timeout(1500)  # some twenty jobs, each of which loads torch
@pytest.mark.parametrize("store_url", ["s3"], indirect=True)
@pytest.mark.slow("some twenty Ray jobs")
def test_every_stage_of_a_branching_recipe_is_computed_once_from_what_it_names(
    workplace: Workplace, planted: dict[str, str], ray_folder: Path, prefect_api: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """And nothing is trained on once an evaluation set has one of its prompts, which here only jobs can see.

    Secrets reach the jobs and their actors, and nothing that anyone can see.
    """
    recipe = write(workplace.folder)
    with command_lines() as commands:
        rows = alignment(recipe)
    assert {row["outcome"] for row in rows} == {"computed"}
    graph = prepare(recipe, []).graph
    manifests: dict[str, Manifest] = {}
    for name, node in graph.items():
        manifest = workplace.repository.manifest(node.ref)
        assert manifest is not None, name
        manifests[name] = manifest
    names = {manifest.ref: name for name, manifest in manifests.items()}
    read = {name: {names[ref] for ref in manifest.parents.values()} for name, manifest in manifests.items()}
    assert {name: read[name] for name in READS} == READS
    assert read["report"] == manifests.keys() - {"report"}
    assert {name: manifests[name].kind for name in KINDS} == KINDS
    log = workplace.repository.fetch(graph["rl"].ref, workplace.folder / "cache") / METRICS_FILE
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(steps) == 2
    assert all(math.isfinite(step["reward/short"] + step["reward/high"]) for step in steps)
    assert {row["outcome"] for row in alignment(recipe)} == {"reused"}

    with (workplace.folder / "near.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "t1", "answer": "1"}) + "\n")
    state = alignment(recipe, ["data.near.limit=5"], return_state=True)
    assert state.is_failed()
    assert state.message is not None
    assert "overlap.talks: 1 of 8 rows contain a prompt of a dataset that the recipe evaluates" in state.message
    record = read_record(workplace.repository.store, str(newest_run().id))
    assert record is not None
    outcomes = {node.name: node.outcome for node in record.nodes}
    assert outcomes["overlap.talks"] == "failed"
    assert outcomes["data.near"] == "computed"
    assert outcomes["sft"] == outcomes["rl"] == "not run"

    left = {
        **dict(shown_by_ray(workplace.jobs, ray_folder)), **dict(shown_by_prefect(prefect_api)),
        **dict(kept_in(workplace.repository.store)), "processes": os.fsencode("\n".join(commands)),
        "terminal": "".join(capfd.readouterr()).encode(),
    }  # fmt: skip
    assert len(left) > 100
    assert any(file.path.endswith(".wandb") for file in manifests["sft"].files)
    # The report's signed link names the key that signed it, which is no secret, and only there.
    left = {place: re.sub(rb"X-Amz-Credential=\w+", b"", content) for place, content in left.items()}
    assert [(name, place) for name, secret in planted.items() for place in left if secret.encode() in left[place]] == []
