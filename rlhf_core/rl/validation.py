"""Validation during training: held-out prompts, answered by the weights that may become the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_core.config.engines.rollout import SamplingConfig
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.config.stages.validation import ValidationSet, named
from rlhf_core.episodes.rollouter import Rollouter, Start
from rlhf_core.evaluation.answering import answer
from rlhf_core.evaluation.summary import flat_metrics, summarise
from rlhf_core.metrics import merged
from rlhf_core.rewards import TrajectoryReward
from rlhf_core.rl.hybrid import Turns
from rlhf_core.rl.phases import PhaseTimer
from rlhf_core.rl.publisher import Publisher
from rlhf_core.rl.ranks import PolicyTrainer
from rlhf_core.training.best import Best
from rlhf_core.types import Prompt, Trajectory

_PREFIX = "validation/"


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One validation set."""

    settings: ValidationSet
    prompts: Sequence[Prompt]
    scorers: Mapping[str, TrajectoryReward]  # by name, the main one first


class Validation:
    """Evaluates all sets at the same steps. The ranks keep the weights of the best step, copied before any update."""

    def __init__(
        self,
        config: RLConfig,
        held_out: Mapping[str, HeldOut],
        rollouter: Rollouter,
        trainer: PolicyTrainer,
        publisher: Publisher,
        turns: Turns,
        *,
        seed: int,
    ) -> None:
        """held_out: the sets of the settings, by name. rollouter: the one used in training."""
        assert config.validation is not None
        self._config, self._settings = config, config.validation
        self._held_out = held_out
        self._trainer, self._publisher, self._turns = trainer, publisher, turns
        self._rollouter, self._seed = rollouter, seed
        self.best = Best(config.validation.metric, maximise=True)

    def after(self, step: int, phase: PhaseTimer) -> dict[str, float]:
        """Return metrics, if due after `step` steps. The engines then serve the same weights as before."""
        if step % self._settings.every_steps and step != self._config.steps:
            return {}
        with phase("validation"):
            averaged = self._config.ema_decay is not None
            if averaged:
                self._publisher.publish("average")
            measured = self._evaluate()
            if self.best.update(step, measured) and self._settings.keep == "best":
                self._turns.train(keep_weights=not averaged)  # rollouts do not use the average
                self._trainer.keep_weights("average" if averaged else "live")
            if averaged:
                self._publisher.publish()
            self._turns.sample()
        return {**{f"{_PREFIX}{name}": value for name, value in measured.items()}, **self.best.metrics(_PREFIX)}

    def _evaluate(self) -> dict[str, float]:
        """Return the metrics of all sets."""
        return merged(*(named(name, self._evaluate_set(held_out)) for name, held_out in self._held_out.items()))

    def _play(self, starts: Sequence[Start], sampling: SamplingConfig) -> list[Trajectory]:
        """Play episodes. Raises WeightSyncError if other weights than those published last sampled a reply."""
        trajectories = self._rollouter.play(starts, sampling)
        self._publisher.require_version({trajectory.weight_version for trajectory in trajectories})
        return trajectories

    def _evaluate_set(self, held_out: HeldOut) -> dict[str, float]:
        settings = held_out.settings
        answered = answer(
            held_out.prompts, self._play, held_out.scorers,
            sampling=settings.sampling or self._config.sampling, samples=settings.samples, seed=self._seed,
        )  # fmt: skip
        results = summarise(answered, pass_at=settings.pass_at, seed=self._seed)
        main = next(iter(held_out.scorers))
        flat = flat_metrics(results, main_scorer=main)
        for name, metrics in results["all"]["scorers"].items():
            prefix = "" if name == main else f"{name}/"
            if settings.samples:
                flat[f"{prefix}sampled_mean_score"] = metrics["sampled_mean_score"]
                flat[f"{prefix}sampled_pass@1"] = metrics["sampled_pass@1"]["value"]
        return {name: value for name, value in flat.items() if not name.endswith(("_low", "_high", "prompts"))}
