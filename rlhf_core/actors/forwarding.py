"""Forwarding of environment variables to a job: they hold credentials, hence not in the job's `runtime_env`.

Ray shows a job's environment to everyone with access to its dashboard or its logs. So the submitter writes the
variables to the key-value store of Ray's head, by the one request of the Jobs API that can write but not read there
(the upload of packages); the job first removes them from the store, and passes them to its actors by a call.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping

from rlhf_core.errors import StageError

NAME_VARIABLE = "ALIGNMENT_FORWARDED"  # in the job's environment: the name of its stored variables

# Variables of the submitter that every job needs: to reach the store, the hub and the trackers. Others are named by the
# recipe: a URL or a header.
STANDARD = ("AWS_", "HF_", "MLFLOW_", "SWANLAB_", "TRACKIO_", "WANDB_")

_HEADER = b"# variables of a job\n"  # Ray quotes the first 15 bytes of a value that it cannot store
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|SIGNATURE|HEADER", re.IGNORECASE)
# Settings of the hub's library, which are read when it is imported, and our own.
_HARMLESS = ("HF_HUB_", "HF_HOME", "HF_ENDPOINT", "HF_DATASETS_", "ALIGNMENT_")
_SHORTEST_SECRET = 6  # characters; a shorter one would also redact other text
_USERINFO = re.compile(r"://([^/\s@]+)@")

_received: dict[str, str] = {}


def divided(environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables that may be shown, and all that are not known to be harmless."""
    shown = {
        name: value
        for name, value in environment.items()
        if name.startswith(_HARMLESS) and not _SECRET.search(name) and not _USERINFO.search(value)
    }
    return shown, {name: value for name, value in environment.items() if name not in shown}


def encode(environment: Mapping[str, str]) -> bytes:
    return _HEADER + json.dumps(dict(environment)).encode()


def package_uri(name: str) -> str:
    """Return the key of the package `name` in the store of Ray's head."""
    return f"gcs://{name}"


def receive() -> None:
    """Set the variables that this job's submitter stored, and remove them from Ray's store.

    A no-op in a process that is no such job. Raises StageError if they are missing.
    """
    name = os.environ.pop(NAME_VARIABLE, None)
    if name is None:
        return
    # Takes half a second, `ray.init` two.
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # it has no types

    client, key = GcsClient(address=os.environ["RAY_ADDRESS"]), package_uri(name).encode()
    stored = client.internal_kv_get(key, None)
    if stored is None:
        raise StageError("the variables that this job was submitted with are no longer in Ray's store: run again")
    client.internal_kv_del(key, False, None)
    inherit(json.loads(stored.removeprefix(_HEADER)))


def inherit(environment: Mapping[str, str]) -> None:
    """Set variables for this process, its children, and the actors that it starts."""
    _received.update(environment)
    os.environ.update(environment)


def received() -> dict[str, str]:
    """Return the variables that this process has received, to be passed to an actor."""
    return dict(_received)


def redacted(text: str) -> str:
    """Return `text` with each secret that this process has received replaced by the name of its variable."""
    for value, name in sorted(_secrets().items(), key=lambda item: -len(item[0])):
        text = text.replace(value, f"<{name}>")
    return text


def _secrets() -> dict[str, str]:
    """Return the variable of each secret: of whole values and, as in `Authorization: Bearer abc`, of their words."""
    variable_by_secret: dict[str, str] = {}
    for name, value in _received.items():
        parts = [part for userinfo in _USERINFO.findall(value) for part in userinfo.split(":")]
        if _SECRET.search(name) or not name.startswith(STANDARD):
            parts += [value, *value.split()]
        variable_by_secret |= {part: name for part in parts if len(part) >= _SHORTEST_SECRET}
    return variable_by_secret
