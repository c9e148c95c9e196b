"""Number types of recipes, each with its valid range; a value outside is rejected."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

OUT_OF_RANGE = "out_of_range"  # the type of pydantic's problem


@dataclass(frozen=True, slots=True)
class Limits:
    """Annotates a number with its minimum and maximum, and with the message for values outside."""

    low: float
    high: float
    too_high: str  # the reason if above `high`, perhaps empty
    too_low: str = ""
    above: bool = False  # `low` itself is too low
    below: bool = False  # `high` itself is too high

    def check(self, value: float) -> float:
        """Return `value`. Raises PydanticCustomError if it is out of range."""
        why = ""
        if value > self.high or (self.below and value == self.high):
            why = self.too_high
        elif value < self.low or (self.above and value == self.low):
            why = self.too_low
        elif math.isfinite(value):
            return value
        text = f"it must be {self._range()}" + (f": {why}" if why else "")
        raise PydanticCustomError(OUT_OF_RANGE, "{text}", {"text": text})

    def _range(self) -> str:
        low, high = (f"{limit:.15g}" for limit in (self.low, self.high))
        if not self.above and not self.below:
            return f"from {low} to {high}"
        return (
            f"{'more than' if self.above else 'at least'} {low} and {'less than' if self.below else 'at most'} {high}"
        )

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        low = "exclusiveMinimum" if self.above else "minimum"
        high = "exclusiveMaximum" if self.below else "maximum"
        return {**handler(schema), low: self.low, high: self.high}


def no_bool(value: Any) -> Any:
    """Return `value`, for a choice of numbers; Python, and so pydantic, takes true for 1."""
    if isinstance(value, bool):
        raise PydanticCustomError(OUT_OF_RANGE, "it must be a whole number")
    return value


def no_number(value: Any) -> Any:
    """Return `value`, for a choice with true or false in it; Python, and so pydantic, takes 1 for true."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise PydanticCustomError(OUT_OF_RANGE, "it must not be a number")
    return value


# Steps, rows, and how often.
Steps = Annotated[int, Limits(1, 10_000_000, "")]
WarmupSteps = Annotated[int, Limits(0, 10_000_000, "")]
Epochs = Annotated[int, Limits(1, 10_000, "no run repeats its data as often")]
Rows = Annotated[int, Limits(1, 1_000_000_000_000, "no dataset has as many rows")]
BatchSize = Annotated[int, Limits(1, 1_000_000, "no step trains on as many")]
Lag = Annotated[int, Limits(0, 100, "rollouts would be too stale")]
Age = Annotated[int, Limits(1, 100, "rollouts would be too stale", "nothing would be replayed")]
Weight = Annotated[float, Limits(0, 1e6, "the other sources would never be drawn", above=True)]
Similarity = Annotated[float, Limits(0.7, 1, "it is a share of 1", "texts with less in common are found by chance")]
Publishes = Annotated[int, Limits(1, 10_000, "faults of single weights would be found too late")]
ShownPrompts = Annotated[int, Limits(1, 10_000, "the report is one page")]
Copies = Annotated[int, Limits(1, 1000, "each holds the whole state of the training")]
Minutes = Annotated[float, Limits(0, 10_080, "that is more than a week", above=True)]
Seconds = Annotated[float, Limits(0, 604_800, "that is more than a week", above=True)]
Requests = Annotated[int, Limits(1, 1000, "a server answers fewer at once")]
Attempts = Annotated[int, Limits(1, 1000, "a server that is down so long needs a person")]
Decimals = Annotated[int, Limits(0, 6, "no model tells rewards apart that are as close")]

# Random numbers.
Seed = Annotated[int, Limits(0, 2**32 - 1, "random generators on a CPU keep 32 bits of a seed")]
LongSeed = Annotated[int, Limits(0, 2**63 - 1, "no more than 63 bits of a seed count")]  # of Python's own generator

# Shares of 1.
Share = Annotated[float, Limits(0, 1, "it is a share of 1", "it is a share of 1")]
Kappa = Annotated[float, Limits(-1, 1, "kappa is at most 1", "kappa is at least -1")]
Margin = Annotated[float, Limits(-1, 1, "scores are from 0 to 1", "scores are from 0 to 1")]
Characters = Annotated[int, Limits(16, 2**20, "no context holds as much", "little would be left")]
PartialShare = Annotated[float, Limits(0, 1, "nothing would be left to train on", "it is a share of 1", below=True)]
PositiveShare = Annotated[float, Limits(0, 1, "it is a share of 1", "nothing would be left", above=True)]

