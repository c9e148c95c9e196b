"""Pass rates of artifacts: of a policy's file and of completions, by prompt and reward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.artifacts.manifest import Kind, file_digest
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.contract import Input
from rlhf_core.data.reading import write_dataset
from rlhf_core.errors import StageError
from rlhf_core.rl.pass_rates import RATES_FILE, PassRate, PassRates, prompt_identity, read_pass_rates
from tests.rlhf_core.stages.context import LocalContext, local_input

VERIFIER: dict[str, Any] = {"type": "verifier"}
ASKED = [{"prompt": [{"role": "user", "content": text}]} for text in ("one", "two")]
ONE, TWO = map(prompt_identity, ASKED)


def config(reward: dict[str, Any], *rates: str) -> RLConfig:
    return RLConfig.model_validate({
        "algorithm": "grpo", "dataset": "p", "steps": 9, "prompts_per_step": 4, "sampling": {"max_tokens": 16},
        "rollout": {"max_length": 32}, "select": {"pass_rate": (0.1, 0.9), "rates": rates},
        "grpo": {"rewards": {"own": reward}, "group_size": 4, "optimizer": {"learning_rate": 1.0}},
    })  # fmt: skip


def read(folder: Path, reward: dict[str, Any], **sources: Input) -> PassRates:
    inputs = {f"select.rates.{name}": source for name, source in sources.items()}
    rates = read_pass_rates(config(reward, *sources), inputs, LocalContext(folder / "work", folder))
    assert rates is not None
    return rates


def completions(folder: Path, rewards: list[list[float]], settings: dict[str, Any], **files: str) -> Input:
    """A dataset of completions with `rewards` of the prompts; the stage that made it had the reward's `settings`."""
    rows = [
        {"id": f"{i}", **asked, "completions": [{"text": "", "rewards": {"theirs": value}} for value in values]}
        for i, (asked, values) in enumerate(zip(ASKED, rewards, strict=False))
    ]
    write_dataset(folder, rows, {"format": "completions"})
    source = local_input(folder, Kind.DATASET)
    changed = {"config": settings, "user_files": files}
    return Input(source.manifest.model_copy(update=changed), folder)


def dumped(reward: dict[str, Any]) -> dict[str, Any]:
    return config(reward).settings.rewards["own"].model_dump(mode="json")


def test_completions_with_the_same_reward_give_rates(tmp_path: Path) -> None:
    # Another name and another weight are the same reward, as are those of kept rollouts, below an algorithm.
    theirs = {"theirs": {**dumped(VERIFIER), "weight": 3.0}}
    generated = completions(tmp_path / "a", [[1.0, 0.0, 0.0, 0.0], [1.0]], {"rewards": theirs})
    kept = completions(tmp_path / "b", [[1.0, 1.0]], {"algorithm": "grpo", "grpo": {"rewards": theirs}})
    rates = read(tmp_path, VERIFIER, generated=generated, kept=kept)
    assert (rates.get(ONE), rates.get(TWO)) == (PassRate(0.5, 6, 0), PassRate(1.0, 1, 0))


def test_rates_of_another_reward_are_refused(tmp_path: Path) -> None:
    other = {"theirs": dumped({"type": "verifier", "kind": "math"})}
    source = completions(tmp_path / "a", [[1.0]], {"rewards": other})
    with pytest.raises(StageError, match=r"select\.rates: .* has no pass rates of the reward `own`, with the same"):
        read(tmp_path, VERIFIER, generated=source)


def test_a_file_of_a_reward_counts_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def reward(completions, prompts, rows): ...\n", encoding="utf-8")
    reward = {"type": "function", "path": "own.py"}
    theirs = {"theirs": {**dumped(reward), "path": "moved.py"}}
    digest = file_digest(tmp_path / "own.py")
    same = completions(tmp_path / "a", [[1.0]], {"rewards": theirs}, **{"moved.py": digest})
    assert read(tmp_path, reward, same=same).get(ONE) == PassRate(1.0, 1, 0)
    changed = completions(tmp_path / "b", [[1.0]], {"rewards": theirs}, **{"moved.py": "0" * 64})
    with pytest.raises(StageError, match="has no pass rates of the reward `own`"):
        read(tmp_path, reward, changed=changed)


def test_a_reward_beyond_one_is_no_pass_rate(tmp_path: Path) -> None:
    source = completions(tmp_path / "a", [[2.0]], {"rewards": {"theirs": dumped(VERIFIER)}})
    with pytest.raises(StageError, match="row 0: the reward `theirs` is not from 0 to 1"):
        read(tmp_path, VERIFIER, generated=source)


def test_a_run_hands_its_rates_and_those_it_had_to_the_next(tmp_path: Path) -> None:
    first = read(tmp_path, VERIFIER)
    first.observe(ONE, [1.0, 0.0], 3)
    first.write(tmp_path)
    source = local_input(tmp_path, Kind.POLICY)
    second = read(tmp_path, VERIFIER, policy=source)
    assert second.get(ONE) == PassRate(0.5, 2, 0)
    assert second.state_dict() == {}  # read again by a resumed run
    second.observe(TWO, [1.0] * 4, 1)
    second.write(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / RATES_FILE).read_text(encoding="utf-8").splitlines()]
    assert {line["prompt"]: (line["rate"], line["samples"], line["step"]) for line in lines} == {
        ONE: (0.5, 2, 0), TWO: (1.0, 4, 1),
    }  # fmt: skip
    with pytest.raises(StageError, match="has no pass rates of the reward `own`"):
        read(tmp_path, {"type": "verifier", "kind": "math"}, policy=source)


def test_a_prompt_is_known_by_what_it_asks() -> None:
    assert prompt_identity({**ASKED[0], "answer": "1", "id": "x"}) == ONE != TWO
    assert prompt_identity({**ASKED[0], "tools": [{"name": "f"}]}) != ONE
