"""A program's calls of the policy in one episode: bounded, recorded, and joined into sequences.

The record is trained. A program can choose among its calls, but neither change nor invent one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf_core.chat.encoding import Tokenizer
from rlhf_core.environments.agents.program import NO_OPTIONS, Call, CallError, CallOptions
from rlhf_core.episodes.engine_queue import Heard, RefusedRequestError
from rlhf_core.episodes.episode import EpisodeRules, stretches_of
from rlhf_core.episodes.rounds import Ask
from rlhf_core.episodes.shown_images import ShownImages, request_images
from rlhf_core.episodes.stops import tokens_until_stop, until_stop
from rlhf_core.episodes.tokens import EpisodeTokens
from rlhf_core.episodes.turn_sampling import of_reply, sampled_at
from rlhf_core.errors import EpisodeError
from rlhf_core.rollout.engine import Request, Unfinished
from rlhf_core.types import Branch, Prompt, SequenceImage, Trajectory


class Calls:
    """The calls of one episode. Implements environments.program.Policy."""

    def __init__(self, rules: EpisodeRules, seed: Callable[[int], int], ask: Ask) -> None:
        """seed: returns the seed of the call with a number; not called if sampling is greedy."""
        self._rules, self._seed, self._ask = rules, seed, ask
        self._begun = 0
        self.completed: list[Call] = []  # in the order in which they ended

    @property
    def tokenizer(self) -> Tokenizer:
        return self._rules.tokenizer

    @property
    def max_length(self) -> int:
        return self._rules.max_length

    @property
    def max_tokens(self) -> int:
        return self._rules.sampling.max_tokens

    @property
    def temperature(self) -> float:
        return self._rules.sampling.temperature

    @property
    def images(self) -> ShownImages | None:
        return self._rules.images

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        messages: Sequence[Mapping[str, Any]] | None = None,
        images: tuple[SequenceImage, ...] = (),
        options: CallOptions = NO_OPTIONS,
    ) -> Call:
        """See environments.program.Policy."""
        self._check(prompt, max_tokens, options)
        try:
            parameters = of_reply(self._rules.sampling, options.temperature, options.top_p)
        except ValueError as error:
            raise CallError(f"the request has a {error}", "unsupported_parameter") from error
        number, self._begun = self._begun, self._begun + 1
        parameters = replace(parameters, max_tokens=max_tokens or self.max_tokens)
        seed = self._seed(number) if parameters.temperature else None
        texts = (*parameters.stop, *stop)
        request = Request(
            tuple(prompt), parameters, seed, request_images(images), options.structure, options.top_logprobs,
            streams=options.heard is not None,
        )  # fmt: skip
        try:
            asked = (
                self._ask(request) if options.heard is None else self._ask(request, self._until(texts, options.heard))
            )
            completion = await asked
        except RefusedRequestError as error:
            raise CallError(f"no reply of this JSON schema can be sampled: {error}", "invalid_schema") from error
        ended = sampled_at(until_stop(completion, texts, self.tokenizer), parameters, self._rules.sampling)
        call = Call(number, tuple(prompt), ended, messages, images, trained=options.structure is None)
        self.completed.append(call)
        return call

    def _until(self, stop: Sequence[str], heard: Heard) -> Heard:
        """Return a listener that tells `heard` nothing beyond a stop text, behind which engines sample on."""

        def until(progress: Unfinished) -> None:
            count = tokens_until_stop(progress.token_ids, stop, self.tokenizer)
            heard(Unfinished(progress.token_ids[:count], progress.logprobs[:count], progress.top_logprobs[:count]))

        return until

    def _check(self, prompt: Sequence[int], max_tokens: int | None, options: CallOptions) -> None:
        if options.structure is not None and not self._rules.structures_replies:
            raise CallError(
                "a reply of a JSON schema, or with a required tool call, is sampled from another distribution than the "
                "policy's, and cannot be trained: remove it, or set `rollout.structured_output`, with which such "
                "replies are served, and not trained",
                "unsupported_parameter",
            )
        if self._begun == self._rules.max_turns:
            raise CallError(
                f"this episode has made all of the {self._rules.max_turns} calls that `environment.max_turns` allows",
                "too_many_calls",
            )
        if max_tokens is not None and not 0 < max_tokens <= self.max_tokens:
            raise CallError(
                f"max_tokens is {max_tokens}; the run samples 1 to {self.max_tokens} (`sampling.max_tokens`): omit it "
                "for these",
                "invalid_max_tokens",
            )
        vocabulary = len(self.tokenizer)
        if not prompt or not all(type(token) is int and 0 <= token < vocabulary for token in prompt):
            raise CallError(
                f"the prompt must be one or more tokens, numbers from 0 to {vocabulary - 1}", "invalid_prompt"
            )
        if len(prompt) >= self.max_length:
            raise CallError(
                f"the prompt has {len(prompt)} tokens and leaves no room for a completion: together they have at most "
                f"{self.max_length} (`rollout.max_length`)",
                "context_length_exceeded",
            )


@dataclass(slots=True)
class TokenSequence(EpisodeTokens):
    """Tokens of an episode; each of its trained calls follows its prompt."""

    calls: list[Call] = field(default_factory=list)
    images: list[SequenceImage] = field(default_factory=list)  # in the order of the tokens

    def add_prompt(self, call: Call) -> None:
        """Append the missing part of the call's prompt, with its images."""
        assert self.is_prefix_of(call)
        self.add_given(call.prompt[len(self.token_ids) :])
        self.images = list(call.images)

    def add_call(self, call: Call) -> None:
        assert (tuple(self.token_ids), tuple(self.images)) == (call.prompt, call.images)
        self.add_sampled(call.completion)
        self.calls.append(call)

    def is_prefix_of(self, call: Call) -> bool:
        """Return whether the call's prompt begins with this sequence: equal tokens, and equal images."""
        length = len(self.token_ids)
        return call.prompt[:length] == tuple(self.token_ids) and self._has_images_of(call, length)

    def is_prompt_of(self, call: Call) -> bool:
        """Return whether the call's prompt is this sequence, in which tokens after the last call may be of images."""
        end = 0
        if self.calls:
            end = len(self.calls[-1].prompt) + len(self.calls[-1].completion.token_ids)
        return call.prompt == tuple(self.token_ids) and self._has_images_of(call, end)

    def _has_images_of(self, call: Call, length: int) -> bool:
        """Return whether the call's images among the first `length` tokens are those of this sequence."""
        return [image for image in call.images if image.start < length] == self.images


