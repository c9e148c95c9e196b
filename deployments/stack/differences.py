"""Differences between a running stack's settings and those of a new `alignment up`."""

from __future__ import annotations

import configparser
import re
import sys
from collections.abc import Mapping

import psutil

from deployments.stack.environment import SELECTORS
from deployments.stack.settings import PORTS, Stack
from rlhf_core.actors import forwarding
from rlhf_core.errors import StackError

# Variables that affect the services, flows or jobs.
_PREFIXES = (
    *forwarding.STANDARD, "ALIGNMENT_", "CUDA_", "LD_", "MKL_", "NCCL_", "OMP_", "PREFECT_", "PYTHON", "RAY_",
    "TOKENIZERS_", "TORCH", "VLLM_", "XDG_CACHE",
)  # fmt: skip
_NAMES = frozenset({"HOME", "PATH", "TMPDIR", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"})
_OF_UP_ITSELF = frozenset({"ALIGNMENT_STACK_DIR", "ALIGNMENT_STACK_SERVICE", "ALIGNMENT_STACK_TIMEOUT"})
_SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|AUTH_STRING|HEADER|WEBHOOK", re.IGNORECASE)
_PASSWORD_IN_URL = re.compile(r"//[^/@\s]*@")
# They depend on the memory that was free, and on variables that are compared by themselves.
_VARYING_FLAGS = re.compile(r'"--(object-store-memory|num-cpus)=[^"]*"')


def differences(
    stack: Stack, supervisord: psutil.Process, configs: tuple[str, str], environment: Mapping[str, str]
) -> list[str]:
    """Return one line per setting: its name, the value that the stack runs with, and the value now; secrets are not
    shown.

    configs: supervisord.conf as it runs and as it would be now. environment: that of the services if started now.
    """
    running = supervisord.environ()
    lines = [f"Python: {old} → {sys.executable}" for old in supervisord.cmdline()[:1] if old != sys.executable]
    ports = {f"ALIGNMENT_PORT_{name.upper()}": name for names in PORTS.values() for name in names}
    for variable, name in ports.items():
        wanted = environment.get(variable)
        if wanted and wanted != str(stack.ports.get(name)):
            lines.append(f"{variable}: {stack.ports.get(name, '(unset)')} → {wanted}")
    for name in sorted({*running, *environment}):
        if _matters(name) and name not in ports and running.get(name) != environment.get(name):
            lines.append(f"{name}: {_shown(name, running.get(name))} → {_shown(name, environment.get(name))}")
    for name, (old, new) in _commands(*configs).items():
        if old != new:
            lines.append(f"the command of {name}, which another version of this repository started")
    return lines


def service_differences(owned: frozenset[str], wanted: frozenset[str]) -> list[str]:
    """Return the services that the stack runs and no longer should, or the other way round."""
    return [
        f"{name}: the stack's own → yours ({' or '.join(SELECTORS[name])} is set)"
        if name in owned
        else f"{name}: yours → the stack's own ({' and '.join(SELECTORS[name])} unset)"
        for name in SELECTORS
        if (name in owned) != (name in wanted)
    ]


def _matters(name: str) -> bool:
    return (name.startswith(_PREFIXES) or name.upper() in _NAMES) and name not in _OF_UP_ITSELF


def _shown(name: str, value: str | None) -> str:
    if value is None:
        return "(unset)"
    return "(a secret)" if _SECRET.search(name) else _PASSWORD_IN_URL.sub("//…@", value)


def _commands(running: str, wanted: str) -> dict[str, tuple[str, str]]:
    """Return the running and the new command of each service in both."""
    parsed = []
    for text in (running, wanted):
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(text)
            commands = {s: parser.get(s, "command") for s in parser.sections() if "program" in s}
        except configparser.Error as error:
            raise StackError(
                "supervisord.conf of the running stack is damaged: run `alignment down && alignment up`, which writes "
                f"it again ({' '.join(str(error).split())})"
            ) from error
        parsed.append({section: _VARYING_FLAGS.sub("", command) for section, command in commands.items()})
    old, new = parsed
    return {name.removeprefix("program:"): (old[name], new[name]) for name in old if name in new}
