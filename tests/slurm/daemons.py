"""Slurm with two nodes, each a machine of tests/two_nodes: munged and slurmd on both, slurmctld on the first."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from tests.cluster import service_environment
from tests.two_nodes import machines
from tests.two_nodes.machines import HOME, Machine, connect

ADDRESSES = {"node1": "10.77.0.1", "node2": "10.77.0.2"}
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
SECONDS = 120.0

_CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}({address})
SlurmUser=root
AuthInfo=socket=/tmp/munge/socket,cred_expire=5
StateSaveLocation=/tmp/slurmctld
SlurmdSpoolDir=/tmp/%n
SlurmctldPidFile=/tmp/slurmctld.pid
SlurmdPidFile=/tmp/%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=10
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# Each machine has a /tmp of its own, so each gets the key and the configuration.
_START = """
set -e
umask 077
mkdir -m 755 /tmp/munge
mkdir -p /tmp/slurmctld
printf %s "$MUNGE_KEY" > /tmp/munge.key
printf %s "$CONFIGURATION" > "$SLURM_CONF"
chmod 644 "$SLURM_CONF"
munged --force --key-file=/tmp/munge.key --socket=/tmp/munge/socket --pid-file=/tmp/munge.pid \
  --log-file=/tmp/munge.log --seed-file=/tmp/munge.seed
if [ "$NODE" = node1 ]; then slurmctld -D & fi
unset MUNGE_KEY CONFIGURATION
umask 022
slurmd -D -N "$NODE" &
wait  # the first process of a machine reaps orphans: slurmd drains a node whose jobs leave processes
"""


def obstacle() -> str:
    """Why there cannot be a Slurm of two nodes here; empty if there can."""
    missing = [program for program in PROGRAMS if not shutil.which(program)]
    if missing:
        return f"these programs of Slurm are missing: {', '.join(missing)} (Debian: slurm-wlm, munge)"
    return machines.obstacle()


class Slurm:
    """To be made in a rack (`machines.in_a_rack`). cpus: of each node."""

    def __init__(self, folder: Path, cpus: int) -> None:
        self._nodes = {name: Machine(name, folder / f"{name}.log", own_network=name != "node1") for name in ADDRESSES}
        self._host, self._cpus = os.uname().nodename.split(".")[0], cpus
        self.head = self._nodes["node1"]

    def start(self) -> None:
        lines = [
            f"NodeName={name} NodeHostname={self._host} NodeAddr={address} CPUs={self._cpus} RealMemory=4000"
            for name, address in ADDRESSES.items()
        ]
        configuration = _CONFIGURATION.format(host=self._host, address=ADDRESSES["node1"], nodes="\n".join(lines))
        key = secrets.token_hex(64)
        for name, node in self._nodes.items():
            more = {"NODE": name, "MUNGE_KEY": key, "CONFIGURATION": configuration, "SLURM_CONF": "/tmp/slurm.conf"}
            node.start(["sh", "-c", _START], service_environment(**more))
        node1, node2 = ADDRESSES
        connect(self._nodes[node1], ADDRESSES[node1], self._nodes[node2], ADDRESSES[node2])
        for node in self._nodes.values():
            node.run()
        deadline = time.monotonic() + SECONDS
        while self.ask("sinfo", "--noheader", "--format=%D %T").stdout.split() != ["2", "idle"]:
            assert time.monotonic() < deadline, [node.output() for node in self._nodes.values()]
            time.sleep(0.5)

    def ask(self, *command: str, variables: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm on the first node."""
        given = {"HOME": HOME, "SLURM_CONF": "/tmp/slurm.conf", "TMPDIR": "/tmp", **(variables or {})}
        return self.head.inside("env", *(f"{name}={value}" for name, value in given.items()), *command)

    def submit(self, script: str, variables: Mapping[str, str]) -> str:
        """Submit a batch script; return the job's id."""
        submit = f"sbatch --parsable --chdir=/tmp <<'END_OF_SCRIPT'\n{script}\nEND_OF_SCRIPT"
        done = self.ask("sh", "-c", submit, variables=variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, job_id: str) -> dict[str, str]:
        """Return what Slurm knows of a job: JobState, Restarts, TimeLimit, …"""
        words = self.ask("scontrol", "show", "job", job_id).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def output(self, name: str) -> str:
        return self.ask("cat", f"/tmp/{name}").stdout

    def stop(self) -> None:
        for node in self._nodes.values():
            node.stop()
