"""Translation of verl: a shell script with overrides of main_ppo, or a YAML file of its settings.

Names and defaults are those of verl 0.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deployments.translation.settings import (
    ALWAYS,
    CONSTANT,
    SIZES,
    Expression,
    Given,
    Origin,
    Setting,
    Translation,
    UntranslatableError,
    number_of_epochs,
    one_of,
    optimizer,
    place_of,
    put,
    recipe_name,
    rl_steps,
    schedule,
    set_seed,
)
from deployments.translation.shell import LAUNCHED, command_line, is_computed, launcher
from rlhf_core.errors import RecipeError
from rlhf_core.system.yaml_text import YAMLTextError, read_yaml

_MODULES = ("verl.trainer.main_ppo",)
_ACTOR, _ROLLOUT, _MODEL, _REF = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model", "ref"))

_REASONS = {
    **dict.fromkeys((f"{_MODEL}.use_remove_padding", "data.return_raw_chat", f"{_ROLLOUT}.calculate_log_probs",
                     f"{_ROLLOUT}.name", f"{_ROLLOUT}.mode", "trainer.balance_batch", "trainer.use_legacy_worker_impl",
                     f"{_ACTOR}.strategy",  f"{_ROLLOUT}.load_format"), ALWAYS),
    **dict.fromkeys((f"{_ACTOR}.ppo_micro_batch_size_per_gpu", f"{_ACTOR}.ppo_micro_batch_size",
                     f"{_ACTOR}.use_dynamic_bsz", f"{_ACTOR}.ppo_max_token_len_per_gpu",
                     f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu", f"{_REF}.log_prob_micro_batch_size_per_gpu",
                     "critic.ppo_micro_batch_size_per_gpu", f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",
                     f"{_REF}.log_prob_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu"), SIZES),
    **dict.fromkeys(("trainer.logger", "trainer.project_name", "trainer.experiment_name",
                     "trainer.log_val_generations"), "trackers are in `tracking`"),
    **dict.fromkeys(("trainer.save_freq", "trainer.resume_mode", "trainer.default_local_dir",
                     "trainer.max_actor_ckpt_to_keep"),
                    "checkpoints are by time, results are in the store, and a run resumes by itself: `checkpoint`"),
    **dict.fromkeys(("data.val_files", "trainer.test_freq", "trainer.val_before_train", "data.val_batch_size",
                     f"{_ROLLOUT}.val_kwargs."), "a held-out set is in `rl.validation`, or in the stage `evaluation`"),
    "algorithm.rollout_correction.": "see `mismatch`, whose corrections are others",
    f"{_ROLLOUT}.multi_turn.": "episodes are in `rl.environment`",
    f"{_ROLLOUT}.agent.": "episodes are in `rl.environment`",
    "reward.reward_manager.": "what it adds to the rewards is in `shaping`",
    **dict.fromkeys(("reward.reward_model.", "reward_model."), "a reward model is a stage `reward_model`"),
    **dict.fromkeys(("reward_model.reward_manager", "reward_model.reward_kwargs.", "reward.reward_kwargs."),
                    "what it adds to the rewards is in `shaping`"),
    "trainer.critic_warmup": "there is no critic",
    "launcher": LAUNCHED,
    "critic.model.path": "the critic begins as the policy: `critic.start` names a stage",
    f"{_REF}.fsdp_config.": "see `kl.engine` and `kl.offload`",
}  # fmt: skip


def _beside_top_k(value: Any) -> Any:
    if value == 1:
        raise UntranslatableError(ALWAYS)
    raise UntranslatableError("set it in the recipe beside sampling.top_k, which bounds the tokens that RL stores")


def _top_k(value: Any) -> int:
    if value in (-1, 0):
        raise UntranslatableError(ALWAYS)
    return int(value)


def _optimizer(prefix: str, rate: float) -> dict[str, Setting]:
    return {
        f"{prefix}.lr": Setting("optimizer.learning_rate", rate, float),
        f"{prefix}.optimizer": Setting("optimizer.name", None, one_of({"adamw": "adamw"})),
        f"{prefix}.weight_decay": Setting("optimizer.weight_decay", 0.01, float),
        f"{prefix}.clip_grad": Setting("optimizer.max_gradient_norm", 1.0, float),
        f"{prefix}.lr_scheduler_type": Setting("optimizer.schedule", "constant", schedule),
    }


_RL = {
    "data.train_batch_size": Setting("prompts_per_step", 1024),
    "data.max_response_length": Setting("sampling.max_tokens", 512),
    f"{_ROLLOUT}.temperature": Setting("sampling.temperature", 1.0, float),
    f"{_ROLLOUT}.top_p": Setting("sampling.top_p", None, _beside_top_k),
    f"{_ROLLOUT}.top_k": Setting("sampling.top_k", None, _top_k),
    f"{_ROLLOUT}.gpu_memory_utilization": Setting("rollout.memory_share"),
    f"{_ROLLOUT}.max_num_seqs": Setting("rollout.max_sequences"),
    f"{_ROLLOUT}.enable_prefix_caching": Setting("rollout.prefix_caching"),
    f"{_ROLLOUT}.enforce_eager": Setting("rollout.compiled", None, lambda eager: not eager),
    f"{_MODEL}.enable_gradient_checkpointing": Setting("engine.gradient_checkpointing"),
    f"{_ACTOR}.fsdp_config.optimizer_offload": Setting("engine.offload_optimizer"),
    f"{_ACTOR}.ulysses_sequence_parallel_size": Setting("engine.sequence_parallel"),
    f"{_ACTOR}.freeze_vision_tower": Setting("engine.freeze_vision"),
}
_POLICY = {
    **_optimizer(f"{_ACTOR}.optim", 1e-6),
    f"{_ROLLOUT}.n": Setting("group_size", 1),
    f"{_ACTOR}.ppo_epochs": Setting("epochs", 1, number_of_epochs),
    f"{_ACTOR}.clip_ratio_c": Setting("dual_clip", 3.0, float),
    f"{_ACTOR}.entropy_coeff": Setting("entropy_coefficient", None, float),
    f"{_ACTOR}.loss_agg_mode": Setting(
        "aggregation", "token-mean",
        one_of({"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum-norm": "constant"}),
    ),
    f"{_ACTOR}.loss_scale_factor": Setting("aggregation_length"),
}  # fmt: skip
_CRITIC = {
    **_optimizer("critic.optim", 1e-5),
    "critic.cliprange_value": Setting("value_clip", 0.5, float),
    "trainer.critic_warmup": Setting("warmup_steps"),
}
_KL = {
    "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "k3+": "k3", "k2+": "k2",
}  # fmt: skip
_LORA = {
    f"{_MODEL}.lora_alpha": Setting("lora.alpha", 16.0, float),
    f"{_MODEL}.target_modules": Setting("lora.target_modules"),
}
_ALGORITHMS = {
    "gae": "ppo", "grpo": "grpo", "reinforce_plus_plus": "reinforce++", "rloo": "rloo", "gdpo": "gdpo",
    "reinforce_plus_plus_baseline": "reinforce++-baseline",
}  # fmt: skip
_BLOCKS = {"reinforce++": "reinforce_plus_plus", "reinforce++-baseline": "reinforce_plus_plus_baseline"}
_LOSSES = {
    "vanilla": None, "gspo": "gspo", "cispo": "cispo", "sapo": "sapo", "geo_mean": "gmpo", "dppo_tv": "dppo",
}  # fmt: skip


def translate(origin: Origin) -> Translation:
    """Translate a script (.sh) or a YAML file. Raises RecipeError for one that cannot be parsed."""
    given = Given(_of_yaml(origin) if origin.file.suffix in (".yaml", ".yml") else _of_script(origin), _REASONS)
    result = Translation({"name": recipe_name(origin.file)}, given.take(f"{_MODEL}.path"))
    set_seed(result.recipe, given, "data.seed")
    estimator = given.take("algorithm.adv_estimator", "gae")
    loss = given.take(f"{_ACTOR}.policy_loss.loss_mode", "vanilla")
    if estimator not in _ALGORITHMS or loss not in _LOSSES:
        raise RecipeError(f"algorithm.adv_estimator {estimator} with the loss {loss} has no counterpart here")
    if loss != "vanilla" and estimator != "grpo":
        raise RecipeError(f"algorithm.adv_estimator {estimator} with the loss {loss} has no counterpart here, where it "
                          "compares the completions of a prompt: set algorithm.adv_estimator=grpo")  # fmt: skip
    algorithm = _LOSSES[loss] or _ALGORITHMS[estimator]
    rl: dict[str, Any] = {"dataset": "train", "algorithm": algorithm}
    given.fill(rl, _RL)
    _adapter(rl, given)
    _devices(rl, given)
    put(rl, "rollout.max_length", given.take("data.max_prompt_length", 512) + rl["sampling"]["max_tokens"])
    given.take(f"{_ROLLOUT}.max_model_len")
    given.leave(f"{_ROLLOUT}.max_model_len", "rollout.max_length is data.max_prompt_length + data.max_response_length")
    block = _block(algorithm, given, _reward(given, origin, result))
    _overlong(block, given, rl["sampling"]["max_tokens"])
    if algorithm == "dppo":
        result.assumed.append(
            "the ratio of dppo is to the engine's probability, as there with algorithm.rollout_correction.bypass_mode"
        )
    prompts, minibatch = rl["prompts_per_step"], given.take(f"{_ACTOR}.ppo_mini_batch_size", 256)
    if prompts % minibatch:
        raise RecipeError(f"ppo_mini_batch_size {minibatch} does not divide data.train_batch_size {prompts}")
    block["minibatches"] = prompts // minibatch
    data = _data(given, origin)
    if block["rewards"]["reward"]["type"] == "verifier":
        put(data, "columns.answer", "reward_model.ground_truth")
    _steps(rl, given, origin.rows(data["source"]), result)
    for each, prefix in (
        (block, f"{_ACTOR}.optim"),
        *([(block["critic"], "critic.optim")] if "critic" in block else []),
    ):
        _finish_optimizer(each, given, prefix, rl["steps"] * block["minibatches"] * block["epochs"])
    rl[_BLOCKS.get(algorithm, algorithm)] = block
    result.recipe |= {"data": {"train": data}, "rl": rl}
    result.untranslated = given.untranslated()
    return result


def _of_script(origin: Origin) -> dict[str, Any]:
    _, words, before = command_line(origin, _MODULES)
    values: dict[str, Any] = {}
    for index, word in enumerate(words):
        name, equals, text = word.lstrip("+~").partition("=")
        if not equals or name.startswith("-"):
            values[f"argument {index + 1}"] = word
        elif is_computed(text):
            values[name] = Expression(text)
        else:
            values[name] = _read(text)
    return values | launcher(before)


def _read(text: str) -> Any:
    """Return the value of an override."""
    try:
        return _number(read_yaml(text))
    except YAMLTextError:
        return text


def _number(value: Any) -> Any:
    """Return a number that YAML 1.2 reads as text, such as 1e-6."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(value, value)


