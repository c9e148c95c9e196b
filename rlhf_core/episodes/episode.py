"""Episodes as tokens: the policy's sampled replies, turn by turn, and the environment's messages between them.

This layer owns templates, masks and limits. An environment sees messages alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NoReturn

from rlhf_core.chat.encoding import Tokenizer, decode_completion, encode_prompt, stop_token_ids, written_text
from rlhf_core.chat.feedback import encode_feedback
from rlhf_core.chat.rendering import Message
from rlhf_core.config.engines.rollout import MOST_STOPS
from rlhf_core.data.formats.base import RowError, require_sound
from rlhf_core.environments import Environment, Feedback, Reply
from rlhf_core.episodes.shown_images import ShownImages, request_images
from rlhf_core.episodes.tokens import EpisodeTokens
from rlhf_core.episodes.turn_sampling import of_reply, sampled_at
from rlhf_core.errors import AlignmentError, ConversationError, EpisodeError, StageError
from rlhf_core.processes.user_code import user_error
from rlhf_core.rewards.base import fits, written
from rlhf_core.rollout.engine import RequestImage, SamplingParameters
from rlhf_core.system.terminal import limited
from rlhf_core.types import Completion, Prompt, SequenceImage, Stretch, Trajectory

_ROLES = ("user", "system", "tool")  # that an environment speaks as


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """Settings shared by episodes that are played together."""

    tokenizer: Tokenizer
    max_turns: int
    max_length: int  # of an episode, in tokens
    sampling: SamplingParameters  # of the run; `max_tokens` is the most of a reply
    environment: str  # its name in messages
    episode_seconds: float | None = None  # that the environment may take in all turns; none: as long as each may take
    images: ShownImages | None = None  # how those of the environment are read; none: it speaks in text alone
    skip_special_tokens: bool = False  # in the text of replies
    structures_replies: bool = False  # programs may request replies of a JSON schema

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode a reply for environments and rewards."""
        return (decode_completion if self.skip_special_tokens else written_text)(self.tokenizer, token_ids)


