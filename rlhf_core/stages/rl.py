"""RL: a policy, prompts and a reward in; the improved policy (full weights, or an adapter) out."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial

from rlhf_core.algorithms import build_algorithm
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.keep import KeepConfig
from rlhf_core.config.rl import RLConfig
from rlhf_core.config.rollout import SamplingConfig
from rlhf_core.config.validation import counts_prefix, path_of_set
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.chat import Tokenizer, load_tokenizer
from rlhf_core.data.feedback import require_turns_follow
from rlhf_core.data.fitting import Fitted
from rlhf_core.data.hints import Hint
from rlhf_core.data.prompts import fit_prompts
from rlhf_core.data.reading import IMAGES_FOLDER, read_rows, require_seen_by_all, row_policy
from rlhf_core.environments import Environments, open_environments, rows_to_play
from rlhf_core.episodes.rollouter import Rollouter
from rlhf_core.episodes.shown_images import ShownImages
from rlhf_core.episodes.stream import Stream
from rlhf_core.errors import StageError
from rlhf_core.models.vision import ImageProcessor, RowImages, open_processor
from rlhf_core.rewards import TrajectoryReward, open_rewards
from rlhf_core.rewards.templates import hint_of
from rlhf_core.rl.async_collector import AsyncCollector, BetweenReplies
from rlhf_core.rl.collector import Collector, SyncCollector
from rlhf_core.rl.hybrid import take_turns
from rlhf_core.rl.keeping import Keeper
from rlhf_core.rl.loop import Loop
from rlhf_core.rl.prompts import PromptSampler
from rlhf_core.rl.publisher import Publisher
from rlhf_core.rl.ranks import PolicyTrainer
from rlhf_core.rl.reward_models import rank_scores, read_reward_models
from rlhf_core.rl.rewarding import RewardPipeline
from rlhf_core.rl.roles import placed_apart, require_same_positions, require_same_tokens, roles
from rlhf_core.rl.rollouts import RolloutSampler
from rlhf_core.rl.scoring import FrozenWorker
from rlhf_core.rl.validation import HeldOut, Validation
from rlhf_core.rl.worker import RLWorker
from rlhf_core.rollout.engine import EngineSettings
from rlhf_core.rollout.engines import SleepingEngines
from rlhf_core.stages.cluster import Cluster, EngineSpec, RankSpec
from rlhf_core.stages.workers import save
from rlhf_core.training.checkpointing import Checkpointing, DriverState
from rlhf_core.training.group import WorkerGroup
from rlhf_core.types import Prompt


def run(config: RLConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster) -> Output:
    tokenizer = load_tokenizer(inputs["model"].folder)
    with open_environments(config.environment, context, tokenizer) as environments:
        return _run(config, inputs, context, cluster, tokenizer, environments)


def _run(
    config: RLConfig,
    inputs: Mapping[str, Input],
    context: StageContext,
    cluster: Cluster,
    tokenizer: Tokenizer,
    environments: Environments,
) -> Output:
    processor = open_processor(inputs["model"].folder)
    teacher = config.settings.teacher
    hint = hint_of(teacher.hint) if teacher is not None and teacher.hint is not None else None
    fitted = _prompts(config, inputs["dataset"], tokenizer, processor, config.sampling, environments, hint)
    prompts = fitted.rows
    if not prompts:
        raise StageError("`dataset` has no prompt that leaves room for its completion")
    has_images = any(prompt.images for prompt in prompts)
    row_counts = fitted.metrics()
    held_out_prompts = _held_out_prompts(config, inputs, tokenizer, processor, environments)
    for name, of_set in held_out_prompts.items():
        row_counts |= of_set.metrics(counts_prefix(name))
    longest = config.rollout.max_length
    require_same_tokens(config.token_readers, inputs, "rollout.max_length", longest, images=has_images)
    require_same_positions(config, inputs)
    if config.environment.appends_turns:
        require_turns_follow(tokenizer)
    reward_models = read_reward_models(
        config.settings.model_rewards, f"{config.block}.rewards", inputs, config.rollout.max_length
    )
    algorithm = build_algorithm(config)
    shown = None
    if processor is not None and not config.text_readers and config.asynchronous is None:
        shown = ShownImages(processor, context.workdir / "shown_images", config.rollout.max_images)

    with ExitStack() as stack:
        driver_rewards = stack.enter_context(open_rewards(config.settings.driver_rewards, context))
        monitors = stack.enter_context(open_rewards(config.monitors, context))
        held_out = _held_out(config, held_out_prompts, context, stack)
        # What can be wrong with the inputs has shown by now: workers and engines take minutes to start.
        context.progress(0, config.steps, "start workers and engines")
        ranks, all_engines, frozen = stack.enter_context(ranks_and_engines(config, inputs, context, cluster))
        workers, engines, turns = take_turns(config, ranks, all_engines)
        stream = None
        if config.asynchronous is not None and config.max_lag:
            stream = stack.enter_context(Stream(engines))
            if config.asynchronous.publish == "between_replies":
                turns = BetweenReplies(stream)
        trainer = PolicyTrainer(config, algorithm, workers, context.seed, frozen)
        scores = rank_scores(config, inputs, trainer, turns)
        rewards: dict[str, TrajectoryReward] = {
            **driver_rewards,
            **{name: model.reward(scores[name]) for name, model in reward_models.items()},
        }
        publisher = Publisher(config, trainer, engines, probe=prompts[:4], turns=turns)
        rollouter = Rollouter(engines, tokenizer, config.rollout, environments, stream, shown)
        sampler = PromptSampler(prompts, context.seed)
        rollouts = RolloutSampler(config, rollouter, context.seed)
        pipeline = RewardPipeline(config.settings, config.max_sampled_tokens, rewards, tokenizer)
        collector: Collector
        if stream is None:
            collector = SyncCollector(config, prompts=sampler, rollouts=rollouts, rewards=pipeline, monitors=monitors)
        else:
            collector = AsyncCollector(
                config, prompts=sampler, rollouts=rollouts, rewards=pipeline, monitors=monitors, stream=stream
            )
        driver: dict[str, DriverState] = {"collector": collector, "trainer": trainer}
        validation = None
        if config.validation is not None:
            validation = Validation(config, held_out, rollouter, trainer, publisher, turns, seed=context.seed)
            driver["validation"] = validation.best
        checkpoints = Checkpointing(config.checkpoint, context, workers, driver)
        keeper = None
        if config.keep != KeepConfig():
            keeper = Keeper(
                config, context, lambda folder: save(workers, folder, context, RLWorker.save_current), tokenizer
            )
        loop = Loop(
            config, algorithm, collector, trainer, publisher, context, checkpoints, turns, validation, keeper, processor
        )
        metrics = loop.run()
        folder = context.workdir / "policy"
        turns.train()
        save(workers, folder, context)

    kind = Kind.POLICY if config.lora is None else Kind.ADAPTER
    return Output(kind, folder, {**_last_and_best(metrics), **row_counts})


def ranks_and_engines(
    config: RLConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster
) -> AbstractContextManager[tuple[WorkerGroup[RLWorker], SleepingEngines, Mapping[str, WorkerGroup[FrozenWorker]]]]:
    """The training ranks, the engines, and by role the ranks of models that are placed apart."""
    models = roles(config, inputs)
    own = [role for role in models if role.placement is None]
    ranks = RankSpec(config.placement, partial(RLWorker, config, context, own))
    apart = {
        role.name: RankSpec(placement, partial(FrozenWorker, config.sampling.temperature, context, role))
        for role, placement in placed_apart(models).items()
    }
    engines = EngineSettings(
        config.rollout, config.engine.dtype, context.seed, config.served_lora, sleeps=config.hybrid
    )
    return cluster.workers_and_engines(ranks, EngineSpec(inputs["model"], engines), context, apart)


def _prompts(
    config: RLConfig,
    dataset: Input,
    tokenizer: Tokenizer,
    processor: ImageProcessor | None,
    sampling: SamplingConfig,
    environments: Environments,
    hint: Hint | None = None,
) -> Fitted[list[Prompt]]:
    room, policy = config.rollout.max_length - sampling.max_tokens, row_policy(dataset.folder)
    images = RowImages(processor, dataset.folder / IMAGES_FOLDER, config.rollout.max_images)
    rows = rows_to_play(read_rows(dataset.folder, images=True), environments)
    fitted = fit_prompts(rows, tokenizer, max_tokens=room, policy=policy, hint=hint, images=images)
    require_seen_by_all((prompt.row for prompt in fitted.rows), config.text_readers_of)
    return fitted


def _held_out_prompts(
    config: RLConfig,
    inputs: Mapping[str, Input],
    tokenizer: Tokenizer,
    processor: ImageProcessor | None,
    environments: Environments,
) -> dict[str, Fitted[list[Prompt]]]:
    """Of each validation set, by its name."""
    found = {}
    for name, settings in config.validation_sets.items():
        setting = f"{path_of_set(name)}.dataset"
        sampling = settings.sampling or config.sampling
        found[name] = _prompts(config, inputs[setting], tokenizer, processor, sampling, environments)
        if not found[name].rows:
            raise StageError(f"`{setting}` has no prompts to validate with")
    return found


def _held_out(
    config: RLConfig, prompts: Mapping[str, Fitted[list[Prompt]]], context: StageContext, stack: ExitStack
) -> dict[str, HeldOut]:
    """Each validation set by its name."""
    return {
        name: HeldOut(settings, prompts[name].rows, stack.enter_context(open_rewards(settings.scorers, context)))
        for name, settings in config.validation_sets.items()
    }


def _last_and_best(metrics: Mapping[str, float]) -> dict[str, float]:
    """Of the last step all that is not part of a group; of the validations the best."""
    own = {name: value for name, value in metrics.items() if "/" not in name}
    best = {name: metrics[f"validation/{name}"] for name in ("best", "best_step") if f"validation/{name}" in metrics}
    return {**own, **{f"validation_{name}": value for name, value in best.items()}}
