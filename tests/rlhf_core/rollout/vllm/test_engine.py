"""The vLLM engine against transformers, on real engines with small random models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from rlhf_core.config.engines.rollout import VllmEngineConfig
from rlhf_core.errors import StageError
from rlhf_core.processes.child_process import ChildProcess
from rlhf_core.rollout.child_engine import ChildEngine
from rlhf_core.rollout.engine import EngineSettings, Request, RolloutEngine, SamplingParameters
from rlhf_core.rollout.proof import Expected, default_tolerance, verify_weights
from rlhf_core.rollout.publication import publication_of
from tests.rlhf_core.rollout.models import (
    EOS,
    cached_tokens,
    disturb,
    expected_logprobs,
    make_model,
    publish,
    requests,
)

pytestmark = pytest.mark.parts

CONFIG = VllmEngineConfig(max_length=64, cpu_cache_gib=0.05, max_sequences=16)
PROMPTS = [[1, 5, 6, 7], [1, 9], [1, 20, 21, 22, 23, 24, 25], [1, 5, 6, 7]]
PROBE = [[1, 5, 6, 7, 40, 41, 42], [1, 9, 11, 13, 15, 17, 19, 21, 23], [1, 3]]
AT_0_7 = SamplingParameters(temperature=0.7, top_p=1.0, max_tokens=12, stop_token_ids=(EOS,))
AT_0 = SamplingParameters(temperature=0.0, top_p=1.0, max_tokens=12, stop_token_ids=(EOS,))
LONG = SamplingParameters(temperature=0.7, top_p=1.0, max_tokens=40, stop_token_ids=())
SAMPLED, GREEDY = requests(PROMPTS, AT_0_7), requests(PROMPTS, AT_0)

Served = tuple[LlamaForCausalLM, ChildEngine]


@pytest.fixture(scope="module", params=["tied", "untied"])
def served(
    engine_process: ChildProcess, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A model and an engine that serves it; each test leaves the engine with the model's weights."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(folder, tied=request.param == "tied")
    engine = ChildEngine(engine_process, folder, EngineSettings(CONFIG, "float32", seed=0))
    yield model, engine
    engine.shutdown()


def worst_difference(a: list[list[float]], b: list[list[float]]) -> float:
    return max(abs(x - y) for s, t in zip(a, b, strict=True) for x, y in zip(s, t, strict=True))


@pytest.mark.slow("the first test of an engine starts the engines' process")
def test_sampled_logprobs_are_those_of_transformers_at_the_sampling_temperature(served: Served) -> None:
    model, engine = served
    for prompt, completion in zip(PROMPTS, engine.share(RolloutEngine.generate, SAMPLED), strict=True):
        whole = [*prompt, *completion.token_ids]
        expected = expected_logprobs(model, [whole], temperature=0.7)[0][len(prompt) :]
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)
        assert completion.weight_version == engine.call_on(0, RolloutEngine.probe, []).version


def test_greedy_is_transformers_greedy(served: Served) -> None:
    model, engine = served
    for prompt, completion in zip(PROMPTS, engine.share(RolloutEngine.generate, GREEDY), strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
        assert list(completion.token_ids) == expected[0, len(prompt) :].tolist()


def test_a_stop_token_ends_the_completion_and_is_part_of_it(served: Served) -> None:
    _, engine = served
    free = engine.share(RolloutEngine.generate, GREEDY[:1])[0].token_ids
    request = Request(PROMPTS[0], replace(AT_0, stop_token_ids=(free[2],)), seed=None)
    (stopped,) = engine.share(RolloutEngine.generate, [request])
    assert stopped.token_ids == free[: free.index(free[2]) + 1]
    assert stopped.finish_reason == "stop"
    assert len(stopped.logprobs) == len(stopped.token_ids)


def test_logprobs_of_given_sequences(served: Served) -> None:
    model, engine = served
    full = [1, *range(3, 66)]  # 64 tokens: as long as the model's context
    sequences = [*PROBE, full, [1]]
    assert worst_difference(engine.share(RolloutEngine.logprobs, sequences), expected_logprobs(model, sequences)) < 1e-4


def test_prompt_and_completion_fit_in_max_length_together(served: Served) -> None:
    _, engine = served
    parameters = SamplingParameters(temperature=1.0, top_p=1.0, max_tokens=30, stop_token_ids=())
    completion = engine.share(RolloutEngine.generate, requests([[1] * 60], parameters))[0]
    assert (len(completion.token_ids), completion.finish_reason) == (4, "length")
    with pytest.raises(ValueError, match=r"prompt 1 has 64 tokens .* at most 64"):
        engine.share(RolloutEngine.generate, requests([[1], [1] * 64], parameters))
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        engine.share(RolloutEngine.generate, requests([[]], parameters))
    with pytest.raises(ValueError, match="sequence 0 has 65 tokens"):
        engine.share(RolloutEngine.logprobs, [[1] * 65])


def test_published_weights_are_served_and_proven(served: Served) -> None:
    model, engine = served
    for version in (7, 8):
        disturb(model, seed=version)
        digests = publish(engine, model.state_dict(), version)
        expected = Expected(version, expected_logprobs(model, PROBE), digests)
        assert verify_weights(engine.call(RolloutEngine.probe, PROBE), expected, 1e-4).difference < 1e-4
        assert engine.call_on(0, RolloutEngine.probe, []).version == version


def test_a_sleeping_engine_serves_nothing(served: Served) -> None:
    """On CPU nothing is freed, and nothing is lost: only the order of calls is kept."""
    model, engine = served
    before = engine.share(RolloutEngine.generate, GREEDY)
    engine.call(RolloutEngine.sleep, keep_weights=True)
    for refused in (
        lambda: engine.share(RolloutEngine.generate, GREEDY),
        lambda: engine.share(RolloutEngine.logprobs, PROBE),
        lambda: engine.call(RolloutEngine.served),
    ):
        with pytest.raises(RuntimeError, match="the engine is asleep; this needs it awake"):
            refused()
    with publication_of(model.state_dict(), 50) as weights, pytest.raises(RuntimeError, match="the engine is asleep"):
        engine.call(RolloutEngine.load_weights, weights.transport, weights.manifest)
    engine.call(RolloutEngine.wake)
    assert engine.share(RolloutEngine.generate, GREEDY) == before
    with pytest.raises(RuntimeError, match="the engine is awake; this needs it asleep"):
        engine.call(RolloutEngine.wake)
    engine.call(RolloutEngine.sleep, keep_weights=False)
    engine.call(RolloutEngine.wake)
    with pytest.raises(RuntimeError, match="the engine is awake without weights; this needs it awake"):
        engine.share(RolloutEngine.generate, GREEDY)
    publish(engine, model.state_dict(), 51)
    assert [c.token_ids for c in engine.share(RolloutEngine.generate, GREEDY)] == [c.token_ids for c in before]


def test_requests_join_others_that_are_being_sampled(served: Served) -> None:
    model, engine = served
    asked = dict(enumerate([*requests(PROMPTS, LONG), *requests(PROMPTS, LONG, first_seed=20)]))
    asked[0] = replace(asked[0], parameters=replace(LONG, max_tokens=1))
    complete = engine.call_on(0, RolloutEngine.advance, {number: asked[number] for number in range(4)})
    assert list(complete) == [0]
    complete |= engine.call_on(0, RolloutEngine.advance, {number: asked[number] for number in range(4, 8)})
    with pytest.raises(RuntimeError, match="completions that `advance` has begun are not whole yet"):
        engine.share(RolloutEngine.generate, GREEDY)
    while len(complete) < 8:
        complete |= engine.call_on(0, RolloutEngine.advance, {})
    assert engine.call_on(0, RolloutEngine.advance, {}) == {}
    for number, completion in complete.items():
        prompt = asked[number].prompt
        whole = len(completion.token_ids) == asked[number].parameters.max_tokens
        assert whole or completion.token_ids[-1] == EOS
        expected = expected_logprobs(model, [[*prompt, *completion.token_ids]], temperature=0.7)[0][len(prompt) :]
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)
    # Alone or beside others, a seed has the same random numbers.
    alone = engine.share(RolloutEngine.generate, [asked[1], asked[2]])
    assert [complete[n].token_ids for n in (1, 2)] == [c.token_ids for c in alone]


def test_completions_continue_with_weights_that_are_published_meanwhile(served: Served) -> None:
    model, engine = served
    asked = dict(enumerate(requests(PROMPTS, LONG, first_seed=40)))
    asked[0] = replace(asked[0], parameters=replace(LONG, max_tokens=1))
    complete = engine.call_on(0, RolloutEngine.advance, asked)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    disturb(model, seed=7)
    first = engine.call_on(0, RolloutEngine.probe, []).version
    second = first + 1
    publish(engine, model.state_dict(), second)
    proof = verify_weights(  # also while completions are half sampled
        engine.call(RolloutEngine.probe, PROBE),
        Expected(second, expected_logprobs(model, PROBE)),
        default_tolerance("float32"),
    )
    assert proof.difference < 1e-4
    while len(complete) < 4:
        complete |= engine.call_on(0, RolloutEngine.advance, {})
    new = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for number in (1, 2, 3):
        made, prompt = complete[number], asked[number].prompt
        sequence = [*prompt, *made.token_ids]
        after = expected_logprobs(model, [sequence], temperature=0.7)[0][len(prompt) :]
        model.load_state_dict(before)
        by_old = expected_logprobs(model, [sequence], temperature=0.7)[0][len(prompt) :]
        model.load_state_dict(new)
        (of_first, of_second) = made.stretches
        assert (made.weight_version, of_first.weight_version, of_second.weight_version) == (first, first, second)
        assert of_first.tokens + of_second.tokens == len(made.token_ids)
        assert made.logprobs[: of_first.tokens] == pytest.approx(by_old[: of_first.tokens], abs=1e-4)
        assert made.logprobs[of_first.tokens :] == pytest.approx(after[of_first.tokens :], abs=1e-4)
        assert made.logprobs != pytest.approx(by_old, abs=1e-2)
        assert made.logprobs != pytest.approx(after, abs=1e-2)


def test_what_is_abandoned_is_sampled_no_further(served: Served) -> None:
    _, engine = served
    asked = dict(enumerate(requests(PROMPTS, LONG)))
    asked[0] = replace(asked[0], parameters=replace(LONG, max_tokens=1))
    complete = engine.call_on(0, RolloutEngine.advance, asked)  # of others too, if their first token ends them
    assert 0 in complete
    left = engine.call_on(0, RolloutEngine.advance, {}, abandoned=[0, 1, 2])  # 0 is whole already
    while 3 not in complete | left:
        left |= engine.call_on(0, RolloutEngine.advance, {})
    assert left.keys() <= {3}
    assert engine.call_on(0, RolloutEngine.advance, {}) == {}
    (alone,) = engine.share(RolloutEngine.generate, [asked[3]])  # idle, else it would refuse
    assert (complete | left)[3].token_ids == alone.token_ids


def test_a_later_turn_computes_the_rest_alone_until_the_weights_change(
    engine_process: ChildProcess, tmp_path: Path
) -> None:
    model = make_model(tmp_path, tied=True, context=512)
    config = CONFIG.model_copy(update={"max_length": 512})
    engine = ChildEngine(engine_process, tmp_path, EngineSettings(config, "float32", seed=0))
    prompt = [1, *(3 + index * index % 90 for index in range(299))]
    turn = [*prompt, *engine.share(RolloutEngine.generate, requests([prompt], AT_0))[0].token_ids, 5, 6, 7]
    assert cached_tokens(engine, requests([turn], AT_0), keep_prefixes=True)[0] >= 256
    (reply,) = engine.share(RolloutEngine.generate, requests([turn], AT_0_7), keep_prefixes=True)
    expected = expected_logprobs(model, [[*turn, *reply.token_ids]], temperature=0.7)[0][len(turn) :]
    assert reply.logprobs == pytest.approx(expected, abs=1e-4)
    assert cached_tokens(engine, requests([turn], AT_0), keep_prefixes=False) == [0]
    engine.call_on(0, RolloutEngine.advance, {0: requests([[9, *prompt]], replace(AT_0, max_tokens=1))[0]})
    assert cached_tokens(engine, requests([[9, *prompt]], AT_0), keep_prefixes=True)[0] >= 256
    disturb(model, seed=1)
    publish(engine, model.state_dict(), 1)
    assert cached_tokens(engine, requests([turn, [9, *prompt]], AT_0), keep_prefixes=True) == [0, 0]
    engine.shutdown()


def test_more_prompt_tokens_than_one_forward_takes(engine_process: ChildProcess, tmp_path: Path) -> None:
    """On CPU vLLM cannot cut a seeded request's prompt in two: it must wait for the next forward whole."""
    model = make_model(tmp_path, tied=True)
    engine = ChildEngine(
        engine_process, tmp_path, EngineSettings(CONFIG.model_copy(update={"max_sequences": 128}), "float32", seed=0)
    )
    prompts = [[1, *range(3, 50), 3 + index % 90] for index in range(100)]  # 4,900 tokens, 4,096 of them at once
    completions = engine.share(RolloutEngine.generate, requests(prompts, AT_0_7, first_seed=0))
    for index in (0, 83, 84, 99):
        expected = expected_logprobs(model, [[*prompts[index], *completions[index].token_ids]], temperature=0.7)
        assert completions[index].logprobs == pytest.approx(expected[0][49:], abs=1e-4)
    engine.shutdown()