def _of_yaml(origin: Origin) -> dict[str, Any]:
    try:
        values = read_yaml(origin.read())
    except YAMLTextError as error:
        raise RecipeError(f"{origin.file}: {error}") from error
    if not isinstance(values, Mapping) or not {"actor_rollout_ref", "algorithm", "data"} & values.keys():
        raise RecipeError(f"{origin.file}: it has none of actor_rollout_ref, algorithm and data, so it is not verl's")
    return dict(_flat(values, ""))


def _flat(values: Mapping[Any, Any], prefix: str) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            pairs += _flat(value, f"{path}.")
        elif isinstance(value, str) and "${" in value:
            pairs.append((path, Expression(value)))
        else:
            pairs.append((path, _number(value)))
    return pairs


def _adapter(rl: dict[str, Any], given: Given) -> None:
    if rank := given.take(f"{_MODEL}.lora_rank", 0):
        put(rl, "lora.rank", rank)
        given.fill(rl, _LORA)


def _devices(rl: dict[str, Any], given: Given) -> None:
    """Set GPUs, which workers and engines share in verl, if the file has them."""
    parallel = given.take(f"{_ROLLOUT}.tensor_model_parallel_size", 1)
    if "trainer.n_gpus_per_node" not in given:
        given.leave(f"{_ROLLOUT}.tensor_model_parallel_size", "GPUs are not set: see rollout.tensor_parallel_size")
        return
    gpus = given.take("trainer.n_gpus_per_node") * given.take("trainer.nnodes", 1)
    if gpus % parallel:
        raise RecipeError(f"tensor_model_parallel_size {parallel} does not divide the {gpus} GPUs")
    rl["placement"] = {"workers": gpus, "gpus_per_worker": 1}
    rl["hybrid"] = True
    rl.setdefault("rollout", {}).update(
        engines=gpus // parallel, tensor_parallel_size=parallel, gpus_per_engine=parallel
    )


