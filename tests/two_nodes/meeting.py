"""A process group over two machines: without Ray, so that it takes seconds."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from tests.two_nodes.machines import Machine, connect

HEAD, OTHER = "10.77.0.1", "10.77.0.2"
JOIN = """
import os, sys, torch, torch.distributed as dist
from rlhf_core.training.distributed import host_store, join_group
rank, host, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
store = host_store(host, port) if rank == 0 else None
join_group(rank=rank, size=2, address=f"{host}:{port}")
total = torch.tensor(10 + dist.get_rank())
dist.all_reduce(total)
print(int(total), os.environ["GLOO_SOCKET_IFNAME"])
"""


def meet() -> list[list[str]]:
    """What each of two ranks says, one on each machine."""
    with ExitStack() as stack:
        machines = [Machine(name, Path(f"/tmp/{name}.log"), own_network=name == "other") for name in ("head", "other")]
        for machine in machines:
            machine.start(["sleep", "600"], os.environ)
            stack.callback(machine.stop)
        connect(machines[0], HEAD, machines[1], OTHER)
        for machine in machines:
            machine.run()
        with ThreadPoolExecutor() as pool:
            ranks = [
                pool.submit(machine.inside, sys.executable, "-c", JOIN, str(rank), HEAD, "29500")
                for rank, machine in enumerate(machines)
            ]
            answers = [rank.result() for rank in ranks]
        assert all(answer.returncode == 0 for answer in answers), [answer.stderr for answer in answers]
        return [answer.stdout.split() for answer in answers]


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1]), "w") as answer:
        json.dump(meet(), answer)
