"""A recipe with a gate, run in this process on scripted engines, and what its verdict moves in the registry."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.artifacts.aliases import Evidence, moves_of, read_alias
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.promotion import approve, promote, waiting
from rlhf_core.artifacts.registry import move_alias
from rlhf_core.chat.encoding import load_tokenizer, stop_token_ids
from rlhf_core.contract import StageContext
from rlhf_core.evaluation.stored import differences, evaluations_of
from rlhf_core.pipeline.gates import Judged, settle_gates
from rlhf_core.pipeline.in_process import try_node
from rlhf_core.pipeline.prepare import Prepared, prepare
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.scripted import ScriptedEngine
from rlhf_core.stages.cluster import EngineSpec
from rlhf_core.stages.in_process import InProcessCluster

pytestmark = pytest.mark.parts

SCRATCH = {"type": "scratch", "hidden_size": 64, "intermediate_size": 64, "layers": 1, "heads": 2, "context_length": 64}
RECIPE: dict[str, Any] = {
    "name": "small",
    "data": {"held_out": {"format": "prompts", "source": {"type": "files", "paths": ["prompts.jsonl"]}}},
    "base": {"dtype": "float32", "source": SCRATCH},
    "report": None,
}
JUDGED = {
    "champion": {"stage": "artifact", "ref": "bot/champion"},
    "better": {"stage": "base", "dtype": "float32", "source": {**SCRATCH, "intermediate_size": 96}},
    "evaluation": {
        "dataset": "held_out", "samples": 0, "pass_at": [1], "scorers": {"exact": {"type": "verifier"}},
        "sampling": {"max_tokens": 4}, "rollout": {"max_length": 48}, "models": ["champion", "better"],
    },
    "gate": {"candidate": "better", "baseline": "champion", "better": {"exact": {}}, "model": "bot"},
}  # fmt: skip


class Scripted(InProcessCluster):
    """The models called so say `a`, which is right; the others say `b`."""

    def __init__(self, *right: str):
        self.right = right

    @contextmanager
    def engines(self, spec: EngineSpec, context: StageContext) -> Iterator[Any]:
        tokenizer = load_tokenizer(spec.model.folder)
        said = tokenizer.convert_tokens_to_ids("a" if spec.model.manifest.name in self.right else "b")
        (stop,) = stop_token_ids(tokenizer)

        def script(prompt: Sequence[int], seed: int | None) -> list[int]:
            return [said, stop]

        yield InlineEngines(ScriptedEngine(script, max_length=48))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "cache"))
    rows = [{"prompt": f"say a {number}", "answer": "a"} for number in range(20)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def prepared(folder: Path, pins: str = "", **stages: Any) -> Prepared:
    (folder / "small.yaml").write_text(json.dumps({**RECIPE, **stages}))
    return prepare(str(folder / "small.yaml"), [], pins=pins, store=str(folder / "store"))


@pytest.fixture
def champion(folder: Path) -> ArtifactRef:
    """The model of the first run, chosen by hand."""
    first = prepared(folder)
    made = try_node(first, first.node("base"), lambda line: None).manifest.ref
    move_alias(first.store, "bot", "champion", made, by="ann", reason="first", evidence=Evidence(approved_by="eve"))
    return made


def run(recipe: Prepared, right: str) -> list[Judged]:
    try_node(recipe, recipe.node("gate"), lambda line: None, cluster=lambda: Scripted(right))
    return settled(recipe)


def settled(recipe: Prepared) -> list[Judged]:
    return list(settle_gates(recipe.graph.values(), recipe.repository, "one"))


def test_a_passed_gate_moves_the_candidate_and_a_promotion_the_champion(folder: Path, champion: ArtifactRef) -> None:
    recipe = prepared(folder, **JUDGED)
    (judged,) = run(recipe, right="better")
    better = recipe.node("better").ref
    assert (judged.gate.passed, judged.gate.candidate, judged.gate.baseline) == (True, better, champion)
    assert settled(recipe)[0].move == judged.move
    assert (judged.is_new, judged.waits) == (True, False)
    (reused,) = settle_gates(recipe.graph.values(), recipe.repository, "another")
    assert (reused.move, reused.is_new) == (judged.move, False)
    (move,) = moves_of(recipe.store, "bot", "candidate")
    assert (move.manifest, move.by, move.evidence.gate) == (better, "run one", recipe.node("gate").ref)
    assert f"alignment promote bot --candidate {better}" in judged.lines()[-1]
    evaluations = evaluations_of(recipe.repository, (champion, better))
    (difference,) = differences(recipe.repository, champion, better, evaluations, folder / "cache")
    assert (difference.metric, difference.value, difference.prompts) == ("evaluation.exact", 1.0, 20)
    assert promote(recipe.store, "bot", by="ann", reason="") is not None
    assert prepared(folder, **JUDGED).node("champion").ref == better


def test_a_refused_gate_is_a_result_and_moves_nothing(folder: Path, champion: ArtifactRef) -> None:
    recipe = prepared(folder, **JUDGED)
    (judged,) = run(recipe, right="base")
    assert (judged.gate.passed, judged.move, judged.next_step) == (False, None, "")
    assert judged.lines()[0].startswith("**gate: refused.**")
    assert judged.gate.reason.startswith("exact, greedy: -1.000 (")
    assert read_alias(recipe.store, "bot", "candidate") is None


def test_a_candidate_waits_for_the_person_that_its_gate_asks_for(folder: Path, champion: ArtifactRef) -> None:
    gate = {**JUDGED["gate"], "approval": "required"}
    recipe = prepared(folder, **{**JUDGED, "gate": gate})
    (judged,) = run(recipe, right="better")
    assert "waits for a person" in judged.next_step
    assert waiting(recipe.store, "bot") == judged.move
    command = f"alignment approve bot --candidate {judged.gate.candidate}"
    assert command in "\n".join(judged.lines())
    approve(recipe.store, "bot", by="ann", approved_by="eve", reason="read them")
    assert judged.waits
    assert not settled(recipe)[0].waits
    move_alias(recipe.store, "bot", "candidate", champion, by="ann", reason="")
    assert settled(recipe)[0].next_step == "`bot/candidate` was moved on since: `alignment log bot`"


def test_the_champion_of_a_run_is_that_of_its_first_start(folder: Path, champion: ArtifactRef) -> None:
    recipe = prepared(folder, "runs/one/pins.json", **JUDGED)
    evidence = Evidence(approved_by="eve")
    try_node(recipe, recipe.node("better"), lambda line: None)
    move_alias(recipe.store, "bot", "champion", recipe.node("better").ref, by="b", reason="b", evidence=evidence)
    again = prepared(folder, "runs/one/pins.json", **JUDGED)
    assert again.node("gate").ref == recipe.node("gate").ref
    assert again.node("gate").input_refs["baseline"] == champion