def _block(algorithm: str, given: Given, reward: Mapping[str, Any]) -> dict[str, Any]:
    block: dict[str, Any] = {"rewards": {"reward": dict(reward)}}
    given.fill(block, _POLICY)
    both = given.take(f"{_ACTOR}.clip_ratio", 0.2)
    block["clip_low"] = given.take(f"{_ACTOR}.clip_ratio_low", both)
    block["clip_high"] = given.take(f"{_ACTOR}.clip_ratio_high", both)
    if algorithm in _LOSSES.values():
        bound = block.pop("dual_clip")
        if algorithm == "dppo":
            block["max_ratio"] = bound
        else:
            given.leave(f"{_ACTOR}.clip_ratio_c", f"{algorithm} has none")
    if algorithm in ("gspo", "gmpo", "sapo"):
        block["aggregation"] = "sequence"
        given.leave(f"{_ACTOR}.loss_agg_mode", f"{algorithm} is a mean of completions")
    if algorithm == "sapo":
        del block["clip_low"], block["clip_high"]
        for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
            given.leave(f"{_ACTOR}.{name}", "sapo has none")
        block["temperature_positive"] = given.take(f"{_ACTOR}.tau_pos", 1.0)
        block["temperature_negative"] = given.take(f"{_ACTOR}.tau_neg", 1.05)
    _kl(block, given)
    level = given.take("algorithm.rollout_correction.rollout_is")
    if algorithm == "dppo":
        given.leave("algorithm.rollout_correction.rollout_is", "the ratio of dppo is to the engine's probability")
    elif level is not None:
        high = float(given.take("algorithm.rollout_correction.rollout_is_threshold", 2.0))
        block["mismatch"] = {"correction": "truncate", "ratio_of": level, "low": 0.0, "high": high}
    if given.take("algorithm.filter_groups.enable"):
        block["filtering"] = {}
        if rounds := given.take("algorithm.filter_groups.max_num_gen_batches", 0):
            block["filtering"]["max_rounds"] = rounds
    if algorithm == "ppo":
        block["gae_lambda"] = given.take("algorithm.lam", 1.0)
        block["critic"] = {}
        given.fill(block["critic"], _CRITIC)
    if algorithm in ("ppo", "reinforce++"):
        block["gamma"] = given.take("algorithm.gamma", 1.0)
    if algorithm in ("grpo", "gdpo", *_LOSSES.values()):
        block["divide_by_deviation"] = given.take("algorithm.norm_adv_by_std_in_grpo", True)
    return block


