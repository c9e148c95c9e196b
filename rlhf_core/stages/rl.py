"""RL: a policy, prompts and a reward in; the improved policy (full weights, or an adapter) out."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from torch import Tensor

from rlhf_core.algorithms import build_algorithm
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.rl import RLConfig
from rlhf_core.config.rollout import SamplingConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.chat import Tokenizer, load_tokenizer
from rlhf_core.data.prompts import to_prompts
from rlhf_core.data.reading import read_rows
from rlhf_core.errors import StageError
from rlhf_core.rewards import build_reward, open_scorers
from rlhf_core.rewards.model import RewardModel, TokenScores
from rlhf_core.rl.collector import Collector
from rlhf_core.rl.hybrid import Turns, take_turns
from rlhf_core.rl.loop import Loop
from rlhf_core.rl.prompts import PromptSampler
from rlhf_core.rl.publisher import Publisher
from rlhf_core.rl.ranks import PolicyTrainer
from rlhf_core.rl.rewarding import RewardOfText, RewardPipeline, TrajectoryReward
from rlhf_core.rl.rollouts import RolloutSampler
from rlhf_core.rl.validation import HeldOut, Validation
from rlhf_core.stages.rl_cluster import Cluster, ray_cluster, reward_model_of
from rlhf_core.stages.workers import save
from rlhf_core.training.checkpointing import Checkpointing, DriverState
from rlhf_core.types import PackedBatch, Prompt


def run(config: RLConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster = ray_cluster) -> Output:
    tokenizer = load_tokenizer(inputs["model"].folder)
    prompts = _prompts(config, inputs["dataset"], tokenizer, config.sampling)
    algorithm = build_algorithm(config)

    with ExitStack() as stack:
        # The workers that hold the reward model are started below: what is wrong with a reward shows before.
        rewards = _rewards(config, inputs, context, lambda batch: _model_scores(config, batch, trainer, turns))
        for reward in rewards.values():
            stack.callback(reward.close)
        monitors = stack.enter_context(open_scorers(config.monitors, context))
        held_out = None if config.validation is None else _held_out(config, inputs, context, tokenizer, stack)
        context.progress(0, config.steps, "start workers and engines")
        workers, engines, turns = take_turns(config, *stack.enter_context(cluster(config, inputs, context)))
        trainer = PolicyTrainer(config, algorithm, workers, context.seed)
        publisher = Publisher(config, trainer, engines, probe=prompts[:4], turns=turns)
        collector = Collector(
            config,
            PromptSampler(prompts, context.seed),
            RolloutSampler(config, engines, tokenizer, context.seed),
            RewardPipeline(config.settings, config.sampling.max_tokens, rewards, tokenizer),
            monitors,
        )
        driver: dict[str, DriverState] = {"collector": collector, "trainer": trainer}
        validation = None
        if held_out is not None:
            validation = Validation(config, held_out, tokenizer, trainer, publisher, engines, turns, seed=context.seed)
            driver["validation"] = validation
        metrics = Loop(
            config=config,
            algorithm=algorithm,
            collector=collector,
            trainer=trainer,
            publisher=publisher,
            context=context,
            checkpoints=Checkpointing(config.checkpoint, context, workers, driver),
            turns=turns,
            validation=validation,
        ).run()
        folder = context.workdir / "policy"
        turns.train()
        save(workers, folder, context)

    return Output(
        kind=Kind.POLICY if config.lora is None else Kind.ADAPTER,
        folder=folder,
        metrics=_last_and_best(metrics),
    )


def _prompts(config: RLConfig, dataset: Input, tokenizer: Tokenizer, sampling: SamplingConfig) -> list[Prompt]:
    return to_prompts(read_rows(dataset.folder), tokenizer, max_tokens=config.rollout.max_length - sampling.max_tokens)


def _held_out(
    config: RLConfig, inputs: Mapping[str, Input], context: StageContext, tokenizer: Tokenizer, stack: ExitStack
) -> HeldOut:
    assert config.validation is not None
    sampling = config.validation.sampling or config.sampling
    prompts = _prompts(config, inputs["validation.dataset"], tokenizer, sampling)
    if not prompts:
        raise StageError("rl.validation.dataset has no prompts to validate with")
    return HeldOut(prompts, stack.enter_context(open_scorers(config.validation.scorers, context)))


def _last_and_best(metrics: Mapping[str, float]) -> dict[str, float]:
    """Of the last step all that is not part of a group; of the validations the best."""
    own = {name: value for name, value in metrics.items() if "/" not in name}
    best = {name: metrics[f"validation/{name}"] for name in ("best", "best_step") if f"validation/{name}" in metrics}
    return {**own, **{f"validation_{name}": value for name, value in best.items()}}


def _model_scores(config: RLConfig, batch: PackedBatch, trainer: PolicyTrainer, turns: Turns) -> Tensor:
    """The reward model is the ranks'. Where groups may be filtered out, the engines sample again afterwards."""
    refills = config.settings.filtering is not None
    turns.train(keep_weights=refills)
    scores = trainer.reward_scores(batch)
    if refills:
        turns.sample()
    return scores


def _rewards(
    config: RLConfig, inputs: Mapping[str, Input], context: StageContext, scores: TokenScores
) -> dict[str, TrajectoryReward]:
    """All rewards by name; scores: the reward model's, of tokens. Raises StageError if that model cannot give them."""
    rewards: dict[str, TrajectoryReward] = {}
    for name, text_reward in config.settings.text_rewards.items():
        rewards[name] = RewardOfText(build_reward(text_reward, context))
    model = reward_model_of(inputs)
    if model is None:
        return rewards
    reward_model = RewardModel.of(model.folder, policy=inputs["model"].folder)
    if reward_model.other is not None and getattr(config.settings, "critic_start", None) == "reward_model":
        raise StageError("the reward model's tokenizer differs from the policy's: set critic_start: policy")
    return rewards | {name: reward_model.reward(r, scores) for name, r in config.settings.model_rewards.items()}
