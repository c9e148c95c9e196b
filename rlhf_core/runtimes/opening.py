"""Construction of a stage's runtimes from its settings."""

from __future__ import annotations

from pkgutil import resolve_name

from rlhf_core.config.environments.runtimes import RUNTIMES, RuntimeConfig
from rlhf_core.runtimes.base import RuntimeHost


def open_runtimes(config: RuntimeConfig) -> RuntimeHost:
    """Return the host of runtimes. Raises StageError if there can be none on this node."""
    host: RuntimeHost = resolve_name(RUNTIMES[config.type].implementation).of(config)
    return host