def _kl(block: dict[str, Any], given: Given) -> None:
    in_reward, in_loss = given.take("algorithm.use_kl_in_reward"), given.take(f"{_ACTOR}.use_kl_loss")
    if in_reward and in_loss:
        raise RecipeError("use_kl_in_reward and use_kl_loss are both true, and here the KL has one place: set one")
    names = ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
    if in_loss:
        names = (f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type")
    elif not in_reward:
        for name in (*names, f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type"):
            given.take(name)
            given.leave(name, "no KL is used: use_kl_loss and use_kl_in_reward are false")
        block["kl"] = {"coefficient": 0.0}
        return
    table = {
        names[0]: Setting("kl.coefficient", 0.001, float),
        names[1]: Setting("kl.estimator", "low_var_kl" if in_loss else "kl", one_of(_KL)),
    }
    given.fill(block, table)
    if given.take("algorithm.kl_ctrl.type", "fixed") != "fixed":
        given.leave("algorithm.kl_ctrl.type", "see kl.target and kl.horizon")
    block["kl"]["place"] = "loss" if in_loss else "reward"


def _overlong(block: dict[str, Any], given: Given, max_tokens: int) -> None:
    """Set the penalty of long completions, which verl's manager `dapo` adds."""
    places = ("reward.reward_kwargs", "reward_model.reward_kwargs", "reward_model")
    for place in places:
        for prefix in (f"{place}.overlong_buffer_cfg", f"{place}.overlong_buffer"):
            if not given.take(f"{prefix}.enable"):
                continue
            buffer, factor = given.take(f"{prefix}.len"), given.take(f"{prefix}.penalty_factor", 1.0)
            given.take(f"{prefix}.log")
            if (longest := given.take(f"{place}.max_resp_len", max_tokens)) != max_tokens:
                raise RecipeError(
                    f"{place}.max_resp_len is {longest}, and the penalty of long completions ends at "
                    f"data.max_response_length here, {max_tokens}"
                )
            put(block, "shaping.overlong", {"buffer": int(buffer), "penalty": float(factor)})


def _reward(given: Given, origin: Origin, result: Translation) -> dict[str, Any]:
    prefix = "reward.custom_reward_function"
    if f"{prefix}.path" not in given:
        prefix = "custom_reward_function"  # before 0.8
    path = given.take(f"{prefix}.path")
    if path is None and (model := _reward_model(given)) is not None:
        return result.reward_model(model)
    if path is None:
        result.assumed.append(
            "the reward: verl has scores for some data sets by name; here it is 1 for an answer that equals "
            "reward_model.ground_truth as mathematics, else 0"
        )
        return {"type": "verifier", "kind": "math"}
    file = origin.local(path)
    reward = {"type": "function", "path": path if file is None else place_of(file, origin.folder), "form": "verl"}
    reward["function"] = given.take(f"{prefix}.name", "compute_score")
    options = {name: given.take(name) for name in given.names(f"{prefix}.reward_kwargs.")}
    return reward | (
        {"options": {name.rpartition(".")[2]: value for name, value in options.items()}} if options else {}
    )


def _reward_model(given: Given) -> str | None:
    """Return the model that gives the rewards, if one is enabled."""
    of_now = given.take("reward.reward_model.enable"), given.take("reward.reward_model.model_path")
    of_before = given.take("reward_model.enable"), given.take("reward_model.model.path")  # before 0.8
    return next((path for enabled, path in (of_now, of_before) if enabled and path is not None), None)


def _data(given: Given, origin: Origin) -> dict[str, Any]:
    files = given.take("data.train_files")
    if files is None:
        raise RecipeError(f"{origin.file}: it has no data.train_files, so there is nothing to train on")
    data: dict[str, Any] = {"format": "prompts", "source": origin.source(files)}
    if (prompt := given.take("data.prompt_key", "prompt")) != "prompt":
        data["columns"] = {"prompt": prompt}
    if (most := given.take("data.train_max_samples", -1)) > 0:
        data["limit"] = most
    if not given.take("data.shuffle", True):
        data["shuffle"] = False
    if given.take("data.filter_overlong_prompts", False):
        data["on_long_row"] = "drop"
    if given.take("data.truncation", "error") != "error":
        given.leave("data.truncation", "a prompt is not cut: a long one is an error, or dropped by on_long_row")
    return data


def _steps(rl: dict[str, Any], given: Given, rows: int | None, result: Translation) -> None:
    steps, epochs = given.take("trainer.total_training_steps"), given.take("trainer.total_epochs", 30)
    rl["steps"] = steps or rl_steps(epochs, rows, rl["prompts_per_step"], "trainer.total_epochs", result.assumed)


def _finish_optimizer(block: dict[str, Any], given: Given, prefix: str, steps: int) -> None:
    betas = given.take(f"{prefix}.betas", (0.9, 0.999))
    optimizer(block, betas, given.take(f"{prefix}.min_lr_ratio", 0.0))
    if block["optimizer"]["schedule"] == "constant":
        given.leave(f"{prefix}.min_lr_ratio", CONSTANT)
    warmup = given.take(f"{prefix}.lr_warmup_steps", -1)
    share = given.take(f"{prefix}.lr_warmup_steps_ratio", 0.0)
    block["optimizer"]["warmup_share"] = round(min(1.0, warmup / steps), 6) if warmup > 0 else share