# Tokens and completions.
Tokens = Annotated[int, Limits(1, 10_000_000, "no model reads as many tokens at once")]
TrainedTokens = Annotated[
    int, Limits(2, 10_000_000, "no model reads as many tokens at once", "nothing predicts a sequence's first token")
]
MicroBatchTokens = Annotated[int, Limits(1, 100_000_000, "no device holds as many")]
Samples = Annotated[int, Limits(0, 65_536, "nothing samples as many completions of one prompt")]
GroupSize = Annotated[int, Limits(1, 65_536, "nothing samples as many completions of one prompt")]
MOST_COMPLETIONS = 2**20  # of one step of RL
Shots = Annotated[int, Limits(0, 1000, "no prompt has room for as many")]
Turns = Annotated[int, Limits(1, 1000, "no episode has as many turns")]
StoredTokens = Annotated[int, Limits(1, 100_000, "no disk has room for as many of each token")]
MOST_KEPT = 1024  # tokens that truncated sampling keeps at a position of a rollout in RL
TopK = Annotated[int, Limits(0, 10_000_000, "no vocabulary has as many tokens")]
# Temperatures that vLLM applies unchanged: from 0 to 0.01 it takes 0.01 instead, and above 2 it rejects the request.
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0
_TEMPERATURES = f"the engines sample at {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}; for greedy completions set 0"
Temperature = Annotated[float, Limits(0, HIGHEST_TEMPERATURE, _TEMPERATURES, _TEMPERATURES)]

# Optimizers and adapters.
_FORGETS_NOTHING = "the mean would never change"
LearningRate = Annotated[float, Limits(0, 1, "no model learns at such a rate", "nothing would be trained", above=True)]
Beta = Annotated[float, Limits(0, 1, _FORGETS_NOTHING, below=True)]
Decay = Annotated[float, Limits(0, 1, _FORGETS_NOTHING, below=True)]
EMADecay = Annotated[
    float, Limits(0, 1, _FORGETS_NOTHING, "the mean would be the weights themselves", above=True, below=True)
]
Iterations = Annotated[int, Limits(1, 20, "the iteration has long converged")]
WeightDecay = Annotated[float, Limits(0, 10, "the weights would be lost to it")]
GradientNorm = Annotated[float, Limits(0, 1e6, "no gradient is as long: none would be scaled down", above=True)]
AdamEpsilon = Annotated[
    float, Limits(0, 1, "an update would hardly depend on the size of the gradient", "a weight without a gradient "
                        "would be divided by 0", above=True)
]  # fmt: skip
LoraRank = Annotated[int, Limits(1, 512, "the engines serve adapters up to this rank")]
LoraAlpha = Annotated[float, Limits(0, 100_000, "so strong an adapter replaces the model", above=True)]
Dropout = Annotated[float, Limits(0, 1, "the adapter would see nothing", below=True)]

