"""The data types of training, with their shapes.

T: tokens of one trajectory. N: packed tokens of one batch. S: sequences of one batch. E: examples of one batch.
A value per token has the token's index t: `logprobs[t]` is log p(token t | tokens < t), `values[t]` is the value of the
state in which token t was chosen. The first token of a sequence has none: 0 there.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from rlhf_core.arrays import PickledAsArrays
from rlhf_core.kept_tokens import KeptTokens, dense

FinishReason = Literal["stop", "length"]

# Unit of the first dimension of a batch's field, if not tokens. Declared, not guessed from shapes: with
# sequences of one token, N equals S.
_ON_HOST = "_on_host"  # no field, so that a changed copy of a batch does not have the one of the original
_PER_SEQUENCE = {"per": "sequence"}
_PER_EXAMPLE = {"per": "example"}
_PER_BATCH = {"per": "batch"}


@dataclass(frozen=True, slots=True)
class SequenceImage:
    """An image of a sequence, and the position of its tokens."""

    path: str  # of its file, on the node of the driver; its name is the SHA-256 of its content
    start: int  # index of its first token in the sequence
    length: int  # tokens, the marks around it included
    # Tokens of the template in place of these; empty: the placeholder of an image. Others if the tokenizer has merged
    # the first or last of these with the text beside the image
    written: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    id: str  # content hash of the dataset row
    text: str  # the last user turn, for rewards and people
    token_ids: tuple[int, ...]
    row: Mapping[str, Any]  # the dataset row: prompt, answer, task, metadata, ...
    hinted_ids: tuple[int, ...] = ()  # the prompt with a hint, which a teacher reads in its place; empty: there is none
    images: tuple[SequenceImage, ...] = ()  # in the order of their tokens


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive tokens sampled by one version of the weights."""

    tokens: int
    weight_version: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A sample of an engine after one prompt.

    Any sequences can be given; they are kept as arrays, of int32 and float32, which cost 8 bytes a token.
    """

    token_ids: Sequence[int]  # ends with EOS, or the token that completes a stop text, if finish_reason is "stop"
    logprobs: Sequence[float]  # of each sampled token, at the sampling temperature
    finish_reason: FinishReason
    weight_version: int  # the oldest
    stretches: tuple[Stretch, ...] = ()  # where weights were published while it was sampled; empty: one version
    top_logprobs: Sequence[Mapping[int, float]] = ()  # of the likeliest tokens at each place, if a request wants them
    kept: KeptTokens | None = None  # at each token, if sampling was truncated and the engine returns them
    temperature: float | None = None  # None: that of the run

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", array("i", self.token_ids))
        object.__setattr__(self, "logprobs", array("f", self.logprobs))


@dataclass(frozen=True, slots=True)
class Branch:
    """A further sequence of an episode, whose calls of the policy do not all continue each other."""

    token_ids: Tensor  # (T,) int64
    loss_mask: Tensor  # (T,) bool, true where the policy sampled, but for tokens that are trained in another sequence
    rollout_logprobs: Tensor  # (T,) float32, 0 where `loss_mask` is false
    images: tuple[SequenceImage, ...] = ()  # in the order of its tokens
    kept: KeptTokens | None = None  # as those of a trajectory
    temperatures: Tensor | None = None  # as those of a trajectory


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode as tokens; exactly the sampled tokens are trained, in all of its turns.

    Usually one sequence. An episode with several has the one of its last reply here, and the others in `branches`.
    """

    prompt: Prompt
    token_ids: Tensor  # (T,) int64, prompt and completion
    loss_mask: Tensor  # (T,) bool, true where the policy sampled
    rollout_logprobs: Tensor  # (T,) float32, 0 where the policy did not sample
    weight_version: int  # the oldest
    finish_reason: FinishReason  # length: a reply was cut, or there was no room for another
    completion: str = ""  # decoded text of the last reply, for rewards and people
    messages: tuple[Mapping[str, Any], ...] | None = (
        None  # that `completion` answers, in a later turn; None: the prompt
    )
    stretches: tuple[Stretch, ...] = ()  # of the sampled tokens of its `sequences`, where several versions sampled them
    feedback_images: tuple[SequenceImage, ...] = ()  # that the environment has shown, behind those of the prompt
    turns: int = 1  # replies
    environment_reward: float = 0.0  # the environment's rewards for them
    environment_metrics: Mapping[str, float] = field(default_factory=dict)  # its counters, by name
    reward: float = float("nan")  # of the whole completion
    score: float | None = None  # 0-1, for filtering and evaluation
    step_rewards: Tensor | None = None  # (T,) float32, a step's reward at its last token; 0 elsewhere
    step_ends: Tensor | None = None  # (T,) bool, true at the last token of each step, where the policy sampled it
    extra: Mapping[str, Any] = field(default_factory=dict)
    branches: tuple[Branch, ...] = ()  # its other sequences, which share its reward
    kept: KeptTokens | None = None  # of T positions, if sampling was truncated: `rollout_logprobs` are of these alone
    temperatures: Tensor | None = None  # (T,) float32, at which it was sampled; 0: that of the run. None: everywhere 0

    @property
    def sequences(self) -> tuple[Trajectory | Branch, ...]:
        return (self, *self.branches)

    @property
    def total_reward(self) -> float:
        """`reward` plus the rewards of its steps."""
        return self.reward + (0.0 if self.step_rewards is None else float(self.step_rewards.sum()))

    @property
    def num_sampled_tokens(self) -> int:
        """Sampled tokens of all its sequences."""
        return sum(int(sequence.loss_mask.sum()) for sequence in self.sequences)


