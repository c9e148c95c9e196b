"""Each starter of `alignment init` is run to its report, on a tiny model: its model can be pulled, and is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from deployments.cli.init import Method
from deployments.cli.main import app
from deployments.stack.environment import RECIPES
from rlhf_core.pipeline.in_process import try_node
from rlhf_core.pipeline.prepare import prepare
from rlhf_core.stages.in_process import InProcessCluster
from tests.rlhf_core.rl.torch_engine import torch_engine

pytestmark = pytest.mark.endurance("mutations")

CHEAP = [
    "base.dtype=float32",
    "evaluation.sampling.max_tokens=4",
    "evaluation.samples=1",
    "evaluation.pass_at=[1]",
]
RL = [
    "rl.rollout.serve_adapter=merged",
    "rl.engine.dtype=float32",
    "rl.steps=1",
    "rl.prompts_per_step=2",
    "rl.sampling.max_tokens=4",
]
GROUPS = "rl.grpo.group_size=2"
OVERRIDES = {  # the servers of agents and the parser of calls take 10 s of CPU to start, so these evaluate one model
    Method.sft: ["sft.max_steps=1"],
    Method.dpo: ["preference.max_steps=1"],
    Method.kto: ["kto.max_steps=1"],
    Method.grpo: [*RL, GROUPS],
    Method.ppo: ["reward_model.max_steps=1", *RL],
    Method.environment: [*RL, GROUPS],
    Method.tools: [*RL, GROUPS, "evaluation.models=[rl]"],
    Method.agent: [*RL, GROUPS, "evaluation.models=[rl]"],
}
TRAINED = {Method.sft: "merge.sft", Method.dpo: "merge.preference", Method.kto: "merge.kto", Method.ppo: "rl"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a chat template that writes tools."""
    folder = tmp_path_factory.mktemp("model")
    shutil.copy(RECIPES / "tiny_tools.jinja", folder)
    (folder / "text.jsonl").write_text('{"text": "a b c"}\n')
    source = {"type": "scratch", "hidden_size": 64, "intermediate_size": 32, "heads": 2, "layers": 1}
    recipe = {
        "name": "model",
        "data": {"text": {"format": "text", "source": {"type": "files", "paths": ["text.jsonl"]}}},
        "base": {"dtype": "float32", "chat_template": "tiny_tools.jinja", "source": {**source, "context_length": 512}},
        "pretrain": {"dataset": "text", "batch_size": 1, "max_length": 8, "optimizer": {"learning_rate": 1e-3}},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    prepared = prepare(str(folder / "recipe.yaml"), [], store=str(folder / "store"))
    made = try_node(prepared, prepared.node("base"), print).folder
    return Path(shutil.copytree(made, folder / "made"))


@pytest.mark.parametrize("method", list(Method))
@pytest.mark.endurance("mutations")
@pytest.mark.slow("runs a recipe to its report")
def test_a_starter_makes_a_model(tmp_path: Path, model: Path, method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ALIGNMENT_STORE", str(tmp_path / "store"))
    done = CliRunner().invoke(app, ["init", method, "mine", "--model", str(model)])
    assert done.exit_code == 0, done.output
    prepared = prepare("mine/recipe.yaml", [*CHEAP, *OVERRIDES[method]])
    try_node(prepared, prepared.node("report"), print, cluster=lambda: InProcessCluster(torch_engine))
    trained = prepared.node(TRAINED.get(method, "merge.rl"))
    pulled = CliRunner().invoke(app, ["pull", str(trained.ref), "pulled"])
    assert pulled.exit_code == 0, pulled.output
    prompt = AutoTokenizer.from_pretrained("pulled")("What is the capital of Spain?", return_tensors="pt")
    reply = AutoModelForCausalLM.from_pretrained("pulled").generate(**prompt, max_new_tokens=2)
    assert reply.shape[1] > prompt["input_ids"].shape[1]
