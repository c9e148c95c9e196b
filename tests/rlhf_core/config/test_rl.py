"""Contradictory settings of the RL stage."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config.base import result_settings
from rlhf_core.config.inputs import input_settings
from rlhf_core.config.rl.difficulty_checks import scored_reward
from rlhf_core.config.rl.stage import RLConfig

COMMON: dict[str, Any] = {
    "algorithm": "grpo", "dataset": "p", "steps": 4, "prompts_per_step": 2, "sampling": {"max_tokens": 4},
    "rollout": {"max_length": 16},
    "grpo": {"rewards": {"right": {"type": "verifier"}}, "optimizer": {"learning_rate": 1e-3}},
}  # fmt: skip
GRPO = COMMON["grpo"]
SET = {"dataset": "far", "scorers": {"exact": {"type": "verifier"}}}
OFFLOADED = {"zero_stage": 3, "offload_parameters": True}
TWO = {"placement": {"workers": 2, "gpus_per_worker": 1.0}, "rollout": {"max_length": 16, "engines": 2}}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"placement": {"workers": 2}},
            r"placement.workers=2 and 1 devices of engines \(rollout.engines=1 x 1\); set equal numbers",
        ),
        (TWO, "gpus_per_worker=1 and rollout.gpus_per_engine=0 are not the same GPUs; set 1 and 1"),
        (
            {"rollout": {"max_length": 16, "tensor_parallel_size": 2, "gpus_per_engine": 2.0}},
            r"placement.workers=1 and 2 devices of engines \(rollout.engines=1 x 2\)",
        ),
        (
            {"grpo": {**GRPO, "kl": {"coefficient": 0.1, "engine": OFFLOADED}}},
            "keeps the weights in host memory already",
        ),
        ({"engine": OFFLOADED}, "keeps the weights in host memory already"),
        (
            {"engine": {"tensor_parallel": 2}, "placement": {"workers": 2}},
            "weights that workers share .engine.tensor_parallel. were not tested on devices that engines use too",
        ),
    ],
)
def test_devices_that_cannot_be_shared(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        RLConfig.model_validate({**COMMON, **settings, "hybrid": True})
    RLConfig.model_validate({**COMMON, **settings})


@pytest.mark.parametrize("kind", [{"dora": True}, {"modules_to_save": ("norm",)}], ids=str)
def test_adapters_that_vllm_cannot_serve_are_merged(kind: dict[str, Any]) -> None:
    lora = {"rank": 2, **kind}
    on_gpu = {"max_length": 16, "gpus_per_engine": 1.0}
    assert RLConfig.model_validate({**COMMON, "lora": {"rank": 2}, "rollout": on_gpu}).served_lora is not None
    assert RLConfig.model_validate({**COMMON, "lora": lora, "rollout": on_gpu}).served_lora is None
    with pytest.raises(
        ValidationError, match=rf"vLLM does not serve adapters with lora\.{next(iter(kind))}; set merged"
    ):
        RLConfig.model_validate({**COMMON, "lora": lora, "rollout": {**on_gpu, "serve_adapter": "adapter"}})


def test_a_base_that_may_not_be_quantised() -> None:
    quantised = {"rank": 2, "quantised": "nf4"}
    with pytest.raises(ValidationError, match="with hybrid the base would leave the device and return"):
        RLConfig.model_validate({**COMMON, "lora": quantised, "hybrid": True})
    critic = {"optimizer": {"learning_rate": 1e-3}, "lora": quantised}
    with pytest.raises(ValidationError, match=r"ppo\.critic\.lora\.quantised: only the policy's base is quantised"):
        RLConfig.model_validate({**COMMON, "algorithm": "ppo", "ppo": {**GRPO, "critic": critic}})


BROADCAST = {"max_length": 16, "transport": "collective"}


@pytest.mark.parametrize(
    ("settings", "rollout", "says"),
    [
        ({"hybrid": True}, {}, "with hybrid a rank and an engine share each device, .*; set ipc or folder"),
        (
            {"lora": {"rank": 2}},
            {"serve_adapter": "adapter", "tensor_parallel_size": 2, "cpus_per_engine": 2},
            "transport is collective, but the workers of an engine over several devices read an adapter from a folder",
        ),
        (
            {"placement": {"gpus_per_worker": 1.0}},
            {"gpus_per_engine": 0.5},
            r"placement.gpus_per_worker=1 and rollout.gpus_per_engine=0.5 processes share a GPU",
        ),
    ],
)
def test_weights_that_cannot_be_broadcast(settings: dict[str, Any], rollout: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        RLConfig.model_validate({**COMMON, **settings, "rollout": {**BROADCAST, **rollout}})
    RLConfig.model_validate({**COMMON, **settings, "rollout": {"max_length": 16, **rollout}})


@pytest.mark.parametrize("gpus", [(1.0, 1.0), (0.0, 1.0), (0.5, 0.5)])
def test_handles_of_gpus_need_hybrid(gpus: tuple[float, float]) -> None:
    placement, rollout = {"gpus_per_worker": gpus[0]}, {"max_length": 16, "gpus_per_engine": gpus[1]}
    by_handle = {**COMMON, "placement": placement, "rollout": {**rollout, "transport": "ipc"}}
    with pytest.raises(ValidationError, match="transport is ipc, but without hybrid no rank and engine are on one dev"):
        RLConfig.model_validate(by_handle)
    RLConfig.model_validate({**COMMON, "placement": placement, "rollout": rollout})


@pytest.mark.parametrize(("gpus", "cpus"), [(1.0, 4.0), (0.0, 4.0)])
def test_an_engine_may_be_on_the_devices_of_several_workers(gpus: float, cpus: float) -> None:
    placement = {"workers": 4, "gpus_per_worker": gpus, "cpus_per_worker": 0.5}
    rollout = {
        "max_length": 16,
        "engines": 2,
        "tensor_parallel_size": 2,
        "gpus_per_engine": 2 * gpus,
        "transport": "ipc",
    }
    config = RLConfig.model_validate(
        {**COMMON, "hybrid": True, "placement": placement, "rollout": {**rollout, "cpus_per_engine": cpus}}
    )
    assert (config.reserves().gpus, config.reserves().cpus) == (4 * gpus, 2 * (2 * 0.5 + cpus))
    assert (config.sending_ranks, config.receivers_per_engine) == (4, 2)


@pytest.mark.parametrize(("hybrid", "gpus", "senders"), [(True, 1.0, 2), (True, 0.0, 2), (False, 0.0, 1)])
def test_of_ranks_that_share_devices_each_sends_to_its_engine(hybrid: bool, gpus: float, senders: int) -> None:
    placement = {"workers": 2, "gpus_per_worker": gpus}
    rollout = {"max_length": 16, "engines": 2, "gpus_per_engine": gpus, "transport": "ipc"}
    config = RLConfig.model_validate({**COMMON, "hybrid": hybrid, "placement": placement, "rollout": rollout})
    assert (config.sending_ranks, config.publishes_on_gpus) == (senders, gpus == 1.0)


@pytest.mark.parametrize(
    ("gpus", "on_gpus"), [((0.0, 0.0), False), ((1.0, 0.0), False), ((0.0, 1.0), False), ((1.0, 1.0), True)]
)
def test_a_broadcast_is_over_nccl_where_both_sides_have_gpus(gpus: tuple[float, float], on_gpus: bool) -> None:
    rollout = {**BROADCAST, "gpus_per_engine": gpus[1]}
    config = RLConfig.model_validate({**COMMON, "placement": {"gpus_per_worker": gpus[0]}, "rollout": rollout})
    assert config.publishes_on_gpus == on_gpus
    by_folder = RLConfig.model_validate({**COMMON, "rollout": {"max_length": 16}})
    assert result_settings(config) == result_settings(by_folder)  # the same keys of artifacts


@pytest.mark.parametrize(
    ("validation", "says"),
    [
        ({"metric": "pass@4"}, "`pass@4`; these settings measure mean_score, pass@1, other/mean_score, other/pass@1"),
        ({"metric": "pass@4", "samples": 2}, "mean_score, pass@1, pass@2, sampled_mean_score, sampled_pass@1, other/"),
        ({"metric": "third/pass@1"}, "metric is `third/pass@1`"),
        ({"sampling": {"max_tokens": 16}}, r"validation.sampling.max_tokens leaves no room for a prompt"),
        ({"also": {"far": {**SET, "sampling": {"max_tokens": 16}}}},
         r"validation.also.far.sampling.max_tokens leaves no room"),
        ({"also": {"far": SET}, "metric": "far/pass@4"}, r"other/pass@1, far/mean_score, far/pass@1 \["),
        ({"also": {"other": SET}}, "validation.also.other has the name of a scorer of validation"),
        ({"also": {"a/b": SET}}, "validation.also: `a/b` is not a name of letters"),
        ({"also": {"far": {**SET, "scorers": {}}}}, "also.far.scorers"),
        ({"scorers": {"far/x": {"type": "verifier"}}}, "'far/x' is not the name of a reward"),
    ],
)  # fmt: skip
def test_what_cannot_be_validated(validation: dict[str, Any], says: str) -> None:
    scorers = {"exact": {"type": "verifier"}, "other": {"type": "verifier"}}
    common = {"dataset": "held", "every_steps": 2, "scorers": scorers}
    with pytest.raises(ValidationError, match=f"(?s){says}"):
        RLConfig.model_validate({**COMMON, "validation": {**common, **validation}})
    config = RLConfig.model_validate({**COMMON, "validation": {**common, "samples": 4, "metric": "other/pass@4"}})
    assert config.keeps_best


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        (
            {"top_p": 0.9},
            "sampling.top_p: RL stores the tokens .* top_k bounds them: set sampling.top_k, from 1 to 1024",
        ),
        ({"min_p": 0.1}, "sampling.min_p: RL stores the tokens that were kept at each position"),
        ({"top_k": 1025}, "sampling.top_k: RL stores the tokens that were kept"),
        ({"top_k": 1}, "sampling.top_k is 1: rollouts of one prompt are all the same"),
        ({"temperature": 0.0}, r"greedy rollouts of one prompt are all the same"),
        ({"temperature": 0.009}, r"temperature is 0.009, but the engines sample at 0.01 to 2; for greedy completions"),
        ({"temperature": 2.5}, r"it must be from 0 to 2: the engines sample at 0.01 to 2"),
    ],
)
def test_rollouts_that_would_have_other_log_probs_than_the_trainers(sampling: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        RLConfig.model_validate({**COMMON, "sampling": {"max_tokens": 4, **sampling}})
    RLConfig.model_validate({**COMMON, "sampling": {"max_tokens": 4, "top_k": 1024, "top_p": 0.9, "min_p": 0.1}})


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.1}, {"temperature": 0.0}], ids=str)
def test_what_trains_nothing_may_be_sampled_in_any_way(cut: dict[str, float]) -> None:
    validation = {
        "dataset": "held", "every_steps": 2, "scorers": {"exact": {"type": "verifier"}},
        "sampling": {"max_tokens": 4, **cut},
    }  # fmt: skip
    RLConfig.model_validate({**COMMON, "validation": validation})


@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_an_average_of_all_or_nothing_is_refused(decay: float) -> None:
    with pytest.raises(ValidationError, match="ema_decay"):
        RLConfig.model_validate({**COMMON, "ema_decay": decay})


def test_whether_devices_are_shared_has_no_say_in_the_result() -> None:
    shared, own = (RLConfig.model_validate({**COMMON, "hybrid": hybrid}) for hybrid in (True, False))
    assert result_settings(shared) == result_settings(own)


def ppo(
    critic: dict[str, Any] | None = None,
    kl: dict[str, Any] | None = None,
    rewards: dict[str, Any] | None = None,
    **settings: Any,
) -> RLConfig:
    critic = {"optimizer": {"learning_rate": 1e-3}, **(critic or {})}
    rewards = rewards or {"taste": {"type": "reward_model", "model": "judge"}}
    block = {**GRPO, "rewards": rewards, "critic": critic, "kl": kl or {}}
    return RLConfig.model_validate({**COMMON, "algorithm": "ppo", "ppo": block, **settings})


def test_every_validation_set_has_its_own_input_scorers_and_room() -> None:
    far = {**SET, "sampling": {"max_tokens": 8}}
    validation = {"dataset": "held", "every_steps": 1, "scorers": SET["scorers"], "also": {"far": far, "near": SET}}
    config = RLConfig.model_validate({**COMMON, "validation": validation})
    places = ["validation", "validation.also.far", "validation.also.near"]
    held_out = {found.path: found.names for found in input_settings(config) if found.reads.held_out}
    assert held_out == dict(zip([f"{place}.dataset" for place in places], [("held",), ("far",), ("far",)], strict=True))
    judged = [(one.setting, one.dataset) for one in config.judges()]
    assert judged[2:] == [(f"{place}.scorers.exact", f"{place}.dataset") for place in places]
    limits = [config.row_limit(f"{place}.dataset") for place in places]
    assert [(limit.room, limit.completion_setting) for limit in limits if limit is not None] == [
        (12, "sampling.max_tokens"), (8, "validation.also.far.sampling.max_tokens"), (12, "sampling.max_tokens"),
    ]  # fmt: skip


def test_a_validation_without_further_sets_keeps_its_key() -> None:
    validation = {"dataset": "held", "every_steps": 1, "scorers": SET["scorers"]}
    config = RLConfig.model_validate({**COMMON, "validation": validation})
    assert "also" not in result_settings(config)["validation"]
    more = RLConfig.model_validate({**COMMON, "validation": {**validation, "also": {"far": SET}}})
    assert result_settings(more)["validation"]["also"] == {
        "far": {name: value for name, value in result_settings(config)["validation"].items() if name in (
            "scorers", "samples", "sampling")}
    }  # fmt: skip


def test_models_and_datasets_are_named_inputs() -> None:
    validation = {"dataset": "held", "every_steps": 1, "scorers": {"right": {"type": "verifier"}}}
    config = ppo({"start": "sft"}, {"coefficient": 0.1, "reference": "base"}, model="sft-math", validation=validation)
    read = {found.path: (found.names, found.reads.roles, found.reads.optional) for found in input_settings(config)}
    assert read == {
        "model": (("sft-math",), ("model",), False),
        "dataset": (("p",), ("dataset",), False),
        "validation.dataset": (("held",), ("dataset",), False),
        "ppo.rewards.taste.model": (("judge",), ("reward_model",), False),
        "ppo.kl.reference": (("base",), ("model",), True),
        "ppo.critic.start": (("sft",), ("model", "reward_model"), True),
    }


def test_the_name_of_an_input_is_not_in_the_key_but_a_start_from_the_policy_is() -> None:
    named, other, policy, none = (
        result_settings(ppo({"start": start}))["ppo"]["critic"] for start in ("judge", "sft", "policy", None)
    )
    assert named == other == none
    assert policy == {**none, "start": "policy"}
    start = next(found for found in input_settings(ppo({"start": "policy"})) if found.path == "ppo.critic.start")
    assert start.names == ()


def test_a_reference_that_is_not_used_is_no_input() -> None:
    kl = {"coefficient": 0.0, "reference": "base", "engine": OFFLOADED}
    assert "ppo.kl.reference" not in [found.path for found in input_settings(ppo(kl=kl))]
    assert result_settings(ppo(kl=kl)) == result_settings(ppo(kl={"coefficient": 0.0}))


@pytest.mark.parametrize("setting", [{"offload": True}, {"engine": {"zero_stage": 3}}, {"placement": {}}])
def test_the_base_of_an_adapter_is_run_as_the_policy_is(setting: dict[str, Any]) -> None:
    kl = {"coefficient": 0.1, **setting}
    says = rf"ppo.kl.{next(iter(setting))}: with `lora` the reference is the policy's base with its adapter off"
    with pytest.raises(ValidationError, match=says):
        ppo(kl=kl, lora={"rank": 2})
    ppo(kl={**kl, "reference": "base"}, lora={"rank": 2})


PLACED = {"workers": 2, "cpus_per_worker": 0.5, "gpus_per_worker": 1.0}


def test_frozen_models_in_workers_of_their_own_are_counted_once() -> None:
    judge = {"type": "reward_model", "model": "judge", "placement": PLACED}
    rewards = {"a": judge, "b": judge, "c": {**judge, "model": "other"}, "d": {**judge, "placement": None}}
    grpo = {**GRPO, "rewards": rewards, "kl": {"coefficient": 0.1, "placement": PLACED}}
    placed = RLConfig.model_validate({**COMMON, "grpo": grpo})
    assert list(placed.own_placements) == ["reward:a", "reward:b", "reward:c", "reference"]
    assert (placed.reserves().cpus, placed.reserves().gpus) == (1 + 1 + 3 * 1, 3 * 2)
    unused = RLConfig.model_validate({**COMMON, "grpo": {**GRPO, "kl": {"placement": PLACED}}})
    assert unused.own_placements == {}, "a coefficient of 0 has no reference"


def test_where_a_model_is_has_no_say_in_the_result() -> None:
    placed, beside = (ppo(kl={"coefficient": 0.1, "placement": placement}) for placement in (PLACED, None))
    assert result_settings(placed) == result_settings(beside)
    judge = {"type": "reward_model", "model": "judge"}
    grouped = ppo({"placement": VALUES}, rewards={"a": {**judge, "placement": VALUES, "offload": True}})
    assert result_settings(grouped) == result_settings(ppo(rewards={"a": judge}))


VALUES = {**PLACED, "group": "values"}


def test_the_models_of_a_group_reserve_its_workers_once() -> None:
    judge = {"type": "reward_model", "model": "judge", "placement": VALUES}
    rewards = {"a": judge, "b": {**judge, "model": "other"}}
    grouped = ppo({"placement": VALUES}, rewards=rewards, kl={"coefficient": 0.1, "placement": PLACED})
    assert {name: (r.cpus, r.gpus) for name, r in grouped.reservations().items()} == {
        "policy": (1, 0), "engines": (1, 0), "group values": (1, 2), "reference": (1, 2),
    }  # fmt: skip
    assert (grouped.reserves().cpus, grouped.reserves().gpus) == (4, 4)
    assert [len(together) for together in grouped.held_models()] == [1, 3, 1]
    assert not ppo().reservations(), "one group is the whole"


@pytest.mark.parametrize(
    ("critic", "judge", "others", "problem"),
    [
        ({"placement": VALUES}, {"placement": {**VALUES, "workers": 1}}, {},
         r"ppo.critic.placement and ppo.rewards.a.placement are in one group, `values`, and differ in workers \(2 and "
         r"1\): the models of a group share its workers; set both alike"),
        ({"placement": VALUES}, {"placement": {**VALUES, "gpus_per_worker": 0}}, {},
         r"differ in gpus_per_worker \(1.0 and 0.0\)"),
        ({"placement": VALUES}, {"placement": VALUES, "engine": {"sequence_parallel": 2}}, {},
         "are in one group, `values`, and their engines have sequence_parallel=1 and 2; set both alike"),
        ({"placement": VALUES}, {"placement": VALUES, "engine": {"tensor_parallel": 2}}, {},
         "are in one group, `values`, and their engines have tensor_parallel=1 and 2; set both alike"),
        ({"placement": VALUES, "lora": {"rank": 2}}, {}, {}, "placement: the random values that the critic's adapter"),
        ({"placement": VALUES}, {}, {"dropout": True, "lora": {"rank": 2, "dropout": 0.1}},
         "ppo.critic.placement: with `dropout` the policy and the critic draw from one random generator"),
        ({}, {"placement": PLACED, "offload": True}, {}, "without `group` the reward model is alone on its devices"),
        ({}, {"placement": {**PLACED, "group": "a b"}}, {}, "the name of a group"),
    ],
)  # fmt: skip
def test_models_that_cannot_share_workers_are_refused(
    critic: dict[str, Any], judge: dict[str, Any], others: dict[str, Any], problem: str
) -> None:
    rewards = {"a": {"type": "reward_model", "model": "judge", **judge}}
    with pytest.raises(ValidationError, match=problem):
        ppo(critic, rewards=rewards, **others)


def test_a_judge_beside_models_that_train_is_refused_if_it_judges_meanwhile() -> None:
    judge = {"type": "reward_model", "model": "judge", "placement": VALUES}
    kl = {"coefficient": 0.1, "placement": VALUES}
    grpo = {**GRPO, "rewards": {"a": judge}, "kl": kl, "mismatch": None}
    settings = {**COMMON, "asynchronous": {"max_lag": 1}, "grpo": grpo}
    settings["rollout"] = {**COMMON["rollout"], "repeatable": False}
    with pytest.raises(ValidationError, match=r"asynchronous: grpo.rewards.a.placement.group has a reward model"):
        RLConfig.model_validate(settings)
    grpo["kl"] = {"coefficient": 0.1, "placement": PLACED}
    assert RLConfig.model_validate(settings)


@pytest.mark.parametrize(("name", "value"), [("dtype", "float32"), ("attention", "eager")])
def test_a_reference_that_rounds_otherwise_than_the_policy_is_refused(name: str, value: str) -> None:
    kl = {"coefficient": 0.1, "engine": {name: value}}
    with pytest.raises(ValidationError, match=rf"grpo\.kl\.engine\.{name} is {value}.*the policy to itself"):
        RLConfig.model_validate({**COMMON, "grpo": {**GRPO, "kl": kl}})
    assert RLConfig.model_validate({**COMMON, "grpo": {**GRPO, "kl": kl}, "engine": {name: value}})
    unused = {**kl, "coefficient": 0.0}
    assert RLConfig.model_validate({**COMMON, "grpo": {**GRPO, "kl": unused}})


def test_a_reference_alone_on_its_devices_makes_no_room() -> None:
    with pytest.raises(
        ValidationError, match="with a placement without `group` the reference is alone on its devices; remove one"
    ):
        ppo(kl={"coefficient": 0.1, "offload": True, "placement": PLACED})


def test_what_shares_no_device_may_offload_its_weights_beside_turns() -> None:
    kl = {"coefficient": 0.1, "engine": OFFLOADED, "placement": PLACED}
    assert RLConfig.model_validate({**COMMON, "grpo": {**GRPO, "kl": kl}, "hybrid": True}).reserves().gpus == 2


def test_a_critic_trains_in_an_engine_of_its_own() -> None:
    critic = {"optimizer": {"learning_rate": 1e-3, "name": "muon"}}
    with pytest.raises(ValidationError, match=r"muon does not work with engine\.offload_optimizer"):
        ppo({**critic, "engine": {"offload_optimizer": True}})
    with pytest.raises(ValidationError, match=r"muon does not work with engine\.offload_optimizer"):
        ppo(critic, engine={"offload_optimizer": True})
    assert ppo({**critic, "engine": {}}, engine={"offload_optimizer": True}).engine_of("critic").sharding == 2


def test_adapters_have_no_dropout_unless_updates_do() -> None:
    adapter = {"rank": 2, "dropout": 0.1}
    ppo = {**GRPO, "critic": {"optimizer": {"learning_rate": 1e-3}, "lora": adapter}}
    for name, settings in {
        r"lora\.dropout": {"lora": adapter},
        r"ppo\.critic\.lora\.dropout": {"algorithm": "ppo", "ppo": ppo},
    }.items():
        with pytest.raises(ValidationError, match=f"{name} is 0.1, but `dropout` is false.*`dropout: true`"):
            RLConfig.model_validate({**COMMON, **settings})
        assert RLConfig.model_validate({**COMMON, **settings, "dropout": True}).dropout


def test_an_algorithm_without_a_critic_takes_no_settings_of_one() -> None:
    critic = {"optimizer": {"learning_rate": 1e-3}}
    with pytest.raises(ValidationError, match=r"grpo\.critic\n  Extra inputs are not permitted"):
        RLConfig.model_validate({**COMMON, "grpo": {**GRPO, "critic": critic}})
    assert RLConfig.model_validate(COMMON).settings.critic_settings is None


RIGHT = {"right": {"type": "verifier"}}
LIKED = {"liked": {"type": "reward_model", "model": "judge"}}
LAGGING = {"asynchronous": {"max_lag": 2}, "rollout": {"max_length": 16, "repeatable": False}}
SELECT, REPLAY = {"select": {"pass_rate": (0.1, 0.9)}}, {"replay": {"share": 0.5}}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"select": {}}, r"pass_rate is \[0, 1\], which excludes no prompt: set bounds"),
        ({"select": {"pass_rate": (0.9, 0.1)}}, r"pass_rate is \[0.9, 0.1\]: the first must not be more"),
        ({"select": {"curriculum": {"start": (1.0, 0.0), "steps": 3}}}, r"start is \[1, 0\]: the first must not"),
        ({**SELECT, "grpo": {**GRPO, "rewards": LIKED}}, "select needs one reward that gives scores .* may: none"),
        (
            {**SELECT, "grpo": {**GRPO, "rewards": {**RIGHT, "also": RIGHT["right"]}}},
            "these may: right, also; remove the others, or name one as filtering.score",
        ),
        ({**REPLAY, "grpo": {**GRPO, "rewards": LIKED, "mismatch": None}}, "replay needs one reward that gives scores"),
        ({**SELECT, **LAGGING, "grpo": {**GRPO, "mismatch": None}}, "select: with asynchronous.max_lag=2 prompts are"),
        ({**REPLAY, **LAGGING, "grpo": {**GRPO, "mismatch": None}}, "replay: with asynchronous.max_lag=2 prompts are"),
        (REPLAY, "up to max_age=1 updates older .* give grpo.mismatch, such as .*, grpo.mismatch: null"),
        (
            {"replay": {"share": 0.3}, "grpo": {**GRPO, "mismatch": None}},
            "replay.share=0.3 of prompts_per_step=2 is less than one prompt",
        ),
        ({"replay": {"share": 1.0}}, "it must be at least 0 and less than 1: nothing would be left"),
        ({"replay": {"share": 0.5, "max_age": 0}}, "it must be from 1 to 100: nothing would be replayed"),
        (
            {**REPLAY, "grpo": {**GRPO, "mismatch": None}, "ema_decay": 0.9, "validation": {**SET, "every_steps": 1}},
            "replay: a validation of the moving average .ema_decay. is a publish of its own",
        ),
    ],
)
def test_prompts_that_cannot_be_chosen_by_difficulty(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=f"(?s){says}"):
        RLConfig.model_validate({**COMMON, **settings})


def test_the_score_that_filters_also_selects() -> None:
    block = {**GRPO, "rewards": {**RIGHT, "also": RIGHT["right"]}, "filtering": {"score": "also"}}
    assert scored_reward(RLConfig.model_validate({**COMMON, **SELECT, "grpo": block}), "select") == "also"


def test_a_run_without_a_choice_of_prompts_keeps_its_key() -> None:
    settings = result_settings(RLConfig.model_validate(COMMON))
    assert not {"select", "replay"} & settings.keys()
    config = RLConfig.model_validate({**COMMON, "select": {"pass_rate": (0.1, 0.9), "rates": ("a", "b")}})
    assert result_settings(config)["select"] == {
        "pass_rate": [0.1, 0.9], "curriculum": None, "forget_after": None, "when_none": "nearest",
    }  # fmt: skip
    (rates,) = (each for each in input_settings(config) if each.path == "select.rates")
    assert (rates.input_names, rates.reads.roles) == (["select.rates.a", "select.rates.b"], ("dataset", "model"))