class Episode:
    """One conversation of the policy with an environment."""

    def __init__(self, prompt: Prompt, environment: Environment, rules: EpisodeRules) -> None:
        self._rules = rules
        self._environment = environment
        self._prompt = prompt
        self._messages: list[Any] = prompt.row["prompt"]
        self._answered = self._messages
        self._replies: list[Completion] = []
        self._reward = 0.0
        self._metrics: dict[str, float] = {}
        self._cut = False  # a reply was, or the episode for want of room
        self._tokens = EpisodeTokens()
        self._shown: tuple[SequenceImage, ...] = ()  # by the environment, behind the prompt
        self._seconds = rules.episode_seconds  # that are left
        self.sampling = rules.sampling  # of the next reply
        self.stop: tuple[str, ...] = ()  # texts that end the next reply, beside those of `sampling`
        self.over = False

    async def begin(self, seed: int) -> None:
        """Get the first prompt from the environment. seed: of its random generators.

        Raises EpisodeError, with the row, if it fails, or returns an invalid prompt.
        """
        messages = await self._called(self._environment.reset(dict(self._prompt.row), seed))
        if isinstance(messages, Feedback):
            self._ask_for(messages, "reset")
            messages = messages.messages
        if messages != self._messages:
            self._messages = self._answered = self._checked(messages, "reset")
            self._prompt = self._environment_prompt()
        self._tokens.add_given(self._prompt.token_ids)

    @property
    def token_ids(self) -> Sequence[int]:
        """A copy of its tokens so far, which the next reply follows."""
        return self._tokens.token_ids[:]

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self._tokens.token_ids)

    @property
    def images(self) -> list[RequestImage]:
        """Images so far."""
        return request_images(self._prompt.images + self._shown)

    @property
    def turns(self) -> int:
        """Replies so far."""
        return len(self._replies)

    async def take(self, reply: Completion) -> None:
        """Add a reply: the environment judges it, and its feedback follows, unless the episode ends.

        Raises EpisodeError, with the row and the turn, if the environment fails or the chat template cannot render the
        feedback.
        """
        assert not self.over
        rules = self._rules
        text = rules.text(reply.token_ids)
        reply = sampled_at(reply, self.sampling, rules.sampling)
        self._tokens.add_sampled(reply)
        self._replies.append(reply)
        self._answered = self._messages
        self._cut = reply.finish_reason == "length"
        feedback = await self._feedback(
            Reply(
                text,
                written_text(rules.tokenizer, reply.token_ids),
                is_last=self._cut or self.turns == rules.max_turns,
                was_cut=self._cut,
            )
        )
        self._reward += feedback.reward
        for name, value in feedback.metrics.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + value
        # A reply that was cut has no end, so that nothing can follow it.
        self.over = feedback.done or self._cut or self.turns == rules.max_turns
        if not self.over:
            # Without special tokens, which a template would mistake for its own.
            self._answer(decode_completion(rules.tokenizer, reply.token_ids), feedback)
        if self.over:  # also for want of room
            reward = await self._called(self._environment.finish())
            self._require_reward(reward, "finish")
            self._reward += reward

    def trajectory(self) -> Trajectory:
        last = self._replies[-1]
        token_ids, sampled, logprobs = self._tokens.tensors()
        return Trajectory(
            prompt=self._prompt,
            token_ids=token_ids,
            loss_mask=sampled,
            rollout_logprobs=logprobs,
            weight_version=min(reply.weight_version for reply in self._replies),
            stretches=stretches_of(self._replies),
            feedback_images=self._shown,
            finish_reason="length" if self._cut else last.finish_reason,
            completion=self._rules.text(last.token_ids),
            messages=None if self._answered == self._prompt.row["prompt"] else tuple(self._answered),
            turns=self.turns,
            environment_reward=self._reward,
            environment_metrics=self._metrics,
            kept=self._tokens.kept,
            temperatures=self._tokens.temperatures,
        )

    def _answer(self, reply: str, feedback: Feedback) -> None:
        feedback_messages = self._checked(feedback.messages, "step")
        messages = [*self._messages, {"role": "assistant", "content": reply}]
        # A reply that a text has ended lacks the token that ends a turn.
        ended = self._replies[-1].token_ids[-1] in stop_token_ids(self._rules.tokenizer)
        tools = self._prompt.row.get("tools")
        try:
            between = encode_feedback(self._rules.tokenizer, messages, feedback_messages, tools, ended=ended)
        except StageError as error:
            raise EpisodeError(f"{self._where()}: {error}") from error
        between, shown = self._with_images(between, feedback_messages, "step")
        if self.num_tokens + len(between) >= self._rules.max_length:
            self.over = self._cut = True  # no room for another reply
            return
        self._ask_for(feedback, "step")
        self._tokens.add_given(between)
        self._shown += shown
        self._messages = [*messages, *feedback_messages]

    def _environment_prompt(self) -> Prompt:
        """Return the prompt if the environment's differs from the row's."""
        rules = self._rules
        written = encode_prompt(rules.tokenizer, self._messages, self._prompt.row.get("tools"))
        token_ids, images = self._with_images(written, self._messages, "reset")
        room = rules.max_length - rules.sampling.max_tokens
        if len(token_ids) > room:
            self._fail(
                f"reset() returned messages of {len(token_ids)} tokens, more than the {room} that `rollout.max_length` "
                "leaves beside `sampling.max_tokens`"
            )
        return replace(self._prompt, text=self._messages[-1]["content"], token_ids=tuple(token_ids), images=images)

    def _with_images(
        self, token_ids: list[int], messages: Sequence[Message], method: str
    ) -> tuple[list[int], tuple[SequenceImage, ...]]:
        """Expand the images in `token_ids`, the rendered `messages`. Returns the tokens and the images' positions."""
        if self._rules.images is None:
            return token_ids, ()
        before = 0 if method == "reset" else len(self._prompt.images) + len(self._shown)
        try:
            return self._rules.images.expanded(token_ids, messages, start=self.num_tokens, before=before)
        except ConversationError as error:
            self._fail(f"{method}() returned images that cannot be shown: {error}")

    async def _feedback(self, reply: Reply) -> Feedback:
        feedback = await self._called(self._environment.step(reply))
        if not isinstance(feedback, Feedback):
            self._fail(f"step() returned {type(feedback).__name__}, expected a Feedback")
        self._require_reward(feedback.reward, "step")
        for name, value in feedback.metrics.items():
            if not isinstance(value, int | float) or not fits(value):
                self._fail(f"step() returned the metric {name!r} as {value!r}, expected a finite number")
        if not isinstance(feedback.done, bool):
            self._fail(f"step() returned done={feedback.done!r}, expected True or False")
        return feedback

    def _require_reward(self, reward: Any, method: str) -> None:
        if not isinstance(reward, int | float):
            self._fail(f"{method}() returned the reward {reward!r}, expected a finite number")
        if not fits(reward):
            self._fail(f"{method}() returned the reward {written(reward)}, expected a finite number")

    def _checked(self, messages: Any, method: str) -> list[dict[str, Any]]:
        """Validate `messages` of the environment as a prompt for a reply."""
        if not isinstance(messages, list | tuple) or not messages:
            self._fail(f"{method}() returned the messages {messages!r}, expected a list with at least one")
        read = [self._read(message, method) for message in messages]
        for message in read:
            if method == "step" and message.get("role") not in _ROLES:
                self._fail(f"{method}() speaks as {message.get('role')!r}; an environment is {', '.join(_ROLES)}")
        if read[-1].get("role") == "assistant":
            self._fail(f"{method}() ends with an assistant turn, so there is nothing to reply to")
        return read

    def _read(self, message: Any, method: str) -> dict[str, Any]:
        content = message.get("content") if isinstance(message, dict) else None
        shows = isinstance(content, list) or (isinstance(content, str) and message.get("images"))
        if shows and self._rules.images is None:
            self._fail(
                f"{method}() returned a message with images, but the policy reads text alone, or something else that "
                "does so would read them, such as a reward model, a teacher or its hint"
            )
        try:
            if shows and self._rules.images is not None:
                message = self._rules.images.canonical(message, self._prompt)
            if not isinstance(message, dict) or not isinstance(message.get("content"), str):
                self._fail(f"{method}() returned the message {message!r}, expected {{role, content: text}}")
            require_sound(message, ("message",), allow_nul=True)
        except RowError as error:
            self._fail(f"{method}() returned a message that cannot be used: {error}")
        return message

    def _ask_for(self, feedback: Feedback, method: str) -> None:
        """Set how the next reply is sampled, and where it ends."""
        max_tokens = self._checked_limit(feedback.max_tokens, method)
        self.stop = self._checked_stop(feedback.stop, method)
        try:
            sampling = of_reply(self._rules.sampling, feedback.temperature, feedback.top_p)
        except ValueError as error:
            self._fail(f"{method}() returned a {error}")
        self.sampling = replace(sampling, max_tokens=max_tokens)

    def _checked_limit(self, max_tokens: Any, method: str) -> int:
        most = self._rules.sampling.max_tokens
        if max_tokens is None:
            return most
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or not 1 <= max_tokens <= most:
            self._fail(
                f"{method}() returned max_tokens={max_tokens!r}, expected an integer from 1 to the {most} of "
                "`sampling.max_tokens`"
            )
        return max_tokens

    def _checked_stop(self, stop: Any, method: str) -> tuple[str, ...]:
        if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop):
            self._fail(f"{method}() returned stop={stop!r:.200}, expected a list of texts")
        if len(stop) > MOST_STOPS:
            self._fail(f"{method}() returned {len(stop)} texts as stop, and the most are {MOST_STOPS}")
        return tuple(stop)

    async def _called(self, answer: Awaitable[Any]) -> Any:
        started, limit = time.monotonic(), asyncio.timeout(limited(self._seconds))
        try:
            async with limit:
                return await answer
        except EpisodeError as error:
            raise EpisodeError(f"{self._where()}: {error}") from error
        except AlignmentError:
            raise
        except Exception as error:  # of an environment in this process, which may raise anything
            if isinstance(error, TimeoutError) and limit.expired():
                seconds = f"{self._rules.episode_seconds:g}"
                self._fail(f"its turns took more than the {seconds} s of `episode_seconds` together")
            raise EpisodeError(f"{self._where()}: it raised {user_error(error)}") from error
        finally:
            if self._seconds is not None:
                self._seconds = max(0.0, self._seconds - (time.monotonic() - started))

    def _where(self) -> str:
        return f"environment {self._rules.environment}, row {self._prompt.id}, turn {self.turns}"

    def _fail(self, problem: str) -> NoReturn:
        raise EpisodeError(f"{self._where()}: {problem}")


def stretches_of(replies: Sequence[Completion]) -> tuple[Stretch, ...]:
    """Return the stretches of all replies, one after the other; empty if one version sampled them."""
    each = [s for r in replies for s in r.stretches or (Stretch(len(r.token_ids), r.weight_version),)]
    runs = [(version, list(run)) for version, run in groupby(each, key=lambda stretch: stretch.weight_version)]
    if len(runs) == 1:
        return ()
    return tuple(Stretch(sum(stretch.tokens for stretch in run), version) for version, run in runs)
