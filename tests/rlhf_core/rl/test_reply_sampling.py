"""RL on replies of several temperatures: log-probs of each at its own, on both sides."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.episodes.turn_sampling import of_reply
from rlhf_core.models.loading import load_causal_model
from rlhf_core.models.packed import PolicyModel
from rlhf_core.rl.experience import pack_hinted, pack_trajectories
from rlhf_core.rl.stored import stored, trajectory_of
from rlhf_core.rollout.engine import Request, SamplingParameters
from rlhf_core.stages import rl
from rlhf_core.stages.in_process import InProcessCluster
from rlhf_core.types import Prompt, Trajectory
from tests.rlhf_core.rl.torch_engine import TorchEngine, torch_engine
from tests.rlhf_core.stages.context import LocalContext
from tests.rlhf_core.stages.supervised_runs import base_model, dataset

pytestmark = pytest.mark.parts

RUN = SamplingParameters(temperature=0.8, top_p=1.0, max_tokens=6, stop_token_ids=())
RETRIES = """
class Retries:
    def reset(self, row):
        return {"messages": row["prompt"], "temperature": 1.5}

    def step(self, reply):
        again = {"role": "user", "content": "again"}
        return {"messages": [again], "reward": float(len(reply) % 2), "temperature": 0.4}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_model(tmp_path_factory.mktemp("base") / "model").folder


def played(folder: Path) -> list[Trajectory]:
    """A reply at each of three temperatures, the first of which is the run's."""
    made = []
    for seed, (prompt, temperature) in enumerate([((3, 4, 5), None), ((6, 7), 0.3), ((8,), 1.7)]):
        (reply,) = TorchEngine(folder, 32).generate([Request(prompt, of_reply(RUN, temperature, None), seed)])
        given, sampled = len(prompt), len(reply.token_ids)
        own = None if temperature is None else torch.tensor([0.0] * given + [temperature] * sampled)
        made.append(Trajectory(
            Prompt("p", "", prompt, {}), torch.tensor([*prompt, *reply.token_ids]),
            torch.tensor([False] * given + [True] * sampled), torch.tensor([0.0] * given + list(reply.logprobs)), 0,
            "length", temperatures=own,
        ))  # fmt: skip
    return made


def test_the_ratio_of_every_reply_is_one(folder: Path) -> None:
    batch = pack_trajectories(played(folder))
    model = PolicyModel(load_causal_model(folder, dtype=torch.float32, attention="sdpa").eval())
    with torch.no_grad():
        ours = model(batch, temperature=RUN.temperature, only=batch.loss_mask)[0]
        same = model(replace(batch, temperatures=None), temperature=RUN.temperature, only=batch.loss_mask)[0]
    trained = batch.loss_mask
    assert float((ours - batch.rollout_logprobs)[trained].abs().max()) < 1e-5
    assert float((same - batch.rollout_logprobs)[trained].abs().max()) > 1e-2
    assert pack_trajectories(played(folder)[:1]).temperatures is None


def test_a_checkpoint_and_a_hint_keep_them(folder: Path) -> None:
    made = played(folder)
    again = trajectory_of(json.loads(json.dumps(stored(made[1]))), made[1].prompt)
    assert again.temperatures is not None
    assert made[1].temperatures is not None
    assert torch.equal(again.temperatures, made[1].temperatures)
    hinted = [replace(t, prompt=replace(t.prompt, hinted_ids=(*t.prompt.token_ids, 9, 9))) for t in made]
    taught, packed = pack_hinted(hinted), pack_trajectories(made)
    assert taught is not None
    assert taught.temperatures is not None
    assert packed.temperatures is not None
    assert torch.equal(taught.temperatures[taught.loss_mask], packed.temperatures[packed.loss_mask])


def test_a_greedy_run_stays_greedy() -> None:
    greedy = replace(RUN, temperature=0.0)
    assert of_reply(greedy, 0.7, 0.9) == of_reply(greedy, 0, None) == greedy


def test_a_run_that_keeps_tokens_may_narrow_a_reply() -> None:
    kept = replace(RUN, top_k=20)
    assert of_reply(kept, None, 0.5) == replace(kept, top_p=0.5)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_run_measures_no_mismatch(tmp_path: Path, algorithm: str) -> None:
    optimizer = {"learning_rate": 1e-2}
    block: dict[str, Any] = {
        "rewards": {"tries": {"type": "environment"}}, "optimizer": optimizer, "group_size": 4, "epochs": 2,
        "kl": {"coefficient": 0.1},
    }  # fmt: skip
    block |= {"critic": {"optimizer": optimizer}} if algorithm == "ppo" else {"entropy_coefficient": 0.01}
    config = RLConfig.model_validate({
        "algorithm": algorithm, algorithm: block, "dataset": "d", "steps": 2, "prompts_per_step": 2,
        "sampling": {"max_tokens": 4, "temperature": 0.8}, "rollout": {"max_length": 48},
        "environment": {"type": "function", "path": "retries.py", "function": "Retries", "max_turns": 3},
        "engine": {"dtype": "float32", "zero_stage": 0},
    })  # fmt: skip
    (tmp_path / "retries.py").write_text(RETRIES)
    rows = [{"prompt": [{"role": "user", "content": f"say {letter}"}], "answer": letter} for letter in "abcd"]
    inputs = {"model": base_model(tmp_path / "base"), "dataset": dataset(tmp_path / "d", rows)}
    artifacts = {given.manifest.ref.path: given for given in inputs.values()}
    context = LocalContext(tmp_path / "work", user_files_root=tmp_path, artifacts=artifacts)
    rl.run(config, inputs, context, InProcessCluster(torch_engine))
    assert [metrics["rollout_mismatch_max"] < 1e-4 for _, metrics in context.logs] == [True, True]
    assert context.logs[0][1]["kl"] == pytest.approx(0, abs=1e-5)
