"""RL: a policy, prompts and a reward in; the improved policy (full weights, or an adapter) out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.rl.assembly import Started, build_loop
from rlhf_core.rl.critic import CriticWorker
from rlhf_core.rl.roles import CRITIC, Role, placed_apart, roles
from rlhf_core.rl.scoring import FrozenWorker
from rlhf_core.rl.worker import RLWorker
from rlhf_core.rollout.engine import EngineSettings
from rlhf_core.stages.cluster import Cluster, EngineSpec, RankSpec


def run(config: RLConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster) -> Output:
    folder = context.workdir / "policy"
    with build_loop(config, inputs, context, partial(ranks_and_engines, config, inputs, context, cluster)) as loop:
        metrics = loop.run()
        loop.save(folder)
    if (folder / CRITIC).is_dir():
        context.publish(CRITIC, config.steps, Output(Kind.REWARD_MODEL, folder / CRITIC))
    kind = Kind.POLICY if config.lora is None else Kind.ADAPTER
    return Output(kind, folder, {**_last_and_best(metrics), **loop.row_counts})


def ranks_and_engines(
    config: RLConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster
) -> AbstractContextManager[Started]:
    models = roles(config, inputs)
    on_ranks = [role for role in models if role.placement is None]
    ranks = RankSpec(config.placement, config.engine, partial(RLWorker, config, context, on_ranks))
    apart = {name: _apart(config, context, members) for name, members in placed_apart(models).items()}
    engines = EngineSettings(
        config.rollout, config.engine.dtype, context.seed, config.served_lora, sleeps=config.hybrid,
        kept_of=config.sampling if config.sampling.truncation else None,
    )  # fmt: skip
    return cluster.workers_and_engines(ranks, EngineSpec(inputs["model"], engines), context, apart)


def _apart(config: RLConfig, context: StageContext, members: Sequence[Role]) -> RankSpec[FrozenWorker]:
    placement, engine = members[0].placement, members[0].engine
    assert placement is not None
    if any(role.name == CRITIC for role in members):
        return RankSpec(placement, engine, partial(CriticWorker, config, context, members))
    return RankSpec(placement, engine, partial(FrozenWorker, config.sampling.temperature, context, members))


def _last_and_best(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the last step's ungrouped metrics, and the best validation."""
    ungrouped = {name: value for name, value in metrics.items() if "/" not in name}
    best = {name: metrics[f"validation/{name}"] for name in ("best", "best_step") if f"validation/{name}" in metrics}
    return {**ungrouped, **{f"validation_{name}": value for name, value in best.items()}}
