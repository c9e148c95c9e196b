"""Trajectories in a checkpoint are those that were put there."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from rlhf_core.errors import StoreError
from rlhf_core.rl.shown_files import ShownFiles
from rlhf_core.rl.stored import StoredGroups, stored, trajectory_of
from rlhf_core.types import Branch, Prompt, SequenceImage, Stretch, Trajectory
from tests.rlhf_core.stages.context import LocalContext

pytestmark = pytest.mark.parts

PROMPT = Prompt("id", "2+2?", (1, 2), {"answer": "4"}, images=(SequenceImage("folder/digest", 1, 1),))
TRAJECTORY = Trajectory(
    prompt=PROMPT, token_ids=torch.tensor([1, 2, 5, 6]), loss_mask=torch.tensor([False, False, True, True]),
    rollout_logprobs=torch.tensor([0.0, 0.0, -0.1, -1.7]), weight_version=3, finish_reason="stop", completion="vier",
    messages=({"role": "user", "content": "2+2?"},), turns=2, environment_reward=0.25, reward=0.1, score=1.0,
    step_rewards=torch.tensor([0.0, 0.0, 0.0, 0.3]), step_ends=torch.tensor([False, False, False, True]),
    stretches=(Stretch(1, 3), Stretch(1, 4)), extra={"exact": 1.0},
    branches=(Branch(torch.tensor([1, 7]), torch.tensor([False, True]), torch.tensor([0.0, -0.3])),),
)  # fmt: skip


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Branch):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    if isinstance(one, tuple):
        return isinstance(other, tuple) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return one == other


def test_every_field_comes_back_to_the_bit() -> None:
    plain = replace(TRAJECTORY, messages=None, score=None, step_rewards=None, step_ends=None, stretches=(), branches=())
    for trajectory in (TRAJECTORY, plain):
        back = trajectory_of(json.loads(json.dumps(stored(trajectory))), PROMPT)
        assert {f.name for f in fields(back) if not same(getattr(trajectory, f.name), getattr(back, f.name))} == set()


def test_what_an_environment_asked_comes_back_without_the_images_of_the_row() -> None:
    asked = replace(TRAJECTORY, prompt=replace(PROMPT, text="3+3?", token_ids=(1,), images=()))
    back = trajectory_of(json.loads(json.dumps(stored(asked))), PROMPT)
    assert back.prompt == asked.prompt


def test_images_that_episodes_show_are_restored_on_another_node(tmp_path: Path) -> None:
    """From the store: of the images, the row's own is in its dataset there."""
    folder, digests = tmp_path / "shown", [each * 64 for each in "ab"]
    folder.mkdir()
    contents = {hashlib.sha256(each.encode()).hexdigest(): each for each in digests}
    for digest, content in contents.items():
        (folder / digest).write_text(content)
    first, other = (str(folder / digest) for digest in contents)
    branch = replace(TRAJECTORY.branches[0], images=(SequenceImage(other, 0, 1, (3, 4)), SequenceImage(first, 1, 1)))
    given = replace(TRAJECTORY, feedback_images=(SequenceImage(first, 2, 1),), branches=(branch,))
    context, shown = LocalContext(tmp_path / "work"), ShownFiles(folder, LocalContext(tmp_path / "work"))
    saved = json.loads(json.dumps(StoredGroups(shown).save([[given]])))
    for path in folder.iterdir():
        path.unlink()
    elsewhere = ShownFiles(tmp_path / "elsewhere", context)
    ((back,),) = StoredGroups(elsewhere).load([(PROMPT, saved[0])])
    assert {path.name: path.read_text() for path in elsewhere.folder.iterdir()} == contents
    assert back.prompt == PROMPT
    (again,) = back.feedback_images
    assert (Path(again.path), again.start, again.length) == (elsewhere.folder / Path(first).name, 2, 1)
    assert [(Path(i.path).name, i.start, i.written) for i in back.branches[0].images] == [
        (Path(other).name, 0, (3, 4)), (Path(first).name, 1, ()),
    ]  # fmt: skip
    assert json.loads(json.dumps(stored(back))) == saved[0][0]
    nowhere = ShownFiles(tmp_path / "nowhere", LocalContext(tmp_path / "another store"))
    with pytest.raises(StoreError, match="has no object"):
        StoredGroups(nowhere).load([(PROMPT, saved[0])])
