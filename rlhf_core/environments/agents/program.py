"""Programs that play whole episodes: their access to the policy, and their results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rlhf_core.chat.encoding import Tokenizer
from rlhf_core.errors import EpisodeError

if TYPE_CHECKING:
    from rlhf_core.rollout.engine import Unfinished
    from rlhf_core.types import Completion, SequenceImage  # whose torch the processes of episodes need not import


class CallError(Exception):
    """The policy cannot serve this call. The message is for the program, which may make another one."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code  # as of the OpenAI API: context_length_exceeded, ...


@dataclass(frozen=True, slots=True)
class Call:
    """A completion of the policy as the engine returned it, the record that is trained."""

    number: int  # in the order of the requests, from 0
    prompt: tuple[int, ...]
    completion: Completion
    messages: Sequence[Mapping[str, Any]] | None = None  # that it answers, where the prompt is of messages
    images: tuple[SequenceImage, ...] = ()  # of the prompt, in the order of its tokens
    trained: bool = True  # false: sampled under a structure, from another distribution than the policy's


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of a call beside its prompt."""

    structure: str | None = None  # JSON schema that the reply must have; such a reply is not trained
    top_logprobs: int = 0  # the likeliest tokens at each place, whose log-probs are returned too
    temperature: float | None = None  # none: that of the run. A greedy run stays greedy
    top_p: float | None = None  # likewise
    heard: Callable[[Unfinished], None] | None = None  # called with the tokens so far, while the reply is sampled


NO_OPTIONS = CallOptions()


class Images(Protocol):
    """Images in the prompts of a program."""

    @property
    def tokens(self) -> frozenset[int]:
        """The tokens that stand for images."""

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return `message`, whose content is a list of parts, as in canonical rows, with its images read and kept.

        Raises RowError, which names the place, for an invalid image or message.
        """

    def require_few(self, count: int) -> None:
        """Raise ConversationError if a sequence has more images than engines accept."""

    def read(self, value: Any, place: str) -> str:
        """Read and keep the image `value`; return the file's SHA-256.

        Raises RowError, which names the place, if it is not an image, or too large.
        """

    def expanded(
        self, token_ids: Sequence[int], messages: Sequence[Mapping[str, Any]], start: int = 0, before: int = 0
    ) -> tuple[list[int], tuple[SequenceImage, ...]]:
        """Expand the image placeholders in `token_ids`, the rendered `messages`. Returns the tokens and the images'
        positions.

        start: position of the tokens in the sequence; before: number of images before them.
        Raises ConversationError if the template does not render each image once, or if there are too many.
        """


class Policy(Protocol):
    """The policy, as the program of one episode calls it."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def max_length(self) -> int:
        """Limit of prompt and completion together, in tokens."""

    @property
    def max_tokens(self) -> int:
        """Limit of a completion, in tokens."""

    @property
    def temperature(self) -> float:
        """Temperature of completions that ask for no other; 0: all are greedy."""

    @property
    def images(self) -> Images | None:
        """None: the policy, or a reader of its episodes, reads text alone."""

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
        """Sample a completion of the tokens `prompt`; it is recorded, and trained. Concurrent calls are allowed.

        max_tokens: none for the most that the limits allow. stop: the completion ends with the token that completes one
        of these texts. messages: of the prompt. images: of the prompt, as placed by `Images.expanded`.
        Raises CallError beyond the limits of the episode. A cancelled call is no longer sampled, and leaves no record.
        """


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a program, not validated yet."""

    reward: Any
    sequences: Any = None  # lists of segments, to train these; none: all calls, joined where they continue each other
    score: Any = None  # 0-1, for filtering and evaluation; none: the program gives none
    metrics: Any = None  # numbers by name, which are logged


class Program(ABC):
    @abstractmethod
    async def run(self, row: Mapping[str, Any], seed: int, policy: Policy) -> Outcome:
        """Play the episode. seed: of its random generators.

        Raises EpisodeError, whose message is the cause alone, if it fails.
        """

    @abstractmethod
    def close(self) -> None:
        """End the episode. Idempotent."""


def outcome_of(value: Any, keys: Sequence[str]) -> Outcome:
    """Convert the return value of a user's function: a reward, or a mapping of it and other `keys`.

    Raises EpisodeError, whose message is the cause alone, for other keys in a mapping.
    """
    if not isinstance(value, dict):
        return Outcome(value)
    if unknown := sorted(value.keys() - set(keys)):
        names = " and ".join(f"`{key}`" for key in keys)
        raise EpisodeError(f"it returned {unknown[0]!r}; what is read is {names}")
    if "reward" not in value:
        raise EpisodeError("it returned a mapping without `reward`")
    return Outcome(**value)