def sequence_ids(sequence_lengths: Tensor, num_tokens: int | None = None) -> Tensor:
    """Return the sequence of each token, (N,) int64. sequence_lengths: (S,) int64, sums to N.

    num_tokens: N; None: it is read from the lengths, which waits for their device.
    """
    sequences = torch.arange(sequence_lengths.numel(), device=sequence_lengths.device)
    return torch.repeat_interleave(sequences, sequence_lengths, output_size=num_tokens)


@dataclass(frozen=True)
class Pixels(PickledAsArrays):
    """The images of a batch as I tiles, which a vision encoder reads one by one; an image is one tile or several.

    An image in several sequences of a batch, such as the completions of one prompt, is stored once.
    """

    values: Tensor  # (R, ...) float32, tile after tile, as the model's image processor gives them
    tokens: Tensor  # (I,) int64: how many tokens each tile fills
    rows: Tensor | None = None  # (I,) int64: the rows of each tile in `values`; None: one
    mask: Tensor | None = None  # (R, H, W) bool, false where a row is padded; None: no model of this kind pads
    sizes: Tensor | None = None  # (I, k) int64: size of each tile, an argument of its encoder; None: all are alike

    @property
    def num_tiles(self) -> int:
        return int(self.tokens.numel())

    @classmethod
    def joined(cls, parts: Sequence[Pixels]) -> Pixels:
        """Return the tiles of all parts, in order. parts: at least one, of one model's processor."""
        given = {f.name: [getattr(part, f.name) for part in parts] for f in fields(cls)}
        joined: dict[str, Any] = {name: None if each[0] is None else torch.cat(each) for name, each in given.items()}
        return cls(**joined)

    def tile_of(self, parts: Tensor) -> Tensor:
        """Return the tile of each row of the features of all tiles, (n,) int64."""
        return torch.searchsorted(self.tokens.cumsum(0), parts, right=True)

    def first_parts(self) -> Tensor:
        """(I,) int64: the first row of each tile among the features of all tiles."""
        return self.tokens.cumsum(0) - self.tokens

    def select(self, tiles: Tensor) -> Pixels:
        """Return the tiles with these indices, in that order."""
        chosen = tiles
        if self.rows is not None:
            counts = self.rows[tiles]
            first = (self.rows.cumsum(0) - self.rows)[tiles] - (counts.cumsum(0) - counts)
            chosen = torch.arange(int(counts.sum()), device=tiles.device) + first.repeat_interleave(counts)
        indices = {"values": chosen, "mask": chosen, "tokens": tiles, "rows": tiles, "sizes": tiles}
        given = {name: getattr(self, name) for name in indices}
        return replace(self, **{name: value[indices[name]] for name, value in given.items() if value is not None})

    def to(self, device: torch.device | str) -> Pixels:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: value.to(device) for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class PackedBatch(PickledAsArrays):
    """Sequences laid end to end, no padding.

    A batch size counts examples: one sequence, or several in a row that must stay together.
    """

    sequences_per_example: ClassVar[int] = 1

    input_ids: Tensor  # (N,) int64
    sequence_lengths: Tensor = field(metadata=_PER_SEQUENCE)  # (S,) int64, sums to N
    loss_mask: Tensor  # (N,) bool, true where the token is trained
    # (N,) int64: where a token stands for a part of an image, the row of that part among those of all tiles, tile after
    # tile; -1 where it stands for text. None: no sequence has images
    image_parts: Tensor | None = None
    pixels: Pixels | None = field(default=None, metadata=_PER_BATCH)  # as `image_parts`
    # (N, k) int32: the tokens over which probabilities are normalised, filled with NO_TOKEN; None: the whole vocabulary
    kept_tokens: Tensor | None = None
    # (N,) float32: the temperature at each token in place of that of the run; 0 for that of the run. None: everywhere 0
    temperatures: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.numel())

    @property
    def num_sequences(self) -> int:
        return int(self.sequence_lengths.numel())

    @property
    def num_examples(self) -> int:
        return int(self.example_lengths.numel())

    @property
    def example_lengths(self) -> Tensor:
        """(E,) int64: tokens of each example. Raises ValueError if the last example is not whole."""
        if self.num_sequences % self.sequences_per_example:
            raise ValueError(f"{self.num_sequences} sequences in examples of {self.sequences_per_example}")
        return self.sequence_lengths.view(-1, self.sequences_per_example).sum(1)

    @property
    def num_trained_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def sequence_ids(self) -> Tensor:
        """(N,) int64: the sequence of each token."""
        return sequence_ids(self.sequence_lengths, self.num_tokens)

    @property
    def position_ids(self) -> Tensor:
        """(N,) int64: the index of each token in its sequence."""
        starts = self.sequence_lengths.cumsum(0) - self.sequence_lengths
        first = starts.repeat_interleave(self.sequence_lengths, output_size=self.num_tokens)
        return torch.arange(self.num_tokens, device=first.device) - first

    @property
    def last_token_indices(self) -> Tensor:
        """(S,) int64: index of the last token of each sequence."""
        return self.sequence_lengths.cumsum(0) - 1

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__() | {"input_ids": self.input_ids.int().numpy()}  # half of int64
        if self.kept_tokens is not None:  # without what fills the rows
            is_kept = self.kept_tokens >= 0
            counts, tokens = is_kept.sum(1, dtype=torch.int32), self.kept_tokens[is_kept]
            state["kept_tokens"] = counts.numpy(), tokens.numpy()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["kept_tokens"] is not None:
            counts, tokens = map(torch.tensor, state["kept_tokens"])
            state = state | {"kept_tokens": dense(counts, tokens)}
        super().__setstate__(state | {"input_ids": state["input_ids"].astype(np.int64)})

    def to(self, device: torch.device | str) -> Self:
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {n: v.to(device) if isinstance(v, Tensor | Pixels) else v for n, v in values.items()}
        return replace(self, **moved).remembering(self.on_host)

    @property
    def on_host(self) -> Self:
        """This batch in host memory. What was moved from there is not copied back, which would wait for the device."""
        remembered: Self | None = vars(self).get(_ON_HOST)
        if remembered is not None:
            return remembered
        return self if self.input_ids.device.type == "cpu" else self.to("cpu")

    def remembering(self, on_host: Self) -> Self:
        """Return this batch, whose `on_host` is from now on the one given, unless it is itself in host memory."""
        if self.input_ids.device.type != "cpu":
            vars(self)[_ON_HOST] = on_host
        return self


