"""The tests of a task of Harbor, run in the runtime that someone has worked in; they write the reward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlhf_core.config.environments.environments import HarborEnvironment
from rlhf_core.config.environments.harbor import HarborTask
from rlhf_core.errors import EpisodeError, reason_of
from rlhf_core.runtimes.base import Runtime
from rlhf_core.system.json_text import JSONTextError, parse_json

_PREPARE_SECONDS = 60.0
_PREPARE = "rm -rf /tests /logs/verifier && mkdir -p /tests /logs/verifier"  # what the policy may have put there
_TEXT, _JSON = "/logs/verifier/reward.txt", "/logs/verifier/reward.json"
_SHOWN = 300  # characters of a test's output in an error


async def graded(runtime: Runtime, task: HarborTask, config: HarborEnvironment) -> tuple[float, Mapping[str, float]]:
    """Run the task's tests; return their reward, and metrics of the tests. Raises EpisodeError if they write none."""
    prepared = await runtime.run(_PREPARE, _PREPARE_SECONDS)
    if prepared.status or prepared.stopped:
        raise EpisodeError(f"its tests cannot be put in place: {prepared.output[-_SHOWN:]}")
    await runtime.write({f"/tests/{path}": content for path, content in task.tests.items()})
    seconds = min(config.test_seconds, task.test_seconds)
    ran = await runtime.run("bash /tests/test.sh", seconds, task.test_variables)
    if ran.stopped:
        return 0.0, {"tests_stopped": 1.0}  # by what the policy has left there, such as an endless loop
    reward = await _reward(runtime)
    if reward is not None:
        return reward, {}
    if config.without_reward == "zero":
        return 0.0, {"tests_without_reward": 1.0}
    raise EpisodeError(
        f"its tests ended with status {ran.status} and wrote neither {_TEXT} nor {_JSON} (`without_reward: zero` "
        f"takes that for 0): {ran.output[-_SHOWN:]}"
    )


async def _reward(runtime: Runtime) -> float | None:
    """Return the reward that the tests have written; None if there is none."""
    if (content := await runtime.read(_TEXT)) is not None:
        return _number(content.decode(errors="replace").strip(), _TEXT)
    if (content := await runtime.read(_JSON)) is None:
        return None
    try:
        values = parse_json(content.decode())
    except (JSONTextError, UnicodeDecodeError) as error:
        raise EpisodeError(f"its tests wrote {_JSON}, which is not valid JSON: {reason_of(error)}") from error
    if not isinstance(values, dict) or not values:
        raise EpisodeError(f"its tests wrote {_JSON}, which is not a mapping of rewards")
    name = "reward" if "reward" in values else next(iter(values))
    if name != "reward" and len(values) > 1:
        raise EpisodeError(f"its tests wrote {_JSON} with {', '.join(map(str, values))}, none of them `reward`")
    return _number(values[name], _JSON)


def _number(value: Any, path: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise EpisodeError(f"its tests wrote {value!r:.80} to {path}, which is not a finite number")
    return number
