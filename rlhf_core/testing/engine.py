"""The contract of a rollout engine: sampling repeats, log-probs are those of the weights, and a publish is proven."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from rlhf_core.errors import WeightSyncError
from rlhf_core.rollout.engine import Request, RolloutEngine, SamplingParameters
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.proof import Expected, verify_weights
from rlhf_core.rollout.publication import publication_of
from rlhf_core.types import Completion

_TOLERANCE = 1e-4  # of a log-prob in float32


class RolloutEngineContract:
    """Subclass it with the fixtures `engine` and `weights`. The engine computes in float32."""

    prompts: Sequence[Sequence[int]] = ((1, 5, 6, 7), (1, 9), (1, 10, 11, 12, 13), (1, 5, 6, 7))
    stop_token = 2
    max_length = 64  # that the engine was started with
    serves_weights = True  # False: a double without a model, which accepts publishes and samples as before

    @pytest.fixture
    def engine(self) -> RolloutEngine:
        raise NotImplementedError

    @pytest.fixture
    def weights(self) -> Sequence[Mapping[str, Tensor]]:
        """Return two different states of the model, as a trainer publishes them."""
        raise NotImplementedError

    def sampled(self, *, first_seed: int = 11) -> list[Request]:
        parameters = SamplingParameters(temperature=1.0, top_p=1.0, max_tokens=12, stop_token_ids=(self.stop_token,))
        return [Request(prompt, parameters, first_seed + i) for i, prompt in enumerate(self.prompts)]

    def greedy(self) -> list[Request]:
        return [
            Request(request.prompt, replace(request.parameters, temperature=0.0), None) for request in self.sampled()
        ]

    def test_a_completion_of_each_request_in_their_order(self, engine: RolloutEngine) -> None:
        requests = self.sampled()
        for request, completion in zip(requests, engine.generate(requests), strict=True):
            tokens = completion.token_ids
            assert 0 < len(tokens) <= request.parameters.max_tokens
            assert self.stop_token not in tokens[:-1]
            assert completion.finish_reason == ("stop" if tokens[-1] == self.stop_token else "length")
            assert completion.weight_version == engine.weight_version
            assert len(completion.logprobs) == len(tokens)
            assert all(math.isfinite(logprob) and logprob <= 0 for logprob in completion.logprobs)
        reversed_ = engine.generate(requests[::-1])[::-1]
        assert [c.token_ids for c in reversed_] == [c.token_ids for c in engine.generate(requests)]

    def test_the_same_call_repeats_and_other_seeds_sample_others(self, engine: RolloutEngine) -> None:
        first = engine.generate(self.sampled())
        assert engine.generate(self.sampled()) == first
        assert engine.generate(self.sampled(first_seed=101)) != first
        assert first[0].token_ids != first[3].token_ids, "the same prompt twice is sampled with two seeds"
        greedy = engine.generate(self.greedy())
        assert greedy[0].token_ids == greedy[3].token_ids

    def test_a_completion_ends_where_there_is_no_more_room(self, engine: RolloutEngine) -> None:
        parameters = self.sampled()[0].parameters
        (last,) = engine.generate([Request([1] * (self.max_length - 3), parameters, 1)])
        assert len(last.token_ids) == 3 or last.token_ids[-1] == self.stop_token
        for impossible in ([1] * self.max_length, []):
            with pytest.raises(ValueError, match="prompt 1 "):
                engine.generate([Request([1], parameters, 1), Request(impossible, parameters, 1)])

    def test_sampled_logprobs_are_those_of_the_served_weights(self, engine: RolloutEngine) -> None:
        requests = self.sampled()
        completions = engine.generate(requests)
        sequences = [[*r.prompt, *c.token_ids] for r, c in zip(requests, completions, strict=True)]
        results = engine.logprobs(sequences)
        for sequence, request, completion, logprobs in zip(sequences, requests, completions, results, strict=True):
            assert (len(logprobs), logprobs[0]) == (len(sequence), 0.0)
            assert logprobs[len(request.prompt) :] == pytest.approx(completion.logprobs, abs=_TOLERANCE)

    def test_requests_that_are_advanced_complete_as_by_one_call(self, engine: RolloutEngine) -> None:
        requests = self.sampled()
        expected = dict(enumerate(engine.generate(requests)))
        complete = dict(engine.advance(dict(enumerate(requests[:2]))))
        complete |= engine.advance({2: requests[2], 3: requests[3]})
        while complete.keys() != expected.keys():
            complete |= engine.advance({})
        sampled = {number: each.token_ids for number, each in complete.items() if isinstance(each, Completion)}
        assert sampled == {number: each.token_ids for number, each in expected.items()}
        assert engine.advance({}) == {}

    def test_what_is_abandoned_is_not_returned_and_nothing_is_left_of_it(self, engine: RolloutEngine) -> None:
        requests = self.sampled()
        expected = engine.generate(requests)
        complete = engine.advance(dict(enumerate(requests)))
        left = [number for number in range(4) if number not in complete]
        assert engine.advance({}, abandoned=left).keys().isdisjoint(left)
        assert engine.generate(requests) == expected

    def test_what_it_abandons_is_not_returned_either(self, engine: RolloutEngine) -> None:
        requests = self.sampled()
        expected = engine.generate(requests)
        engine.advance(dict(enumerate(requests)))
        engine.abandon()
        assert engine.advance({}) == {}
        assert engine.generate(requests) == expected

    def test_what_is_kept_of_prompts_changes_no_later_call(self, engine: RolloutEngine) -> None:
        before = engine.generate(self.greedy())
        kept = engine.generate(self.greedy(), keep_prefixes=True)
        assert [c.token_ids for c in kept] == [c.token_ids for c in before]
        engine.forget()
        assert engine.generate(self.greedy()) == before

    def test_after_a_sleep_it_samples_as_before(self, engine: RolloutEngine) -> None:
        before = engine.generate(self.sampled())
        engine.sleep(keep_weights=True)
        engine.wake()
        assert engine.generate(self.sampled()) == before

    def test_published_weights_are_served_and_proven(
        self, engine: RolloutEngine, weights: Sequence[Mapping[str, Tensor]]
    ) -> None:
        first, second = weights
        results, digests = [], []
        for state in (first, second, first):
            version = engine.weight_version + 1
            with publication_of(state, version) as published:
                InlineEngines(engine).publish(published)
            assert engine.weight_version == version
            completions = engine.generate(self.sampled())
            assert {c.weight_version for c in completions} == {version}
            results.append([(c.token_ids, c.logprobs) for c in completions])
            digests.append(published.manifest.digests)
            if self.serves_weights:
                self._require_proof(engine, version, published.manifest.digests)
        assert [tokens for tokens, _ in results[2]] == [tokens for tokens, _ in results[0]]
        for (_, again), (_, logprobs) in zip(results[2], results[0], strict=True):
            assert again == pytest.approx(logprobs, abs=_TOLERANCE)
        if self.serves_weights:
            assert results[1] != results[0]
            with pytest.raises(WeightSyncError):
                self._require_proof(engine, engine.weight_version, digests[1])

    def _require_proof(self, engine: RolloutEngine, version: int, digests: Mapping[str, str]) -> None:
        assert engine.served(), "an engine that says nothing of its weights proves nothing"
        expected = Expected(version, engine.logprobs(self.prompts), digests)
        verify_weights(InlineEngines(engine).call(RolloutEngine.probe, self.prompts), expected, _TOLERANCE)
