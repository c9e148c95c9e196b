"""Rewards of text keep one contract: functions of the user's files, verifiers, servers, judges and rubrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlhf_core.config.rewards.rewards import (
    FunctionReward,
    HTTPReward,
    JudgeReward,
    RubricReward,
    TextReward,
    VerifierReward,
)
from rlhf_core.rewards import Reward, build_text_reward
from rlhf_core.testing.reward import RewardContract, Sample
from tests.rlhf_core.chat_endpoint import chat_endpoint, words_met
from tests.rlhf_core.stages.context import LocalContext
from tests.services import http_server

pytestmark = pytest.mark.parts

ROW = {"id": "row", "answer": "ab"}
SAMPLES: tuple[Sample, ...] = (("ab", "p", ROW), ("abcd", "p", ROW), ("", "p", ROW))


class _Configured(RewardContract):
    samples = SAMPLES
    config: ClassVar[TextReward]

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make(self) -> Reward:
        return build_text_reward(self.config, LocalContext(self.folder / "work", user_files_root=self.folder))


class TestFunctionReward(_Configured):
    unusable = ("bad", "p", ROW)
    config = FunctionReward(type="function", path="reward.py", batch_size=2)

    def make(self) -> Reward:
        (self.folder / "reward.py").write_text(
            "def reward(completions, prompts, rows):\n"
            "    return [{'reward': None if c == 'bad' else len(c), 'score': 0.5} for c in completions]\n"
        )
        return super().make()


class TestVerifier(_Configured):
    samples = (("a", "p", {"answer": "a"}), ("b", "p", {"answer": "a"}))
    unusable = (60 * "a" + "b", "p", {"answer": "a"})  # its match takes for ever
    config = VerifierReward(type="verifier", pattern="(a|aa)+$", timeout_seconds=2)


class TestMath(_Configured):
    samples = (("$x=0.5$", "p", {"answer": "1/2"}), ("6", "p", {"answer": "5"}), ("", "p", {"answer": "5"}))
    unusable = ("5", "p", {"answer": "$"})
    config = VerifierReward(type="verifier", kind="math")


class TestCodeTests(_Configured):
    samples = (("x = 1", "p", {"tests": "assert x == 1"}), ("while 1: pass", "p", {"tests": "assert x == 1"}))
    unusable = ("x = 1", "p", {"tests": 1})
    config = VerifierReward(type="verifier", kind="code_tests", timeout_seconds=1)


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps(self.reply(asked)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def reply(self, asked: dict[str, Any]) -> dict[str, Any]:
        if "completions" in asked:
            return {"rewards": [None if c == "bad" else len(c) for c in asked["completions"]]}
        judged = asked["messages"][-1]["content"]
        content = "I cannot say" if judged == "bad" else f"Score: {len(judged)}"
        return {"choices": [{"message": {"role": "assistant", "content": content}}]}

    def log_message(self, *arguments: Any) -> None: ...


class _Served(_Configured):
    unusable = ("bad", "p", ROW)

    @pytest.fixture(autouse=True)
    def _server(self) -> Iterator[None]:
        with http_server(_Handler) as self.url:
            yield


class TestHTTPReward(_Served):
    def make(self) -> Reward:
        return build_text_reward(HTTPReward(type="http", url=self.url, batch_size=2), LocalContext(self.folder))


class TestJudge(_Served):
    def make(self) -> Reward:
        config = JudgeReward.model_validate({
            "type": "judge", "url": f"{self.url}/v1", "model": "wise", "template": "{{ completion }}",
            "pattern": r"Score: (\S+)", "range": (0, 10),
        })  # fmt: skip
        return build_text_reward(config, LocalContext(self.folder))


class TestRubric(_Configured):
    unusable = ("bad", "p", ROW)

    @pytest.fixture(autouse=True)
    def _endpoint(self) -> Iterator[None]:
        with chat_endpoint() as endpoint:
            endpoint.reply = lambda text: "I cannot say" if "bad" in text else words_met(text)
            self.url = endpoint.url
            yield

    def make(self) -> Reward:
        (self.folder / "rubric.yaml").write_text("criteria: [{name: long, description: has abcd}]")
        config = RubricReward(type="rubric", url=self.url, model="wise", path="rubric.yaml")
        return build_text_reward(config, LocalContext(self.folder / "work", user_files_root=self.folder))
