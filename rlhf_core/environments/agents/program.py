"""Programs that play whole episodes: what they may ask of the policy, and what they return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rlhf_core.chat.encoding import Tokenizer
from rlhf_core.errors import EpisodeError

if TYPE_CHECKING:
    from rlhf_core.types import Completion, SequenceImage  # whose torch the processes of episodes need not import


class CallError(Exception):
    """The policy cannot be asked for this reply. The message is for the program, which may ask for another one."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code  # as of the OpenAI API: context_length_exceeded, ...


@dataclass(frozen=True, slots=True)
class Call:
    """One reply of the policy, as the engine returned it: the record of what trains."""

    number: int  # in the order in which they were asked for, from 0
    prompt: tuple[int, ...]
    completion: Completion
    messages: Sequence[Mapping[str, Any]] | None = None  # that it answers, where the prompt is of messages
    images: tuple[SequenceImage, ...] = ()  # of the prompt, in the order of its tokens


class Images(Protocol):
    """How a program shows the policy images."""

    def read(self, value: Any, place: str) -> str:
        """The SHA-256 of the image that `value` gives, whose file is kept. Raises RowError, which names the place, for
        what is no image, or a larger one than may be."""

    def expanded(
        self, token_ids: Sequence[int], messages: Sequence[Mapping[str, Any]], start: int = 0, before: int = 0
    ) -> tuple[list[int], tuple[SequenceImage, ...]]:
        """`token_ids`, in which the template has written `messages`, with all the tokens of each image, and where these
        are in a sequence where they begin at `start`, behind `before` other images.

        Raises ConversationError if the template has not written each once, or if there are too many.
        """


class Policy(Protocol):
    """What the program of one episode asks for replies."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def max_length(self) -> int:
        """Of prompt and completion together, in tokens."""

    @property
    def max_tokens(self) -> int:
        """Of a completion."""

    @property
    def temperature(self) -> float:
        """Of all replies; 0: greedy."""

    @property
    def images(self) -> Images | None:
        """None: it reads text alone, or something that reads its episodes does."""

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        messages: Sequence[Mapping[str, Any]] | None = None,
        images: tuple[SequenceImage, ...] = (),
    ) -> Call:
        """A completion of the tokens `prompt`, which is recorded, and trained. Several may be asked for at a time.

        max_tokens: none for as many as there may be and there is room for. stop: it ends with the token that completes
        one of these texts. messages: of the prompt. images: of the prompt, as `Images.expanded` has placed them.
        Raises CallError beyond the limits of the episode. A call that is cancelled is sampled no further, and leaves no
        record.
        """


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a program returns at the end. It is not checked yet."""

    reward: Any
    sequences: Any = None  # lists of segments, to train these; none: all calls, joined where they continue each other


class EpisodeProgram(ABC):
    @abstractmethod
    async def run(self, row: Mapping[str, Any], seed: int, policy: Policy) -> Outcome:
        """Play the episode. seed: of its random numbers.

        Raises EpisodeError, whose message is the cause alone, if it fails.
        """

    @abstractmethod
    def close(self) -> None:
        """The episode is over. Idempotent."""


def outcome_of(value: Any, keys: Sequence[str]) -> Outcome:
    """What a user's function has returned: a reward, or a mapping with it and others of `keys`.

    Raises EpisodeError, whose message is the cause alone, for anything else in a mapping.
    """
    if not isinstance(value, dict):
        return Outcome(value)
    if unknown := sorted(value.keys() - set(keys)):
        names = " and ".join(f"`{key}`" for key in keys)
        raise EpisodeError(f"it returned {unknown[0]!r}; what is read is {names}")
    if "reward" not in value:
        raise EpisodeError("it returned a mapping without `reward`")
    return Outcome(**value)