@dataclass(frozen=True, kw_only=True)
class Rollouts(PackedBatch):
    """Packed trajectories as sampled. Every (N,) float, here and below, is 0 where `loss_mask` is false."""

    # (S,) int64: the episode of each sequence, as index in the step's list of trajectories; those of one episode are
    # side by side in a batch of whole episodes. None: each sequence is an episode
    episode_indices: Tensor | None = field(default=None, metadata=_PER_SEQUENCE)
    rollout_logprobs: Tensor  # (N,) float32, by the engine
    process_rewards: Tensor | None = None  # (N,) float32, a step's reward at its last token
    step_ends: Tensor | None = None  # (N,) bool, true at the last token of each step

    @property
    def episode_lengths(self) -> Tensor:
        """(E,) int64: tokens of each episode, whose sequences are adjacent; sums to N."""
        if self.episode_indices is None:
            return self.sequence_lengths
        count = int(self.episodes[-1]) + 1
        return torch.zeros(count, dtype=torch.int64).index_add(0, self.episodes, self.sequence_lengths)

    @property
    def episodes(self) -> Tensor:
        """(S,) int64: the episode of each sequence, counted from 0 in this batch."""
        if self.episode_indices is None:
            return torch.arange(self.num_sequences)
        counted: Tensor = self.episode_indices.unique_consecutive(return_inverse=True)[1]
        return counted

    @property
    def episode_ids(self) -> Tensor:
        """(N,) int64: the episode of each token, counted from 0 in this batch."""
        return self.episodes[self.sequence_ids]