# Losses and rewards.
Coefficient = Annotated[float, Limits(0, 1000, "nothing else in the loss would count")]
PositiveCoefficient = Annotated[
    float, Limits(0, 1000, "nothing else in the loss would count", "it would not count", above=True)
]
_NO_LOSS = "the loss would be 0; its limit is"
MixtureWeight = Annotated[
    float,
    Limits(0, 1, f"{_NO_LOSS} reverse_kl", f"{_NO_LOSS} forward_kl", above=True, below=True),
]
DistillationTemperature = Annotated[
    float, Limits(0.01, 1000, "any two distributions are uniform", "only the most probable token would count")
]
DivergenceAlpha = Annotated[
    float,
    Limits(0, 1, "1 is `divergence: forward_kl`", "0 is `divergence: reverse_kl`", above=True, below=True),
]
PreferenceBeta = Annotated[float, Limits(0, 1000, "any difference would be certain", "nothing would train", above=True)]
_MORE_WRONG = "where more than half of the labels are wrong, exchange chosen and rejected"
LabelSmoothing = Annotated[float, Limits(0, 0.5, _MORE_WRONG)]
RobustSmoothing = Annotated[float, Limits(0, 0.5, "labels of which half are wrong say nothing", above=True, below=True)]
ExoSmoothing = Annotated[float, Limits(0, 0.5, _MORE_WRONG, "its logarithm is part of the loss", above=True)]
MergeWeight = Annotated[float, Limits(-10, 10, "so far from both models is none", "so far from both models is none")]
Nats = Annotated[float, Limits(0, 100_000, "a policy so far from its reference writes noise", above=True)]
Tolerance = Annotated[float, Limits(0, 1000, "any weights would pass", above=True)]
LARGEST_REWARD = 1e6  # its square, as of a loss, leaves float32 room for sums
_TOO_LARGE = "no reward is as large"
Reward = Annotated[float, Limits(-LARGEST_REWARD, LARGEST_REWARD, _TOO_LARGE, _TOO_LARGE)]
PositiveReward = Annotated[float, Limits(0, LARGEST_REWARD, _TOO_LARGE, above=True)]
Weighting = Annotated[float, Limits(-1000, 1000, "weights count by their ratios", "weights count by their ratios")]
RewardGap = Annotated[float, Limits(0, LARGEST_REWARD, _TOO_LARGE, "a difference has no sign")]
_AGREED = "a token whose probabilities agree, w = 1, must count"
LowRatio = Annotated[float, Limits(0, 1, _AGREED)]
HighRatio = Annotated[float, Limits(1, 1000, "no two probabilities of one token differ as much", _AGREED)]
ClipLow = Annotated[float, Limits(0, 1, "no ratio is less than 0: nothing would be clipped", above=True)]
ClipHigh = Annotated[float, Limits(0, 20, "hardly any ratio is as large: nothing would be clipped", above=True)]
GateTemperature = Annotated[
    float, Limits(0, 1000, "hardly any token would have a gradient", "no token would lose its gradient", above=True)
]
DualClip = Annotated[float, Limits(1, 1000, "nothing would be clipped", "it says how many times more", above=True)]
Passes = Annotated[int, Limits(1, 100, "the experience would be far off the policy")]
Minibatches = Annotated[int, Limits(1, 100_000, "no step has as many completions")]
Rounds = Annotated[int, Limits(1, 256, "each round of a step has seeds of its own")]  # rl/rollouts.py gives them
Oversampling = Annotated[
    float, Limits(1, 100, "nearly all that is sampled would be dropped", "fewer would be drawn than are missing")
]

# Images.
ImagesOfRow = Annotated[int, Limits(1, 1024, "no model reads as many images at once")]
ImageBytes = Annotated[int, Limits(1, 2**30, "an image is read into memory whole")]
ImagePixels = Annotated[int, Limits(1, 2**30, "an image is decoded in memory whole")]

# Models from scratch.
_IN_ONE_PROCESS = "it is made in the memory of one process"
Width = Annotated[int, Limits(1, 262_144, _IN_ONE_PROCESS)]
Depth = Annotated[int, Limits(1, 1024, _IN_ONE_PROCESS)]
Deviation = Annotated[float, Limits(0, 1, "no model is initialised so widely", above=True)]

# Machines.
Processes = Annotated[int, Limits(1, 100_000, "no cluster runs as many")]
ProcessesOfCommand = Annotated[int, Limits(8, 65_536, "no node starts as many", "a shell and its pipes need some")]
Threads = Annotated[int, Limits(0, 4096, "no machine has as many cores")]
CPUs = Annotated[float, Limits(0, 4096, "no machine has as many cores", "Ray would reserve none", above=True)]
PartitionSize = Annotated[int, Limits(2, 1024, "no node has as many GPUs", "one rank would hold all weights")]
Parallel = Annotated[int, Limits(1, 1024, "no engine spreads over as many GPUs")]
GiB = Annotated[float, Limits(0, 65_536, "no machine has as much memory", above=True)]
Sequences = Annotated[int, Limits(1, 4096, "an engine batches no more tokens than that at once")]


WorkerGPUs = Annotated[float, Limits(0, 1, "a worker computes on one GPU: raise `workers` instead")]


def _whole_above_one(gpus: float) -> float:
    if gpus > 1 and gpus != int(gpus):
        raise ValueError(f"{gpus:g} GPUs: Ray reserves a part of one GPU, or several whole ones")
    return gpus


GPUs = Annotated[float, Limits(0, 1024, "no machine has as many GPUs"), AfterValidator(_whole_above_one)]

# Money, for an hour or for a million tokens.
Price = Annotated[float, Limits(0, 1e9, "nothing costs as much", "nobody pays for use")]
