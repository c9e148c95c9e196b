"""RL at a resource server of NeMo Gym: its rewards train, and are what validation and evaluation see."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
from aiohttp import web

from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.data.formats import canonical_row
from rlhf_core.errors import EpisodeError
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.scripted import ScriptedEngine
from rlhf_core.stages import rl
from rlhf_core.stages.in_process import InProcessCluster
from tests.rlhf_core.environments.resource_server import resource_server
from tests.rlhf_core.stages.supervised_runs import base_model, context_of, dataset
from tests.rlhf_core.stages.test_rl_environment import SETTINGS

pytestmark = pytest.mark.endurance("architectures")


async def seed(request: web.Request) -> web.Response:
    return web.json_response({}, status=500 if (await request.json())["id"] == 1 else 200)


async def verify(request: web.Request) -> web.Response:
    body = await request.json()
    said = body["response"]["output"][-1]["content"][0]["text"]
    return web.json_response({**body, "reward": 1.0 if said == body["expected"] else -0.5})


def test_its_rewards_train_and_sessions_that_it_refuses_are_failures(tmp_path: Path) -> None:
    """Every prompt is answered `a`, and by odd seeds `b`, which is right."""
    model = base_model(tmp_path / "base")
    tokenizer = load_tokenizer(model.folder)

    def script(prompt: Sequence[int], seed: int | None) -> Sequence[int]:
        reply = "b" if (seed or 0) % 2 else "a"
        return [*tokenizer(reply, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    rows = [
        canonical_row({"request": {"input": f"{i}?"}, "id": i, "expected": "b"}, "prompts", {"nemo_gym": "request"})
        for i in range(2)
    ]
    inputs = {"model": model, "dataset": dataset(tmp_path / "questions", rows)}
    with resource_server() as server:
        server.handlers |= {"seed_session": seed, "verify": verify}
        environment = {"type": "nemo_gym", "url": server.url, "tolerated_failures": 0.5}

        def run(name: str) -> list[dict[str, float]]:
            context = context_of(tmp_path / name, inputs)
            cluster = InProcessCluster(lambda *_: nullcontext(InlineEngines(ScriptedEngine(script, max_length=40))))
            rl.run(RLConfig.model_validate({**SETTINGS, "environment": environment}), inputs, context, cluster)
            return [metrics for _, metrics in context.logs]

        logs = run("tolerated")
        assert len(logs) == 2
        for metrics in logs:
            assert metrics["environment/failures"] == 2
            assert (metrics["reward"] + 0.5) / 1.5 in (0, 0.5, 1)
            assert metrics["reward/game/turns"] == 1
        del environment["tolerated_failures"]
        with pytest.raises(
            EpisodeError, match=r"environment nemo_gym, row \w+, turn 0: resource server http.*status 500"
        ):
            run("strict")