def test_bfloat16_is_proven_too(engine_process: ChildProcess, tmp_path: Path) -> None:
    model = make_model(tmp_path, tied=True, dtype=torch.bfloat16)
    engine = ChildEngine(engine_process, tmp_path, EngineSettings(CONFIG, "bfloat16", seed=0))
    disturb(model, seed=1)
    # As a trainer with float32 master weights publishes it.
    digests = publish(engine, model.float().state_dict(), 1, dtype=torch.bfloat16)
    expected = Expected(1, expected_logprobs(model.bfloat16(), PROBE), digests)
    tolerance = default_tolerance("bfloat16")
    assert verify_weights(engine.call(RolloutEngine.probe, PROBE), expected, tolerance).difference < tolerance
    engine.shutdown()


def test_settings_that_cannot_be_served_are_refused_before_the_engine_starts(
    engine_process: ChildProcess, tmp_path: Path
) -> None:
    make_model(tmp_path, tied=True)
    with pytest.raises(ValueError, match="max_length is 65, but the model was made for 64 tokens"):
        ChildEngine(
            engine_process, tmp_path, EngineSettings(CONFIG.model_copy(update={"max_length": 65}), "float32", seed=0)
        )


def test_an_engine_does_not_start_with_weights_that_are_not_whole(engine_process: ChildProcess, tmp_path: Path) -> None:
    """vLLM itself starts: with q and v it takes the fused layer of q, k and v for loaded."""
    make_model(tmp_path, tied=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StageError, match=r"missing are model\.layers\.0\.self_attn\.k_proj\.weight"):
        ChildEngine(engine_process, tmp_path, EngineSettings(CONFIG, "float32", seed=0))
