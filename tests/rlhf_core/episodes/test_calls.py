"""Calls of one episode: bounded, recorded as the engine returned them, and joined into as few sequences as can be."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from rlhf_core.environments.agents.program import Call, CallError, CallOptions, Outcome, Policy, Program
from rlhf_core.episodes.calls import Calls, TokenSequence, chosen, joined, trajectory_of
from rlhf_core.episodes.engine_queue import RefusedRequestError
from rlhf_core.episodes.episode import EpisodeRules
from rlhf_core.episodes.programs import play_program
from rlhf_core.episodes.stops import until_stop
from rlhf_core.errors import EpisodeError
from rlhf_core.rollout.engine import Request, SamplingParameters
from rlhf_core.types import Completion, FinishReason, Prompt, SequenceImage, Stretch, Trajectory

SAMPLING = SamplingParameters(temperature=1.0, top_p=1.0, max_tokens=6, stop_token_ids=(0,))


class Letters:
    """A tokenizer of 27 tokens: 0 ends a turn, and the others are letters."""

    def __len__(self) -> int:
        return 27

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "".join(chr(96 + token) for token in tokens if token)


LETTERS: Any = Letters()


def completion(tokens: Sequence[int], version: int = 0, reason: FinishReason = "stop") -> Completion:
    return Completion(tuple(tokens), tuple(-float(token) for token in tokens), reason, version)


def call(number: int, prompt: Sequence[int], sampled: Sequence[int], version: int = 0) -> Call:
    return Call(number, tuple(prompt), completion(sampled, version))


def tokens_of(sequences: Sequence[TokenSequence]) -> list[list[int]]:
    return [list(each.token_ids) for each in sequences]


def test_calls_that_continue_each_other_are_one_sequence() -> None:
    first, second = call(0, [1, 2], [3, 0]), call(1, [1, 2, 3, 0, 4], [5, 6])
    (sequence,) = joined([first, second])
    assert list(sequence.token_ids) == [1, 2, 3, 0, 4, 5, 6]
    assert list(sequence.sampled) == [False, False, True, True, False, True, True]
    assert list(sequence.logprobs) == [0, 0, -3, 0, 0, -5, -6]
    assert sequence.calls == [first, second]


def test_what_continues_an_earlier_reply_is_a_branch_in_which_that_is_given() -> None:
    calls = [call(0, [1], [2, 0]), call(1, [1, 2, 0, 3], [4]), call(2, [1, 2, 0, 5], [6]), call(3, [9], [8])]
    sequences = joined(calls)
    assert tokens_of(sequences) == [[1, 2, 0, 3, 4], [1, 2, 0, 5, 6], [9, 8]]
    assert list(sequences[1].sampled) == [False] * 4 + [True]
    assert tokens_of(joined(calls[:1] * 2)) == [[1, 2, 0]] * 2  # the same, asked twice


@pytest.mark.parametrize("seed", range(200))
def test_sequences_are_as_few_as_the_calls_that_no_other_continues(seed: int) -> None:
    """A random tree of calls: every sampled token is in one sequence, after its prompt, with its own log-prob."""
    rng, token = random.Random(seed), itertools.count(10)
    calls: list[Call] = []
    for number in range(rng.randint(1, 12)):
        prompt = [rng.randint(1, 3)]
        if calls and rng.random() < 0.8:
            before = rng.choice(calls)
            prompt = [*before.prompt, *before.completion.token_ids, *rng.choices(range(1, 3), k=rng.randint(0, 2))]
        calls.append(call(number, prompt, [next(token) for _ in range(rng.randint(1, 3))]))
    sequences = joined(calls)
    whole = [(*call.prompt, *call.completion.token_ids) for call in calls]

    leaves = [own for own in whole if not any(each.prompt[: len(own)] == own for each in calls)]
    assert len(sequences) == len(leaves)
    assert sorted(each.number for sequence in sequences for each in sequence.calls) == list(range(len(calls)))
    for sequence in sequences:
        assert sum(sequence.sampled) == sum(len(each.completion.token_ids) for each in sequence.calls)
        for each in sequence.calls:
            start, end = len(each.prompt), len(each.prompt) + len(each.completion.token_ids)
            assert tuple(sequence.token_ids[:end]) == (*each.prompt, *each.completion.token_ids)
            assert all(sequence.sampled[start:end])
            assert sequence.logprobs[start:end] == each.completion.logprobs


def test_a_trajectory_is_of_the_last_reply_and_the_others_are_its_branches() -> None:
    calls = [call(0, [1], [2, 0], version=3), call(1, [7], [8], version=2), call(2, [1, 2, 0, 5], [6])]
    prompt = Prompt("row", "text", (9,), {})
    made = trajectory_of(joined(calls), prompt, LETTERS.decode, 0.5)
    assert made.token_ids.tolist() == [1, 2, 0, 5, 6]
    assert made.loss_mask.tolist() == [False, True, True, False, True]
    assert made.prompt.token_ids == (1,)
    assert (made.prompt.id, made.completion, made.turns, made.environment_reward) == ("row", "f", 3, 0.5)
    assert (made.weight_version, made.finish_reason) == (0, "stop")
    (branch,) = made.branches
    assert (branch.token_ids.tolist(), branch.loss_mask.tolist()) == ([7, 8], [False, True])
    assert branch.rollout_logprobs.tolist() == [0, -8]
    assert made.num_sampled_tokens == 4
    assert made.stretches == (Stretch(2, 3), Stretch(1, 0), Stretch(1, 2))  # of it, and of its branch
    cut = [*calls, Call(3, (1,), completion([4], reason="length"))]
    assert trajectory_of(joined(cut), prompt, LETTERS.decode, 0.0).finish_reason == "length"


CALLS = [call(0, [1, 2], [3]), call(1, [4], [5, 6])]


def test_a_program_chooses_what_trains() -> None:
    first = {"call": 0, "token_ids": [3]}
    (sequence,) = chosen(CALLS, [[{"given": [1]}, {"given": [2]}, first]])
    assert (list(sequence.token_ids), sequence.calls) == ([1, 2, 3], [CALLS[0]])
    assert len(chosen(CALLS, [[{"given": [4]}, {"call": 1, "token_ids": [5, 6]}], [{"given": [1, 2]}, first]])) == 2


@pytest.mark.parametrize(
    ("sequences", "problem"),
    [
        ([], "it returned the sequences [], expected a list with at least one"),
        ("all", "it returned the sequences 'all'"),
        (["all"], "sequence 0 that it returned is str, expected a list of segments"),
        ([[{"given": [1, 2]}, {"call": 0, "token_ids": [4]}]], "other tokens as reply 0 than the engine sampled"),
        ([[{"given": [1]}, {"call": 0, "token_ids": [3]}]], "reply 0 after other tokens or images than it was sampled"),
        ([[{"given": [1, 2]}, {"call": 7, "token_ids": [3]}]], "has reply 7, which does not exist"),
        ([[{"given": [1, 2]}, {"call": 0, "token_ids": [3]}]] * 2, "has reply 0, which does not exist or is already"),
        ([[{"given": [1, 2]}]], "does not end with a reply"),
        ([[]], "does not end with a reply"),
        ([[{"given": [1.5]}]], "has the segment {'given': [1.5]}, expected a list of tokens or a reply"),
        ([[{"given": [2**31]}]], "has the segment {'given': [2147483648]}, expected a list of tokens or a reply"),
        ([[{"given": [1], "sampled": True}]], "has the segment {'given': [1], 'sampled': True}"),
    ],
)
def test_what_the_record_does_not_say_is_refused(sequences: Any, problem: str) -> None:
    with pytest.raises(EpisodeError) as raised:
        chosen(CALLS, sequences)
    assert problem in str(raised.value)


def test_images_of_chosen_replies_are_those_of_the_record() -> None:
    """Also of one that a program has placed between two replies; another image at the same tokens is another prompt."""
    red, blue = SequenceImage("folder/red", 0, 2), SequenceImage("folder/blue", 4, 1)
    first = replace(call(0, [7, 7, 1], [2]), images=(red,))
    later = replace(call(1, [7, 7, 1, 2, 7, 3], [4]), images=(red, blue))
    told = [{"given": [7, 7, 1]}, {"call": 0, "token_ids": [2]}, {"given": [7, 3]}, {"call": 1, "token_ids": [4]}]
    (sequence,) = chosen([first, later], [told])
    assert (list(sequence.token_ids), sequence.images) == ([7, 7, 1, 2, 7, 3, 4], [red, blue])
    made = trajectory_of([sequence], Prompt("row", "text", (9,), {}), LETTERS.decode, 0.0)
    assert (made.prompt.images, made.feedback_images) == ((red,), (blue,))
    of_another = replace(later, images=(replace(red, path="folder/green"), blue))
    with pytest.raises(EpisodeError, match="reply 1 after other tokens or images than it was sampled after"):
        chosen([first, of_another], [told])


def test_a_reply_ends_where_it_has_a_stop_text() -> None:
    whole = completion([1, 2, 3, 4, 0])
    assert until_stop(whole, ["bc"], LETTERS) == completion([1, 2, 3])
    assert until_stop(whole, ["d", "b"], LETTERS) == completion([1, 2])
    several = replace(whole, stretches=(Stretch(1, 0), Stretch(1, 1), Stretch(len(whole.token_ids) - 2, 2)))
    assert until_stop(several, ["bc"], LETTERS).stretches == (Stretch(1, 0), Stretch(1, 1), Stretch(1, 2))
    assert until_stop(several, ["a"], LETTERS).stretches == ()
    assert until_stop(whole, ["x"], LETTERS) is until_stop(whole, [], LETTERS) is whole


@pytest.mark.parametrize("seed", range(20))
def test_a_reply_ends_with_the_first_token_that_completes_any_stop_text(seed: int) -> None:
    draw = random.Random(seed)
    whole = completion(draw.choices([1, 2, 3], k=draw.randint(1, 40)))
    stop = ["".join(draw.choices("abc", k=draw.randint(1, 4))) for _ in range(2)]
    texts = [
        "".join("abc"[token - 1] for token in whole.token_ids[:count]) for count in range(len(whole.token_ids) + 1)
    ]
    first = next((count for count, text in enumerate(texts) if any(each in text for each in stop)), None)
    assert until_stop(whole, stop, LETTERS).token_ids == whole.token_ids[:first]


def test_the_texts_of_the_run_end_the_calls_of_a_program_too() -> None:
    made = played(program_stop=["d"], run_stop=("bc",))
    assert list(made.token_ids) == [1, 2, 3]
    assert list(played(program_stop=["b"], run_stop=("bc",)).token_ids) == [1, 2]


def played(program_stop: Sequence[str], run_stop: tuple[str, ...]) -> Completion:
    """The reply to one call of a program, of which the engine samples a b c d."""

    async def ask(request: Request) -> Completion:
        return completion([1, 2, 3, 4])

    rules = EpisodeRules(LETTERS, 3, 20, replace(SAMPLING, stop=run_stop), "a program")
    calls = Calls(rules, lambda number: number, ask)
    return asyncio.run(calls.generate([1], stop=program_stop)).completion


def calls_of(asked: list[Request], **changes: Any) -> Calls:
    async def ask(request: Request) -> Completion:
        asked.append(request)
        return completion([1, 2, 0])

    return Calls(EpisodeRules(LETTERS, 2, 8, replace(SAMPLING, **changes), "it"), lambda number: 70 + number, ask)


def test_each_call_has_its_own_seed_and_leaves_its_record() -> None:
    asked: list[Request] = []
    calls = calls_of(asked)
    made = [asyncio.run(calls.generate([5], max_tokens=3, stop=["a"])), asyncio.run(calls.generate([6]))]
    assert [(r.prompt, r.seed, r.parameters.max_tokens) for r in asked] == [((5,), 70, 3), ((6,), 71, 6)]
    assert calls.completed == made
    assert made[0].completion == completion([1])


@pytest.mark.parametrize(
    ("prompt", "settings", "code"),
    [
        ([], {}, "invalid_prompt"), ([27], {}, "invalid_prompt"), ([-1], {}, "invalid_prompt"),
        ([True], {}, "invalid_prompt"), ([1] * 8, {}, "context_length_exceeded"),
        ([1], {"max_tokens": 7}, "invalid_max_tokens"), ([1], {"max_tokens": 0}, "invalid_max_tokens"),
    ],
)  # fmt: skip
def test_a_call_beyond_the_limits_is_refused_and_not_counted(
    prompt: list[int], settings: dict[str, Any], code: str
) -> None:
    asked: list[Request] = []
    calls = calls_of(asked)
    with pytest.raises(CallError) as refused:
        asyncio.run(calls.generate(prompt, **settings))
    assert refused.value.code == code
    assert (asked, calls.completed) == ([], [])
    asyncio.run(calls.generate([1]))
    asyncio.run(calls.generate([1] * 7))
    with pytest.raises(CallError, match="all of the 2 calls") as refused:
        asyncio.run(calls.generate([1]))
    assert refused.value.code == "too_many_calls"


def test_a_reply_under_a_structure_is_refused_unless_the_engines_sample_it() -> None:
    calls = calls_of([])
    with pytest.raises(CallError, match=r"cannot be trained: remove it, or set `rollout.structured_output`"):
        asyncio.run(calls.generate([1], options=CallOptions(structure="{}")))
    calls._rules = replace(calls._rules, structures_replies=True)
    calls._ask = refused
    with pytest.raises(CallError, match="no reply of this JSON schema can be sampled: no such type"):
        asyncio.run(calls.generate([1], options=CallOptions(structure="{}")))
    assert calls.completed == []


async def refused(request: Request) -> Completion:
    assert request.structure == "{}"
    raise RefusedRequestError("no such type")


def test_a_reply_under_a_structure_is_context_and_not_trained() -> None:
    first, structured = call(0, [1], [2, 0]), replace(call(1, [1, 2, 0, 3], [4, 0]), trained=False)
    later = call(2, [1, 2, 0, 3, 4, 0, 5], [6])
    made = trajectory_of(joined([first, later]), Prompt("row", "text", (9,), {}), LETTERS.decode, 0.0, [structured])
    assert made.token_ids.tolist() == [1, 2, 0, 3, 4, 0, 5, 6]
    assert made.loss_mask.tolist() == [False, True, True, False, False, False, False, True]
    assert made.environment_metrics == {"untrained_replies": 1.0}
    last = trajectory_of(joined([first]), Prompt("row", "text", (9,), {}), LETTERS.decode, 0.0, [structured])
    assert (last.token_ids.tolist(), last.completion) == ([1, 2, 0], "d")  # rewards read the last reply


class Structuring(Program):
    """Asks for a reply of a schema, and then for as many free ones."""

    def __init__(self, free: int) -> None:
        self._free = free

    async def run(self, row: Mapping[str, Any], seed: int, policy: Policy) -> Outcome:
        call = await policy.generate([1], options=CallOptions(structure="{}"))
        for _ in range(self._free):
            await policy.generate([1, *call.completion.token_ids, 3])
        return Outcome(1.0)

    def close(self) -> None:
        pass


def test_a_program_trains_its_free_replies_alone() -> None:
    async def ask(request: Request) -> Completion:
        return completion([4, 0] if request.structure else [5, 0])

    def play(free: int) -> Trajectory:
        rules = EpisodeRules(LETTERS, 3, 20, SAMPLING, "a program", skip_special_tokens=True, structures_replies=True)
        prompt = Prompt("row", "text", (9,), {"prompt": []})
        playing = play_program(Structuring(free), prompt, rules, ask, seed=lambda number: number, environment_seed=0)
        return asyncio.run(playing)

    made = play(1)
    assert made.token_ids.tolist() == [1, 4, 0, 3, 5, 0]
    assert made.loss_mask.tolist() == [False] * 4 + [True] * 2
    assert (made.turns, made.environment_metrics) == (1, {"untrained_replies": 1.0})
    with pytest.raises(EpisodeError, match="all of its 1 replies were sampled under a structure"):
        play(0)
