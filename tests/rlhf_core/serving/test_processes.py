"""The processes of a reward server, one of which is killed while it is asked; a model is no part of it."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from deployments.cli.main import app
from rlhf_core.config.rewards import HTTPReward
from rlhf_core.errors import StageError
from rlhf_core.rewards.http import RewardServer
from rlhf_core.serving.processes import listening
from tests.services import LOOPBACK, free_ports


def test_a_killed_worker_is_started_again_and_no_answer_is_lost_or_wrong() -> None:
    (port,) = free_ports(1)
    reward = RewardServer(HTTPReward(
        type="http", url=f"http://{LOOPBACK}:{port}/score", batch_size=1, attempts=1000, timeout_seconds=300.0
    ))  # fmt: skip
    texts = ["x" * number for number in range(200)]
    with subprocess.Popen([sys.executable, "-m", "tests.rlhf_core.serving.lengths", str(port)]) as process:
        try:
            reward(texts[:1], texts[:1], [{}])  # it is there
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(reward, texts, texts, [{}] * 200)
                worker = worker_of(process.pid)
                worker.suspend()
                time.sleep(2)  # its supervisor asks it twice a second, and would wait for its answer for two minutes
                worker.kill()
                assert asked.result(timeout=100).rewards == [float(number) for number in range(200)]
                assert reward(["abc"], ["p"], [{}]).rewards == [3.0]
            assert worker_of(process.pid).pid != worker.pid
        finally:
            process.terminate()
            reward.close()
        assert process.wait(60) == 0


def worker_of(pid: int) -> psutil.Process:
    (worker,) = (child for child in psutil.Process(pid).children() if "spawn_main" in " ".join(child.cmdline()))
    return worker


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StageError, match=f"cannot listen on {LOOPBACK}, port {port} .*give another --port"):
            listening(LOOPBACK, port)


def test_a_folder_without_a_reward_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    result = CliRunner().invoke(app, ["serve-reward", str(tmp_path)])
    assert result.exit_code == 1
    assert "this is no reward model: its config.json names ['LlamaForCausalLM']" in result.stderr
