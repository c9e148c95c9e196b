"""Validation during supervised training: metrics of held-out examples, and the best weights by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_core.config.stages.trained import SupervisedConfig
from rlhf_core.config.stages.validation import counts_prefix, named, path_of_set
from rlhf_core.contract import Input, StageContext
from rlhf_core.data.fitting import Fitted
from rlhf_core.errors import StageError
from rlhf_core.metrics import merged
from rlhf_core.supervised.examples import Example, Packer
from rlhf_core.supervised.worker import SupervisedWorker, divider
from rlhf_core.system.watchdog import WATCHDOG
from rlhf_core.training.best import Best
from rlhf_core.training.group import WorkerGroup

_PREFIX = "validation/"
Read = Callable[[Input], Fitted[Sequence[Example]]]  # the examples of a dataset that fit
HeldOut = Mapping[str, Fitted[Sequence[Example]]]  # by the set's name


def read_held_out(config: SupervisedConfig, inputs: Mapping[str, Input], read: Read) -> HeldOut:
    """Read every validation set; none without validation. Raises StageError, naming the setting, as `read` does."""
    held_out = {}
    for name in config.validation.names if config.validation is not None else ():
        setting = f"{path_of_set(name)}.dataset"
        try:
            held_out[name] = read(inputs[setting])
        except StageError as error:
            raise StageError(f"{setting}: {error}") from error
    return held_out


def row_counts(held_out: HeldOut) -> dict[str, int]:
    """Return the numbers of truncated and dropped rows, for the stage's manifest."""
    return merged(*(fitted.metrics(counts_prefix(name)) for name, fitted in held_out.items()))


class Validation:
    """Validates all sets at the same steps. The ranks keep the weights of the best step, copied at once."""

    def __init__(
        self,
        config: SupervisedConfig,
        held_out: HeldOut,
        pack: Packer,
        workers: WorkerGroup[SupervisedWorker[Any]],
        context: StageContext,
    ) -> None:
        """held_out: the sets of the settings."""
        assert config.validation is not None
        self._settings = config.validation
        self._workers, self._context = workers, context
        divide = divider(config, workers)
        self._shards = {name: divide(pack(fitted.rows[:])) for name, fitted in held_out.items()}
        self.best = Best(self._settings.metric, maximise=self._settings.maximise)
        self._last: dict[str, float] = {}

    def steps_left(self, done: int) -> int:
        """Return the number of steps from `done` to the next validation; one follows the last step in any case."""
        return self._settings.every_steps - done % self._settings.every_steps

    def after(self, done: int, total: int) -> None:
        """Validate and log, if that is due once `done` of `total` steps are done."""
        if done % self._settings.every_steps and done != total:
            return
        self._context.progress(done, total, "validate")
        with WATCHDOG.phase("validation"):
            self._last = merged(
                *(
                    named(name, self._workers.scatter(SupervisedWorker.validate, shards)[0])
                    for name, shards in self._shards.items()
                )
            )
        if self.best.update(done, self._last) and self._settings.keep == "best":
            self._workers.call(SupervisedWorker.keep_weights)
        measured = {f"{_PREFIX}{name}": value for name, value in self._last.items()}
        self._context.log(done, measured | self.best.metrics(_PREFIX))
        self._context.progress(done, total, "train")

    @property
    def of_result(self) -> Mapping[str, float]:
        """Return the metrics of the weights that are the stage's result."""
        return self.best.measured if self._settings.keep == "best" else self._last

    def result(self) -> dict[str, float]:
        """Return value and step of the best validation. Raises StageError if none was finite."""
        if not self.best.step:
            raise StageError(
                f"validation: `{self._settings.metric}` was finite at no step, so no weights are the best: "
                "lower the learning rate, or look for rows that are not what they should be"
            )
        return self.best.metrics("validation_")
