"""The nodes computed to try one, and the store afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.artifacts.verification import verify
from rlhf_core.data.reading import read_rows
from rlhf_core.errors import RecipeError
from rlhf_core.graph.rerun import Rerun
from rlhf_core.pipeline.in_process import try_node
from rlhf_core.pipeline.prepare import Prepared, prepare

pytestmark = pytest.mark.parts

RECIPE: dict[str, Any] = {
    "name": "small",
    "data": {
        "shared": {"format": "text", "source": {"type": "files", "paths": ["shared.jsonl"]}},
        "words": {"format": "text", "exclude": ["shared"], "source": {"type": "files", "paths": ["words.jsonl"]}},
    },
    "base": {"dtype": "float32", "source": {"type": "scratch", "hidden_size": 16, "heads": 2, "layers": 1}},
    "pretrain": {"dataset": "words", "batch_size": 2, "max_length": 16, "optimizer": {"learning_rate": 1e-3}},
}


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ALIGNMENT_STORE", str(tmp_path / "configured"))
    return written(tmp_path)


def written(folder: Path, **changes: Any) -> Prepared:
    for name in ("shared", "words"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{name} {i}"}) + "\n" for i in range(3)))
    (folder / "small.yaml").write_text(json.dumps({**RECIPE, **changes}))
    return prepare(str(folder / "small.yaml"), [], store=str(folder / "store"))


def tried(prepared: Prepared, name: str, *, again: bool = False) -> list[str]:
    """What was said of whole nodes."""
    said: list[str] = []
    try_node(prepared, prepared.node(name), said.append, again=again)
    return [" ".join(line.split()[:2]) for line in said if ": reused" in line or ": computed" in line]


def test_only_what_the_store_lacks_is_computed_and_the_node_itself_in_any_case(prepared: Prepared) -> None:
    assert tried(prepared, "data.words") == ["data.shared: computed", "data.words: computed"]
    assert tried(prepared, "data.words") == ["data.shared: reused,", "data.words: computed"]
    assert tried(prepared, "data.words", again=True) == ["data.shared: computed", "data.words: computed"]
    assert not (Path(prepared.store.url).parent / "configured").exists()


def test_the_first_result_stays_and_the_new_one_is_shown(prepared: Prepared) -> None:
    node = prepared.node("data.words")
    first = try_node(prepared, node, lambda line: None)
    second = try_node(prepared, node, lambda line: None)
    assert first.kept is None
    assert second.kept == first.manifest == prepared.repository.manifest(node.ref)
    assert second.manifest.finished_at > first.manifest.finished_at
    assert len(read_rows(second.folder)) == 3


def test_of_a_node_whose_result_is_there_the_inputs_are_not_needed(prepared: Prepared, tmp_path: Path) -> None:
    tried(prepared, "data.words")
    lost = prepared.repository.manifest(prepared.node("data.shared").ref)
    assert lost is not None
    prepared.store.delete(f"{lost.ref.path}/manifest.json")
    stages = {"long": {**RECIPE["pretrain"], "stage": "pretrain"}}
    again = written(tmp_path, **stages)
    assert "data.shared" not in " ".join(_names(again, "long"))


def _names(prepared: Prepared, name: str) -> list[str]:
    from rlhf_core.pipeline.in_process import _before

    return [node.name for node in _before(prepared, prepared.node(name), again=False)]


def test_an_artifact_is_there_or_the_recipe_is_refused(prepared: Prepared, tmp_path: Path) -> None:
    tried(prepared, "data.shared")
    ref = prepared.node("data.shared").ref
    named = {"other": {"stage": "artifact", "ref": f"dataset/{ref.key[:12]}"}}
    there = written(tmp_path, **named)
    assert tried(there, "other") == []
    assert try_node(there, there.node("other"), lambda line: None).manifest.ref == ref
    named["other"]["ref"] = "dataset/0123"
    with pytest.raises(RecipeError, match=r"store has no artifact or alias `dataset/0123`"):
        written(tmp_path, **named)


def test_an_unknown_node_names_the_nearest_and_all(prepared: Prepared) -> None:
    said = r"no node `data\.word` \(did you mean `data\.words`\?\); it has base, data\.shared, data\.words, pretrain"
    with pytest.raises(RecipeError, match=said):
        prepared.node("data.word")


def test_a_node_that_is_run_again_has_a_result_of_its_own_beside_the_first(prepared: Prepared, tmp_path: Path) -> None:
    first = try_node(prepared, prepared.node("data.words"), lambda line: None).manifest
    rerun = Rerun.parse("data.words", label="again")
    again = prepare(str(tmp_path / "small.yaml"), [], store=prepared.store.url, rerun=rerun)
    second = try_node(again, again.node("data.words"), lambda line: None).manifest
    assert (first.rerun, second.rerun, second.ref != first.ref) == ("", "again", True)
    assert second.files == first.files, "this stage draws nothing at random"
    assert prepared.repository.manifest(first.ref) == first
    assert not verify(prepared.repository).damage
    prepared.store.put(
        f"{second.ref.path}/manifest.json", second.model_copy(update={"rerun": ""}).model_dump_json().encode()
    )
    (damage,) = verify(prepared.repository).damage
    assert damage.what == "its rerun is not that of its spec.json"
