"""Assembly of a run's loop in three steps: read the inputs, start ranks and engines, connect the parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlhf_core.algorithms import Algorithm, build_algorithm
from rlhf_core.chat.encoding import Tokenizer, load_tokenizer
from rlhf_core.chat.feedback import require_turns_follow
from rlhf_core.chat.hints import Hint
from rlhf_core.config.engines.rollout import SamplingConfig
from rlhf_core.config.rl.keep import KeepConfig
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.config.stages.validation import counts_prefix, path_of_set
from rlhf_core.contract import Input, StageContext
from rlhf_core.data.fitting import Fitted
from rlhf_core.data.prompts import fit_prompts
from rlhf_core.data.reading import IMAGES_FOLDER, read_rows, require_all_read, require_seen_by_all, row_policy
from rlhf_core.environments import EnvironmentHost, open_environments, rows_to_play
from rlhf_core.episodes.rollouter import Rollouter
from rlhf_core.episodes.shown_images import ShownImages
from rlhf_core.episodes.stream import Stream
from rlhf_core.errors import StageError
from rlhf_core.models.vision import ImageProcessor, RowImages, open_processor
from rlhf_core.rewards import TrajectoryReward, open_rewards
from rlhf_core.rewards.known_answers import Asked, require_known_answers
from rlhf_core.rewards.model import RewardReader
from rlhf_core.rewards.templates import hint_of
from rlhf_core.rl.async_collector import AsyncCollector, BetweenReplies
from rlhf_core.rl.collector import Collector, SyncCollector
from rlhf_core.rl.difficulty import SelectedPrompts
from rlhf_core.rl.hybrid import turns_of
from rlhf_core.rl.keeping import Keeper
from rlhf_core.rl.loop import Loop
from rlhf_core.rl.pass_rates import PassRates, read_pass_rates
from rlhf_core.rl.prompts import PromptSampler
from rlhf_core.rl.publisher import Publisher
from rlhf_core.rl.ranks import PolicyTrainer
from rlhf_core.rl.reward_models import image_problems, rank_scores, read_reward_models
from rlhf_core.rl.rewarding import RewardPipeline
from rlhf_core.rl.roles import CRITIC, placed_apart, require_same_positions, require_same_tokens, roles
from rlhf_core.rl.rollout_log import RolloutLog
from rlhf_core.rl.rollouts import RolloutSampler
from rlhf_core.rl.scoring import FrozenWorker
from rlhf_core.rl.shown_files import ShownFiles
from rlhf_core.rl.stored import StoredGroups
from rlhf_core.rl.validation import HeldOut, Validation
from rlhf_core.rl.worker import RLWorker
from rlhf_core.rollout.engines import Engines
from rlhf_core.training.checkpointing import Checkpointing, DriverState
from rlhf_core.training.group import WorkerGroup
from rlhf_core.types import Prompt

# The policy's ranks, the engines, and those of models apart from the policy, by the name of the group.
Started = tuple[WorkerGroup[RLWorker], Engines, Mapping[str, WorkerGroup[FrozenWorker]]]


@dataclass(frozen=True, slots=True)
class _Read:
    """The inputs of a run, validated against each other and the settings."""

    tokenizer: Tokenizer
    processor: ImageProcessor | None
    environment_host: EnvironmentHost
    prompts: list[Prompt]
    pass_rates: PassRates | None  # before the run, if it selects by them
    held_out: Mapping[str, HeldOut]  # validation sets by name
    row_counts: Mapping[str, float]  # dropped and truncated rows of all datasets
    algorithm: Algorithm
    driver_rewards: Mapping[str, TrajectoryReward]
    reward_models: Mapping[str, RewardReader]
    monitors: Mapping[str, TrajectoryReward]
    all_read_images: bool  # the policy, and every model that reads its tokens


@contextmanager
def build_loop(
    config: RLConfig,
    inputs: Mapping[str, Input],
    context: StageContext,
    start: Callable[[], AbstractContextManager[Started]],
) -> Iterator[Loop]:
    """Yield the loop of a run; on exit, end everything that was opened or started for it.

    start: starts the ranks and the engines. Called last, since they take minutes: StageError for invalid inputs is
    raised before.
    """
    with ExitStack() as stack:
        read = _read(config, inputs, context, stack)
        context.progress(0, config.steps, "start workers and engines")
        started = stack.enter_context(start())
        yield _wire(config, inputs, context, read, started, stack)


def _read(config: RLConfig, inputs: Mapping[str, Input], context: StageContext, stack: ExitStack) -> _Read:
    folder, settings = inputs["model"].folder, config.settings
    tokenizer, processor = load_tokenizer(folder), open_processor(folder)
    environment_host = stack.enter_context(open_environments(config.environment, context, tokenizer))
    prompts_of = partial(_prompts, config, tokenizer, processor, environment_host)
    hint = (
        hint_of(settings.teacher.hint) if settings.teacher is not None and settings.teacher.hint is not None else None
    )
    fitted = prompts_of(inputs["dataset"], config.sampling, hint)
    if not fitted.rows:
        raise StageError("`dataset` has no prompt that leaves room for its completion")
    row_counts, held_out_prompts = fitted.metrics(), {}
    for name, validation_set in config.validation_sets.items():
        setting = f"{path_of_set(name)}.dataset"
        fitted_set = prompts_of(inputs[setting], validation_set.sampling or config.sampling)
        if not fitted_set.rows:
            raise StageError(f"`{setting}` has no prompts to validate with")
        held_out_prompts[name] = fitted_set.rows
        row_counts |= fitted_set.metrics(counts_prefix(name))
    longest = config.rollout.max_length
    require_same_tokens(config.token_readers, inputs, "rollout.max_length", longest)
    require_same_positions(config, inputs)
    if config.environment.appends_turns:
        require_turns_follow(tokenizer)
    reward_models = read_reward_models(settings.model_rewards, f"{config.block}.rewards", inputs, longest)
    blind = next(image_problems(config, inputs, reward_models), None)
    if blind is not None and any(prompt.images for prompt in fitted.rows):
        raise StageError(blind)
    algorithm = build_algorithm(config)
    driver_rewards = stack.enter_context(open_rewards(settings.driver_rewards, context))
    asked = [Asked(f"row {prompt.id}", prompt.text, prompt.row) for prompt in fitted.rows]
    require_known_answers(settings.driver_rewards, driver_rewards, asked, f"{config.block}.rewards")
    monitors = stack.enter_context(open_rewards(config.monitors, context))
    held_out = {
        name: HeldOut(each, held_out_prompts[name], stack.enter_context(open_rewards(each.scorers, context)))
        for name, each in config.validation_sets.items()
    }
    return _Read(
        tokenizer=tokenizer, processor=processor, environment_host=environment_host, prompts=fitted.rows,
        pass_rates=read_pass_rates(config, inputs, context), held_out=held_out, row_counts=row_counts,
        algorithm=algorithm, driver_rewards=driver_rewards, reward_models=reward_models, monitors=monitors,
        all_read_images=processor is not None and blind is None and not config.text_readers,
    )  # fmt: skip


def _prompts(
    config: RLConfig,
    tokenizer: Tokenizer,
    processor: ImageProcessor | None,
    environment_host: EnvironmentHost,
    dataset: Input,
    sampling: SamplingConfig,
    hint: Hint | None = None,
) -> Fitted[list[Prompt]]:
    room, policy = config.rollout.max_length - sampling.max_tokens, row_policy(dataset.folder)
    images = RowImages(processor, dataset.folder / IMAGES_FOLDER, config.rollout.max_images)
    rows = rows_to_play(read_rows(dataset.folder), environment_host)
    fitted = fit_prompts(rows, tokenizer, max_tokens=room, policy=policy, hint=hint, images=images)
    require_all_read(dataset.folder, fitted)
    require_seen_by_all((prompt.row for prompt in fitted.rows), config.text_readers_of)
    return fitted


def _wire(
    config: RLConfig,
    inputs: Mapping[str, Input],
    context: StageContext,
    read: _Read,
    started: Started,
    stack: ExitStack,
) -> Loop:
    workers, engines, groups = started
    apart = {
        role.name: groups[name] for name, roles_of in placed_apart(roles(config, inputs)).items() for role in roles_of
    }
    turns = turns_of(config, workers, engines)
    stream = None
    if config.asynchronous is not None and config.max_lag:
        stream = stack.enter_context(Stream(engines))
        if config.asynchronous.publish == "between_replies":
            turns = BetweenReplies(stream)
    trainer = PolicyTrainer(config, read.algorithm, workers, context.seed, apart)
    publisher = Publisher(
        config, trainer, engines, probe=read.prompts[:4], turns=turns,
        replace_dead=None if stream is None else stream.replace_dead,
    )  # fmt: skip
    shown, shown_folder, stored = None, context.workdir / "shown_images", StoredGroups()
    if read.processor is not None and read.all_read_images:
        shown = ShownImages(read.processor, shown_folder, config.rollout.max_images)
        stored = StoredGroups(ShownFiles(shown_folder, context))
    rollouter = Rollouter(
        engines, read.tokenizer, config.rollout, read.environment_host, stream, shown, publisher.replace_dead
    )

    scores = rank_scores(config, inputs, trainer, turns)
    model_rewards = {name: model.reward(scores[name]) for name, model in read.reward_models.items()}
    rewards = RewardPipeline(
        config.settings, config.max_sampled_tokens, {**read.driver_rewards, **model_rewards}, read.tokenizer
    )
    prompts, rollouts = PromptSampler(read.prompts, context.seed), RolloutSampler(config, rollouter, context.seed)
    if config.select is not None and read.pass_rates is not None:
        prompts = SelectedPrompts(read.prompts, context.seed, config.select, read.pass_rates)
    collector: Collector
    if stream is None:
        collector = SyncCollector(
            config, prompts=prompts, rollouts=rollouts, rewards=rewards, monitors=read.monitors, stored=stored
        )
    else:
        collector = AsyncCollector(
            config, prompts=prompts, rollouts=rollouts, rewards=rewards, monitors=read.monitors, stream=stream,
            replace_dead=publisher.replace_dead, stored=stored,
        )  # fmt: skip

    trained_apart: dict[str, WorkerGroup[Any]] = {CRITIC: apart[CRITIC]} if CRITIC in apart else {}
    driver: dict[str, DriverState] = {"collector": collector, "trainer": trainer}
    validation = keeper = None
    if config.validation is not None:
        validation = Validation(config, read.held_out, rollouter, trainer, publisher, turns, seed=context.seed)
        driver["validation"] = validation.best
    if config.keep != KeepConfig():
        save = partial(trainer.save, context=context, current=True)
        keeper = Keeper(config, context, save, read.tokenizer, (inputs["dataset"].folder / IMAGES_FOLDER, shown_folder))
    return Loop(
        config, read.algorithm, collector, trainer, publisher, context, turns=turns, validation=validation,
        checkpoints=Checkpointing(config.checkpoint, context, workers, driver, trained_apart), keeper=keeper,
        rollout_log=RolloutLog(config, read.tokenizer, context.live), processor=read.processor,
        row_counts=read.row_counts, pass_rates=read.pass_rates,
    )  # fmt: skip
