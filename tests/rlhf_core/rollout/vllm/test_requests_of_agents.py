"""What agents may ask of an engine beside a completion: a structure, the likeliest tokens, the tokens so far."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_core.chat.encoding import Tokenizer, load_tokenizer, stop_token_ids
from rlhf_core.chat.special_tokens import token_ids
from rlhf_core.config.engines.rollout import VllmEngineConfig
from rlhf_core.config.stages.base_model import BaseModelConfig, ScratchModel
from rlhf_core.processes.child_process import ChildProcess
from rlhf_core.rollout.child_engine import ChildEngine
from rlhf_core.rollout.engine import EngineSettings, Refused, Request, RolloutEngine, SamplingParameters, Unfinished
from rlhf_core.stages import base
from rlhf_core.types import Completion
from tests.rlhf_core.stages.context import LocalContext

pytestmark = pytest.mark.parts

SOURCE = ScratchModel(
    type="scratch", words=(), hidden_size=64, intermediate_size=64, layers=2, heads=2, context_length=256
)
CONFIG = VllmEngineConfig(max_length=250, cpu_cache_gib=0.05, max_sequences=16, structured_output=True)
SCHEMA = {
    "type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yz"]}}, "required": ["a", "b"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def served(
    engine_process: ChildProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Tokenizer, ChildEngine]]:
    folder = tmp_path_factory.mktemp("model")
    made = base.run(BaseModelConfig(source=SOURCE, dtype="float32"), {}, LocalContext(folder, given_seed=0)).folder
    engine = ChildEngine(engine_process, made, EngineSettings(CONFIG, "float32", seed=0))
    yield AutoModelForCausalLM.from_pretrained(made).eval(), load_tokenizer(made), engine
    engine.shutdown()


def asked(tokenizer: Tokenizer, seed: int, max_tokens: int = 100, **wanted: Any) -> Request:
    parameters = SamplingParameters(
        temperature=1.0, top_p=1.0, max_tokens=max_tokens, stop_token_ids=stop_token_ids(tokenizer)
    )
    return Request(token_ids(tokenizer, f"question {seed}"), parameters, seed, **wanted)


def advanced(engine: ChildEngine, requests: dict[int, Request]) -> tuple[dict[int, Any], list[Unfinished]]:
    """The last answer to each, and what there was before."""
    answers: dict[int, Any] = {}
    before: list[Unfinished] = []
    new = requests
    while answers.keys() != requests.keys():
        for number, answer in engine.call_on(0, RolloutEngine.advance, new).items():
            if isinstance(answer, Unfinished):
                before.append(answer)
            else:
                answers[number] = answer
        new = {}
    return answers, before


def distribution(model: Any, request: Request, completion: Completion) -> torch.Tensor:
    """(sampled tokens, vocabulary): the policy's log-probs."""
    with torch.no_grad():
        logits = model(torch.tensor([[*request.prompt, *completion.token_ids]])).logits[0]
    result: torch.Tensor = logits.log_softmax(-1)[len(request.prompt) - 1 : -1]
    return result


def test_a_structure_is_kept_and_its_log_probs_are_not_the_policys(served: tuple[Any, Tokenizer, ChildEngine]) -> None:
    model, tokenizer, engine = served
    requests = {seed: asked(tokenizer, seed, structure=json.dumps(SCHEMA)) for seed in range(6)}
    answers, _ = advanced(engine, requests)
    read = [json.loads(tokenizer.decode(answer.token_ids, skip_special_tokens=True)) for answer in answers.values()]
    assert all(isinstance(each["a"], bool) and each["b"] in ("x", "yz") and len(each) == 2 for each in read)
    assert len({json.dumps(each) for each in read}) > 1
    for number, completion in answers.items():
        policys = distribution(model, requests[number], completion)[
            range(len(completion.token_ids)), list(completion.token_ids)
        ]
        sampled = torch.tensor(list(completion.logprobs))
        assert (sampled >= policys - 1e-4).all()
        assert sampled[0] == 0.0  # the one token that can begin an object
        assert policys[0] < -2


def test_the_likeliest_tokens_have_their_log_probs(served: tuple[Any, Tokenizer, ChildEngine]) -> None:
    model, tokenizer, engine = served
    request = asked(tokenizer, 3, max_tokens=8, top_logprobs=4)
    ((completion,), (advanced_one,)) = (
        engine.share(RolloutEngine.generate, [request]), list(advanced(engine, {0: request})[0].values())
    )  # fmt: skip
    assert [list(top) for top in advanced_one.top_logprobs] == [list(top) for top in completion.top_logprobs]
    expected = distribution(model, request, completion).topk(4)
    assert len(completion.top_logprobs) == len(completion.token_ids)
    for top, tokens, values in zip(completion.top_logprobs, expected.indices, expected.values, strict=True):
        assert list(top) == tokens.tolist()
        assert list(top.values()) == pytest.approx(values.tolist(), abs=1e-4)


def test_a_stream_has_the_beginnings_of_its_completion(served: tuple[Any, Tokenizer, ChildEngine]) -> None:
    _, tokenizer, engine = served
    request = replace(asked(tokenizer, 5, max_tokens=200, streams=True), parameters=replace(
        asked(tokenizer, 5).parameters, max_tokens=200, stop_token_ids=()
    ))  # fmt: skip
    answers, before = advanced(engine, {7: request, 8: asked(tokenizer, 6, max_tokens=1)})
    assert before
    for each in before:
        assert tuple(answers[7].token_ids[: len(each.token_ids)]) == each.token_ids
        assert answers[7].logprobs[: len(each.token_ids)] == pytest.approx(each.logprobs)
    assert len(before[0].token_ids) < 200


def test_what_has_no_grammar_is_refused_and_harms_no_other(served: tuple[Any, Tokenizer, ChildEngine]) -> None:
    _, tokenizer, engine = served
    requests = {
        0: asked(tokenizer, 0, structure='{"type": "nothing"}'),
        1: asked(tokenizer, 1, max_tokens=3),
        2: asked(tokenizer, 2, structure='{"$ref": "#/$defs/missing"}'),
        3: asked(tokenizer, 3, structure='{"type": "string", "pattern": "("}'),
    }
    answers, _ = advanced(engine, requests)
    assert [type(answers[number]) for number in (0, 2, 3)] == [Refused] * 3, answers
    assert isinstance(answers[1], Completion)
    assert [type(each) for each in advanced(engine, {4: requests[1]})[0].values()] == [Completion]
