"""`alignment status` says of a port only what is known of it; the ports of a real stack: test_stack.py."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from deployments.stack.environment import SELECTORS
from deployments.stack.ports import JOB, listening_ports
from deployments.stack.settings import open_stack

pytestmark = pytest.mark.parts

RANK = """
from rlhf_core.training.distributed import host_store
store = host_store("127.0.0.1")
print(store.port, flush=True)
input()
"""


def test_where_ranks_meet_no_token_is_claimed(tmp_path: Path) -> None:
    stack = open_stack(tmp_path, frozenset(SELECTORS), {}, running=False)
    with subprocess.Popen(
        [sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as rank:
        assert rank.stdout is not None
        port = int(rank.stdout.readline())
        (found,) = listening_ports(stack, rank.pid)
        stranger = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))
        stranger.set("key", "of a stranger")
        assert stranger.get("key") == b"of a stranger"
        rank.kill()
    assert (found.port, found.name, found.protection) == (port, "", JOB)