@dataclass(frozen=True, kw_only=True)
class Scored(Rollouts):
    """Rollouts with the log-probs and values of the algorithm's models."""

    old_logprobs: Tensor | None = None  # (N,) float32, by the trainer, before this update
    entropies: Tensor | None = None  # (N,) float32, of its distributions there: of the completions that are logged
    ref_logprobs: Tensor | None = None  # (N,) float32
    teacher_logprobs: Tensor | None = None  # (N,) float32
    values: Tensor | None = None  # (N,) float32


@dataclass(frozen=True, kw_only=True)
class TrainingBatch(Scored):
    """The batch of one step."""

    rewards: Tensor | None = None  # (N,) float32, per token, KL included where it is part of the reward
    advantages: Tensor  # (N,) float32
    returns: Tensor | None = None  # (N,) float32
    imitated: Tensor | None = None  # (N,) bool, true at the tokens of completions that are imitated


@dataclass(frozen=True, kw_only=True)
class Minibatch(TrainingBatch):
    """The batch of one optimizer step, or a micro-batch of it."""

    loss_weights: Tensor  # (N,) float32, of each trained token in the loss of the optimizer step
    imitation_weights: Tensor | None = None  # (N,) float32, of each imitated token in its cross-entropy
    logged: Tensor | None = None  # (N,) bool, true at all tokens of the sequences that are logged; None: not this step


@dataclass(frozen=True)
class LoggedBatch(PackedBatch):
    """Sequences some of which are logged, with the entropies of the policy's distributions."""

    logged: Tensor | None = None  # (N,) bool, true at all tokens of the sequences that are logged


@dataclass(frozen=True)
class TaughtBatch(PackedBatch):
    """Sequences with a teacher's distribution at each trained token (M in all)."""

    # (M, d): its hidden states that predict them; known only of a whole micro-batch, which is not divided any more
    teacher_hidden: Tensor | None = field(default=None, metadata={"per": "trained token"})
    top_tokens: Tensor | None = None  # (N, k) int32, its most probable tokens there
    top_logprobs: Tensor | None = None  # (N, k + 1) float32, of these, and of all others together


@dataclass(frozen=True)
class ReferencedBatch(PackedBatch):
    """Sequences that a reference model reads too."""

    # (S,) float32: log-prob of each sequence's trained tokens together, by the reference
    reference_logprobs: Tensor | None = field(default=None, metadata=_PER_SEQUENCE)


@dataclass(frozen=True)
class PreferenceBatch(ReferencedBatch):
    """Pairs: sequence 2i is the chosen completion with its prompt, 2i + 1 the rejected one."""

    sequences_per_example: ClassVar[int] = 2

    margins: Tensor | None = field(default=None, metadata=_PER_EXAMPLE)  # (E,) float32


@dataclass(frozen=True)
class TargetBatch(PackedBatch):
    """Completions with their prompts, and the target reward at each trained token."""

    targets: Tensor | None = None  # (N,) float32, 0 where the token is not trained


@dataclass(frozen=True)
class LabelledBatch(ReferencedBatch):
    """Completions with their prompts, each labelled good or bad."""

    desirable: Tensor | None = field(default=None, metadata=_PER_EXAMPLE)  # (E,) bool


@dataclass(frozen=True)
class UnpairedBatch(LabelledBatch):
    """Sequence 2i is a completion with its prompt, 2i + 1 the same prompt with the completion of another example."""

    sequences_per_example: ClassVar[int] = 2