def joined(calls: Sequence[Call]) -> list[TokenSequence]:
    """Join all calls into as few sequences as their prefixes allow; each call is sampled in one of them.

    calls: in the order in which they ended. A call continues the longest sequence that its prompt begins with at that
    time; else it begins a sequence. So there are as many sequences as calls that no later call continues.
    """
    sequences: list[TokenSequence] = []
    for call in calls:
        continued = [sequence for sequence in sequences if sequence.is_prefix_of(call)]
        if continued:
            sequence = max(continued, key=lambda each: len(each.token_ids))
        else:
            sequences.append(sequence := TokenSequence())
        sequence.add_prompt(call)
        sequence.add_call(call)
    return sequences


def chosen(calls: Sequence[Call], sequences: Any) -> list[TokenSequence]:
    """Return the sequences that a program returned, verified against the record of its calls.

    sequences: lists of segments, {"given": tokens} or {"call": number, "token_ids": tokens}. Raises EpisodeError, whose
    message is the cause alone, if their form is wrong, or a segment differs from the record.
    """
    if not isinstance(sequences, list) or not sequences:
        raise EpisodeError(f"it returned the sequences {sequences!r}, expected a list with at least one")
    by_number = {call.number: call for call in calls}
    verified = []
    for index, segments in enumerate(sequences):
        where = f"sequence {index} that it returned"
        if not isinstance(segments, list):
            raise EpisodeError(f"{where} is {type(segments).__name__}, expected a list of segments")
        sequence = TokenSequence()
        for segment in segments:
            _add_segment(sequence, segment, by_number, where)
        if not sequence.sampled or not sequence.sampled[-1]:
            raise EpisodeError(f"{where} does not end with a reply, so its last tokens would train nothing")
        verified.append(sequence)
    return verified


def _add_segment(sequence: TokenSequence, segment: Any, calls: dict[int, Call], where: str) -> None:
    """Append a segment. calls: those that no sequence has yet; the one that is added is removed."""
    match segment:
        case {"given": list(tokens), **rest} if not rest and all(
            type(token) is int and 0 <= token < 2**31 for token in tokens
        ):
            sequence.add_given(tokens)
        case {"call": int(number), "token_ids": list(tokens), **rest} if not rest:
            call = calls.pop(number, None)
            if call is None:
                raise EpisodeError(f"{where} has reply {number}, which does not exist or is already in a sequence")
            if tokens != list(call.completion.token_ids):
                raise EpisodeError(f"{where} has other tokens as reply {number} than the engine sampled")
            if not sequence.is_prompt_of(call):
                raise EpisodeError(f"{where} has reply {number} after other tokens or images than it was sampled after")
            sequence.images = list(call.images)  # of the record: a program's segments are tokens alone
            sequence.add_call(call)
        case _:
            raise EpisodeError(f"{where} has the segment {segment!r:.200}, expected a list of tokens or a reply")


def trajectory_of(
    sequences: Sequence[TokenSequence],
    prompt: Prompt,
    text: Callable[[Sequence[int]], str],
    reward: float,
    untrained: Sequence[Call] = (),
) -> Trajectory:
    """Return one trajectory: the sequence with the last call, with the others as its branches.

    text: decodes a reply's tokens. untrained: calls that are in no sequence; the last reply may be one of them.
    """
    calls = [call for sequence in sequences for call in sequence.calls]
    last_trained = max(calls, key=lambda call: call.number)
    last = max((*calls, *untrained), key=lambda call: call.number)
    main = next(sequence for sequence in sequences if last_trained in sequence.calls)
    others = [sequence for sequence in sequences if sequence is not main]
    first_prompt = main.token_ids[: main.sampled.index(1)]
    token_ids, sampled, logprobs = main.tensors()
    in_prompt = sum(image.start < len(first_prompt) for image in main.images)
    return Trajectory(
        prompt=replace(prompt, token_ids=tuple(first_prompt), images=tuple(main.images[:in_prompt])),
        token_ids=token_ids,
        loss_mask=sampled,
        rollout_logprobs=logprobs,
        weight_version=min(call.completion.weight_version for call in calls),
        stretches=stretches_of([call.completion for each in (main, *others) for call in each.calls]),
        finish_reason="length" if any(call.completion.finish_reason == "length" for call in calls) else "stop",
        completion=text(last.completion.token_ids),
        feedback_images=tuple(main.images[in_prompt:]),
        messages=None if last.messages is None else tuple(last.messages),
        turns=len(calls),
        environment_reward=reward,
        environment_metrics={"untrained_replies": float(len(untrained))} if untrained else {},
        branches=tuple(Branch(*each.tensors(), tuple(each.images), each.kept, each.temperatures) for each in others),
        kept=main.kept,
        temperatures=main.temperatures,
    )
