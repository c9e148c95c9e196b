"""What the scripted engine samples, cut and versioned; its contract is in tests/contracts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rlhf_core.rollout.engine import Request, SamplingParameters
from rlhf_core.rollout.scripted import ScriptedEngine
from rlhf_core.rollout.transport.base import WeightManifest
from rlhf_core.rollout.transport.folder import SharedFolder

pytestmark = pytest.mark.parts

SAMPLED = SamplingParameters(temperature=1.0, top_p=1.0, max_tokens=4, stop_token_ids=(2,))
GREEDY = SamplingParameters(temperature=0.0, top_p=1.0, max_tokens=4, stop_token_ids=(2,))


def sampled(*prompts: Sequence[int]) -> list[Request]:
    return [Request(prompt, SAMPLED, 10 * (index + 1)) for index, prompt in enumerate(prompts)]


def count_from_seed(prompt: Sequence[int], seed: int | None) -> list[int]:
    return [prompt[0], seed or 0, 2, 99] if prompt[0] < 10 else [7] * 100


def test_completions_stop_as_an_engine_stops_them() -> None:
    engine = ScriptedEngine(count_from_seed, max_length=8, logprob=-0.5)
    stopped, cut, squeezed = engine.generate(sampled([5], [50], [50] * 6))
    assert (list(stopped.token_ids), stopped.finish_reason) == ([5, 10, 2], "stop")
    assert (list(cut.token_ids), cut.finish_reason) == ([7, 7, 7, 7], "length")
    assert (list(squeezed.token_ids), squeezed.finish_reason) == ([7, 7], "length")
    assert list(stopped.logprobs) == [-0.5, -0.5, -0.5]
    assert list(engine.generate(sampled([5], [6], [7]))[1].token_ids) == [6, 20, 2]
    assert list(engine.generate([Request([5], GREEDY, None)])[0].token_ids) == [5, 0, 2]
    with pytest.raises(ValueError, match="prompt 1 has 8 tokens"):
        engine.generate(sampled([5], [5] * 8))


def test_a_random_request_has_a_seed_and_a_greedy_one_none() -> None:
    with pytest.raises(ValueError, match="temperature 1 with the seed None"):
        Request([5], SAMPLED, None)
    with pytest.raises(ValueError, match="temperature 0 with the seed 3"):
        Request([5], GREEDY, 3)


def test_versions_and_logprobs() -> None:
    engine = ScriptedEngine(count_from_seed, logprob=-0.5)
    assert engine.weight_version == 0
    engine.load_weights(SharedFolder(Path("folder")), WeightManifest(3, {}, {}))
    assert engine.generate([Request([5], GREEDY, None)])[0].weight_version == 3
    assert engine.loaded == [(SharedFolder(Path("folder")), 3)]
    assert engine.logprobs([[1, 2, 3], [4]]) == [[0.0, -0.5, -0.5], [0.0]]
