"""Logged rollouts of an RL stage: a sample of the completions of some steps, with what each token was trained on.

One compressed JSON file a step: `tracking/rollouts/<step>.json.gz` in the artifact, and `rollouts/<step>.json.gz` among
its live files. Readers validate it, since others can write to the store.
"""

from __future__ import annotations

import gzip
import zlib
from typing import Any

from pydantic import Field

from rlhf_core.artifacts.documents import parsed
from rlhf_core.artifacts.manifest import Manifest
from rlhf_core.config.base import Config
from rlhf_core.errors import IntegrityError
from rlhf_core.tracking.protocol import TRACKING_FOLDER

ROLLOUTS_FOLDER = "rollouts"  # among the live files
IMAGES_FOLDER = "images"  # in it, named by their content
KEPT_ROLLOUTS = f"{TRACKING_FOLDER}/{ROLLOUTS_FOLDER}"  # in the artifact
_SUFFIX = ".json.gz"
_LARGEST = 2**28  # bytes of one step, decompressed


class Histogram(Config):
    """Counts of values between neighbouring edges; the last bin includes its upper edge."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


class LoggedImage(Config):
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    start: int  # index of its first token
    length: int  # tokens


class LoggedSequence(Config):
    """Tokens of one sequence.

    The columns after `trained` have a value for each trained token, in order; None: not finite, or not computed.
    """

    texts: tuple[str, ...]  # of each token
    token_ids: tuple[int, ...]
    trained: tuple[bool, ...]  # for each token: whether the policy sampled it and trains on it
    engine_logprobs: tuple[float | None, ...]
    trainer_logprobs: tuple[float | None, ...] | None = None  # before the update
    entropies: tuple[float | None, ...] | None = None  # of its distributions, in nats, at its temperature
    reference_logprobs: tuple[float | None, ...] | None = None
    values: tuple[float | None, ...] | None = None
    advantages: tuple[float | None, ...]
    step_rewards: tuple[float | None, ...] | None = None
    images: tuple[LoggedImage, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Return whether each column has a value for every token, or for every trained one."""
        trained = (
            self.engine_logprobs, self.trainer_logprobs, self.entropies, self.reference_logprobs, self.values,
            self.advantages, self.step_rewards,
        )  # fmt: skip
        return len(self.texts) == len(self.token_ids) == len(self.trained) and all(
            column is None or len(column) == sum(self.trained) for column in trained
        )


class LoggedCompletion(Config):
    text: str  # of the last reply
    finish_reason: str
    turns: int
    reward: float | None  # total: of the completion and of its steps; None: not finite
    rewards: dict[str, float | None]  # by name, before weights and shaping
    weighted: dict[str, float | None] = Field(default_factory=dict)  # by name; their sum and the shaping are `reward`
    details: dict[str, float | None] = Field(default_factory=dict)  # other values of rewards, by REWARD/VALUE
    score: float | None = None
    environment: dict[str, float | None] = Field(default_factory=dict)  # the environment's counters
    versions: tuple[tuple[int, int], ...]  # (tokens, version of the weights that sampled them)
    messages: tuple[dict[str, Any], ...] | None = None  # that the last reply answers, in a later turn; None: the prompt
    sequences: tuple[LoggedSequence, ...]  # the one of the last reply first

    @property
    def sampled_tokens(self) -> int:
        return sum(sum(sequence.trained) for sequence in self.sequences)


class LoggedGroup(Config):
    """The completions of one prompt."""

    id: str  # of the dataset's row
    prompt: tuple[dict[str, Any], ...]
    answer: str | None = None
    completions: tuple[LoggedCompletion, ...]


class LoggedStep(Config):
    step: int  # from 1
    prompts: int  # of the step
    completions: int
    histograms: dict[str, Histogram]  # over all completions of the step: reward, length, and ratio if it is known
    groups: tuple[LoggedGroup, ...]  # a sample of the step's, in the order of the step


def rollouts_file(step: int) -> str:
    return f"{step:08d}{_SUFFIX}"


def step_of(path: str) -> int | None:
    """Return the step of a file of logged rollouts; None for any other path."""
    name = path.rpartition("/")[2]
    digits = name.removesuffix(_SUFFIX)
    return int(digits) if name.endswith(_SUFFIX) and digits.isascii() and digits.isdecimal() else None


def logged_files(manifest: Manifest) -> dict[int, str]:
    """Return the steps whose rollouts an artifact has, in order, with their files."""
    paths = [file.path for file in manifest.files if file.path.startswith(f"{KEPT_ROLLOUTS}/")]
    return dict(sorted((step, path) for path in paths if (step := step_of(path)) is not None))


def encode_step(step: LoggedStep) -> bytes:
    """Return the content of a step's file: equal bytes for equal steps."""
    return gzip.compress(step.model_dump_json(exclude_defaults=True).encode(), compresslevel=6, mtime=0)


def decode_step(data: bytes, where: str) -> LoggedStep:
    """Parse a step's file. Raises IntegrityError, naming `where`, if it is damaged or of an unreasonable size."""
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        text = unpacker.decompress(data, _LARGEST)
    except zlib.error as error:
        raise IntegrityError(f"{where} is damaged: {error}") from error
    if not unpacker.eof:
        raise IntegrityError(f"{where} is cut, or larger than {_LARGEST} bytes")
    step = parsed(LoggedStep, text, where, "a step of logged rollouts")
    completions = (completion for group in step.groups for completion in group.completions)
    if not all(sequence.is_whole for completion in completions for sequence in completion.sequences):
        raise IntegrityError(f"{where} is not a step of logged rollouts: some tokens of it have no values")
    return step
