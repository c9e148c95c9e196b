"""Translation of OpenRLHF: a shell script with a command of train_ppo_ray, train_sft, train_dpo or train_rm.

Names and defaults are those of OpenRLHF 0.11.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deployments.translation.settings import (
    ALWAYS,
    CONSTANT,
    SIZES,
    Given,
    Origin,
    Setting,
    Translation,
    number_of_epochs,
    one_of,
    place_of,
    put,
    recipe_name,
    rl_steps,
    schedule,
    set_seed,
)
from deployments.translation.shell import LAUNCHED, command_line, launcher, value_or_expression
from rlhf_core.errors import RecipeError

_MODULES = tuple(f"openrlhf.cli.{name}" for name in ("train_ppo_ray", "train_sft", "train_dpo", "train_rm"))
_ANSWER_TOKENS = 1024  # where the script sets no max_new_tokens; at most half of max_len
_TURNS = 16  # of an agent, which has no limit there

_REASONS = {
    **dict.fromkeys(("ds.packing_samples", "data.apply_chat_template", "data.multiturn"), ALWAYS),
    **dict.fromkeys(("train.micro_batch_size", "rollout.micro_batch_size", "train.dynamic_batch_enable",
                     "train.max_tokens_per_gpu", "rollout.max_tokens_per_gpu"), SIZES),
    **dict.fromkeys(("ref.", "reward.num_nodes", "reward.num_gpus_per_node", "critic.num_nodes",
                     "critic.num_gpus_per_node", "train.colocate_all", "train.colocate_actor_ref",
                     "train.colocate_critic_reward", "vllm.enable_sleep", "ds.enable_sleep"),
                    "who shares devices is in `hybrid` and in each model's `placement`"),
    "launcher": LAUNCHED,
    "vllm.sync_backend": "see rollout.transport",
    "vllm.sync_with_ray": "see rollout.transport",
    "ckpt.": "checkpoints are by time, results are in the store, and a run resumes by itself: `checkpoint`",
    "logger.": "trackers are in `tracking`",
    "eval.": "a held-out set is in `validation`, or in the stage `evaluation`",
    "train.async_enable": "see `rl.asynchronous`, which also needs `mismatch`",
    "train.async_queue_size": "see `rl.asynchronous`",
    "train.partial_rollout_enable": "see `rl.asynchronous.publish`",
    **dict.fromkeys((f"algo.advantage.is_correction_{name}" for name in ("level", "mode", "gating", "threshold")),
                    "see `mismatch`, which corrects by the ratio of tokens or of completions"),
    "data.input_template": "a conversation is rendered by the model's chat template",
    "data.prompt_probs": "several sources with weights are a data set's `mix`",
    "data.dataset_probs": "several sources with weights are a data set's `mix`",
}  # fmt: skip


def _warmed(ours: str) -> dict[str, Setting]:
    """Return the settings of an optimizer without those of its name, which has a prefix in RL."""
    return {
        "optim": Setting(f"{ours}.name", None, one_of({"adam": "adamw"})),
        "adam.betas": Setting(f"{ours}.betas", [0.9, 0.95]),
        "adam.eps": Setting(f"{ours}.epsilon", 1e-8),
        "adam.weight_decay": Setting(f"{ours}.weight_decay", 0.0),
        "lr_scheduler": Setting(f"{ours}.schedule", "cosine_with_min_lr", schedule),
        "lr_warmup_ratio": Setting(f"{ours}.warmup_share", 0.03),
        "min_lr_ratio": Setting(f"{ours}.final_learning_rate_share", 0.1),
        "max_norm": Setting(f"{ours}.max_gradient_norm", 1.0, lambda norm: norm or None),
    }


def _clip(value: Any) -> list[float]:
    return [float(each) for each in value]


def _targets(value: Any) -> Any:
    return value if value == "all-linear" or isinstance(value, list) else [value]


_ENGINE = {
    "ds.param_dtype": Setting("engine.dtype", "bf16", one_of({"bf16": "bfloat16"})),
    "ds.zero_stage": Setting("engine.zero_stage", 2),
    "ds.adam_offload": Setting("engine.offload_optimizer"),
    "ds.overlap_comm": Setting("engine.overlap_comm"),
    "ds.tensor_parallel_size": Setting("engine.tensor_parallel"),
    "ds.ring_attn_size": Setting("engine.sequence_parallel"),
    "ds.attn_implementation": Setting("engine.attention", None, one_of({"sdpa": "sdpa", "eager": "eager"})),
}
_LORA = {
    "ds.lora.alpha": Setting("lora.alpha", 16.0, float),
    "ds.lora.dropout": Setting("lora.dropout", None, lambda share: float(share) or None),
    "ds.lora.target_modules": Setting("lora.target_modules", None, _targets),
    "ds.load_in_4bit": Setting("lora.quantised", None, one_of({True: "nf4"})),
}
_SUPERVISED = {
    **_ENGINE,
    **_warmed("optimizer"),
    "train.batch_size": Setting("batch_size", 128),
    "model.gradient_checkpointing_enable": Setting("engine.gradient_checkpointing"),
    "model.aux_loss_coef": Setting("moe_coefficient"),
    "logger.logging_steps": Setting("log_every"),
}
_RL = {
    **_ENGINE,
    "actor.gradient_checkpointing_enable": Setting("engine.gradient_checkpointing"),
    "rollout.batch_size": Setting("prompts_per_step", 1024),
    "data.max_len": Setting("rollout.max_length", 2048),
    "rollout.temperature": Setting("sampling.temperature", 1.0),
    "vllm.num_engines": Setting("rollout.engines"),
    "vllm.tensor_parallel_size": Setting("rollout.tensor_parallel_size"),
    "vllm.gpu_memory_utilization": Setting("rollout.memory_share"),
    "vllm.enable_prefix_caching": Setting("rollout.prefix_caching"),
    "vllm.enforce_eager": Setting("rollout.compiled", None, lambda eager: not eager),
    "train.ema_beta": Setting("ema_decay"),
}
_POLICY = {
    **{f"actor.{name}": setting for name, setting in _warmed("optimizer").items()},
    "actor.adam.lr": Setting("optimizer.learning_rate", 1e-6),
    "rollout.n_samples_per_prompt": Setting("group_size", 1),
    "train.max_epochs": Setting("epochs", 1, number_of_epochs),
    "actor.dual_clip": Setting("dual_clip"),
    "actor.loss_agg_mode": Setting(
        "aggregation", "token-mean", one_of({"token-mean": "token", "seq-mean-token-mean": "sequence"})
    ),
    "actor.entropy_coef": Setting("entropy_coefficient"),
    "actor.aux_loss_coef": Setting("moe_coefficient"),
    "algo.kl.init_coef": Setting("kl.coefficient", 0.01),
    "algo.kl.estimator": Setting("kl.estimator", "k1"),
    "algo.kl.target": Setting("kl.target"),
    "reward.clip_range": Setting("shaping.clip", [-10, 10], _clip),
    "reward.overlong_buffer_len": Setting("shaping.overlong.buffer", None, int),
}
_CRITIC = {
    **{f"critic.{name}": setting for name, setting in _warmed("optimizer").items()},
    "critic.adam.lr": Setting("optimizer.learning_rate", 9e-6),
    "critic.value_clip": Setting("value_clip", 0.5),
    "critic.freezing_steps": Setting("warmup_steps", None, lambda steps: max(0, steps)),
    "critic.save_value_network": Setting("save"),
}
_ALGORITHMS = {
    "gae": "ppo", "reinforce": "reinforce++", "reinforce_baseline": "reinforce++-baseline", "rloo": "rloo",
    "group_norm": "grpo", "dr_grpo": "dr-grpo",
}  # fmt: skip
_BLOCKS = {"reinforce++": "reinforce_plus_plus", "reinforce++-baseline": "reinforce_plus_plus_baseline"}


def translate(origin: Origin) -> Translation:
    """Translate a script. Raises RecipeError for one that cannot be parsed."""
    module, words, before = command_line(origin, _MODULES)
    given = Given({**_flags(words), **launcher(before)}, _REASONS)
    result = Translation({"name": recipe_name(origin.file)}, None)
    set_seed(result.recipe, given, "train.seed")
    {"train_ppo_ray": _rl, "train_sft": _sft, "train_dpo": _dpo, "train_rm": _reward_model}[module.rpartition(".")[2]](
        given, origin, result
    )
    result.untranslated = given.untranslated()
    return result


def _flags(words: list[str]) -> dict[str, Any]:
    """Return the flags by name: true without a value, a list with several. Numbers are numbers."""
    values: dict[str, Any] = {}
    name, loose = "", 0
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            values[name] = _number(value) if equals else True
        elif not name:
            values[f"argument {(loose := loose + 1)}"] = word
        else:
            earlier, number = values[name], _number(word)
            values[name] = (
                number if earlier is True else [*(earlier if isinstance(earlier, list) else [earlier]), number]
            )
    return values


def _number(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return value_or_expression(word, word)


def _model_and_adapter(stage: dict[str, Any], given: Given, name: str, result: Translation) -> None:
    result.model = given.take(name)
    if rank := given.take("ds.lora.rank", 0):
        put(stage, "lora.rank", rank)
        given.fill(stage, _LORA)


def _data(given: Given, origin: Origin, names: tuple[str, str], columns: dict[str, str | None]) -> dict[str, Any]:
    """Return the data set's settings. names: of its path and its split. columns: ours -> their setting's value."""
    named = given.take(names[0])
    if not isinstance(named, str):
        raise RecipeError(f"{origin.file}: it has no --{names[0]}, so there is nothing to train on")
    places = named.split(",")
    if any("@" in place for place in places):
        raise RecipeError(f"{origin.file}: --{names[0]} {named}: PATH@FOLDER is not read here, name the files")
    given_columns = {ours: theirs for ours, theirs in columns.items() if theirs not in (None, ours)}
    data: dict[str, Any] = {"source": origin.source(places, split=given.take(names[1]))}
    if data["source"]["type"] == "files":
        given.leave(names[1], "files have no splits")
    data |= {"columns": given_columns} if given_columns else {}
    limit = given.take("data.max_samples")
    return data if limit is None else data | {"limit": limit}


def _supervised(given: Given, rate: float, length: int, epochs: int, result: Translation) -> dict[str, Any]:
    stage: dict[str, Any] = {"dataset": "train"}
    _model_and_adapter(stage, given, "model.model_name_or_path", result)
    table = {
        **_SUPERVISED,
        "adam.lr": Setting("optimizer.learning_rate", rate),
        "data.max_len": Setting("max_length", length),
        "train.max_epochs": Setting("epochs", epochs, number_of_epochs),
    }
    given.fill(stage, table)
    _without_fall(stage, given, "")
    return stage


def _without_fall(stage: dict[str, Any], given: Given, prefix: str) -> None:
    """Leave out the final rate of a schedule that never falls."""
    if stage["optimizer"].get("schedule") == "constant":
        stage["optimizer"].pop("final_learning_rate_share")
        given.leave(f"{prefix}min_lr_ratio", CONSTANT)


def _sft(given: Given, origin: Origin, result: Translation) -> None:
    stage = _supervised(given, 5e-6, 2048, 2, result)
    first, reply = given.take("data.input_key", "input"), given.take("data.output_key")
    if given.take("model.pretrain_mode_enable"):
        name, data_format, columns = "pretrain", "text", {"text": first}
    else:
        name, data_format = "sft", "conversations"
        columns = {"messages": first} if reply is None else {"prompt": first, "completion": reply}
    data = _data(given, origin, ("data.dataset", "data.dataset_split"), columns)
    result.recipe |= {"data": {"train": {"format": data_format, **data, "on_long_row": "truncate"}}, name: stage}


def _pairs(given: Given, origin: Origin) -> dict[str, Any]:
    columns = {
        "prompt": given.take("data.prompt_key"),
        "chosen": given.take("data.chosen_key"),
        "rejected": given.take("data.rejected_key"),
    }
    data = _data(given, origin, ("data.dataset", "data.dataset_split"), columns)
    return {"format": "preferences", **data, "on_long_row": "truncate"}


def _dpo(given: Given, origin: Origin, result: Translation) -> None:
    stage = _supervised(given, 1e-5, 512, 1, result)
    kind = "ipo" if given.take("model.ipo_enable") else "dpo"
    loss: dict[str, Any] = {"type": kind, "beta": given.take("model.beta", 0.1)}
    if kind == "dpo":
        loss["label_smoothing"] = given.take("model.label_smoothing", 0.0)
    stage["losses"] = {kind: loss}
    if weight := given.take("model.nll_loss_coef", 0):
        stage["losses"]["nll"] = {"type": "nll", "weight": float(weight)}
    if given.take("ref.offload"):
        put(stage, "reference.offload", True)
    result.recipe |= {"data": {"train": _pairs(given, origin)}, "preference": stage}


def _reward_model(given: Given, origin: Origin, result: Translation) -> None:
    stage = _supervised(given, 9e-6, 512, 1, result)
    if given.take("model.loss_type", "sigmoid") not in ("sigmoid", "logexp"):
        given.leave("model.loss_type", "here it is -log sigmoid of the difference, also called logexp")
    result.recipe |= {"data": {"train": _pairs(given, origin)}, "reward_model": stage}


def _rl(given: Given, origin: Origin, result: Translation) -> None:
    estimator = given.take("algo.advantage.estimator", "gae")
    if estimator not in _ALGORITHMS:
        raise RecipeError(f"algo.advantage.estimator {estimator} has no counterpart here")
    algorithm = _ALGORITHMS[estimator]
    if (loss := given.take("actor.policy_loss_type", "ppo")) not in ("ppo", "gspo"):
        raise RecipeError(f"actor.policy_loss_type {loss} has no counterpart here")
    if loss == "gspo" and estimator not in ("group_norm", "dr_grpo"):
        raise RecipeError(f"actor.policy_loss_type gspo with algo.advantage.estimator {estimator} has no counterpart "
                          "here, where gspo compares the completions of a prompt: set group_norm")  # fmt: skip
    algorithm = "gspo" if loss == "gspo" else algorithm
    rl: dict[str, Any] = {"dataset": "train", "algorithm": algorithm}
    _model_and_adapter(rl, given, "actor.model_name_or_path", result)
    if not given.take("train.enable_ema"):
        given.leave("train.ema_beta", "enable_ema is not set")
        rl_table = {name: setting for name, setting in _RL.items() if name != "train.ema_beta"}
        given.take("train.ema_beta")
    else:
        rl_table = _RL | {"train.ema_beta": Setting("ema_decay", 0.992)}
    given.fill(rl, rl_table)
    rl["sampling"] |= {"max_tokens": _longest_answer(given, rl["rollout"]["max_length"], result)}
    if given.take("rollout.top_p", 1.0) != 1:
        given.leave(
            "rollout.top_p", "set it in the recipe beside sampling.top_k, which bounds the tokens that RL stores"
        )
    _placement(rl, given)
    agent = given.take("train.agent_func_path")
    if agent is not None:
        rl["environment"] = {
            "type": "executor", "form": "openrlhf", "path": _file(agent, origin), "function": "AgentExecutor",
            "max_turns": _TURNS,
        }  # fmt: skip
        put(rl, "rollout.repeatable", False)
        result.assumed.append(f"rl.environment.max_turns: {_TURNS}; there, an episode ends by `done` or data.max_len")
        given.leave("reward.remote_url", "the agent of train.agent_func_path returns the reward")
    scored = bool(given.value("algo.dynamic_filtering_enable"))
    reward = {"type": "environment", "scored": scored} if agent is not None else _reward(given, origin, result)
    block = _block(algorithm, estimator, given, reward)
    completions, batch = rl["prompts_per_step"] * block["group_size"], given.take("train.batch_size", 128)
    if completions % batch:
        raise RecipeError(f"train.batch_size {batch} does not divide the {completions} completions of a rollout")
    block["minibatches"] = completions // batch
    columns = {"prompt": given.take("data.input_key", "input"), "answer": given.take("data.label_key")}
    data = {"format": "prompts", **_data(given, origin, ("data.prompt_dataset", "data.prompt_split"), columns)}
    rows = origin.rows(data["source"])
    rows = rows if rows is None else min(rows, data.get("limit", rows))
    episodes = given.take("train.num_episodes", 1)
    rl["steps"] = rl_steps(episodes, rows, rl["prompts_per_step"], "train.num_episodes", result.assumed)
    if (lora := rl.get("lora")) and lora.get("dropout"):
        rl["dropout"] = True
    result.recipe |= {
        "data": {"train": data},
        "rl": {**rl, _BLOCKS.get(algorithm, algorithm.replace("-", "_")): block},
    }


def _longest_answer(given: Given, max_length: int, result: Translation) -> int:
    tokens = given.take("rollout.max_new_tokens")
    if tokens is None:
        tokens = min(_ANSWER_TOKENS, max_length // 2)
        result.assumed.append(f"rl.sampling.max_tokens: {tokens}; there, it is what data.max_len leaves to each prompt")
    return int(tokens)


def _placement(rl: dict[str, Any], given: Given) -> None:
    """Set the GPUs of actor and engines, if the script has them."""
    if "actor.num_gpus_per_node" in given:
        workers = given.take("actor.num_nodes", 1) * given.take("actor.num_gpus_per_node")
        rl["placement"] = {"workers": workers, "gpus_per_worker": 1}
        rl["rollout"]["gpus_per_engine"] = rl["rollout"].get("tensor_parallel_size", 1)


def _block(algorithm: str, estimator: str, given: Given, reward: Mapping[str, Any]) -> dict[str, Any]:
    block: dict[str, Any] = {"rewards": {"reward": dict(reward)}}
    given.fill(block, _POLICY)
    _without_fall(block, given, "actor.")
    low_high, both = given.take("actor.eps_clip_low_high"), given.take("actor.eps_clip", 0.2)
    block["clip_low"], block["clip_high"] = low_high or (both, both)
    use_loss = given.take("algo.kl.use_loss")
    block["kl"]["place"] = "loss" if use_loss else "reward"
    if "target" in block["kl"]:
        given.leave("algo.kl.horizon", "kl.horizon counts steps, not samples: set it")
    if "overlong" in block.get("shaping", {}):
        put(block, "shaping.overlong.penalty", float(given.take("reward.overlong_penalty_factor", 1)))
    penalty = given.take("reward.stop_properly_penalty_coef")
    if penalty is not None:
        put(block, "shaping.truncation", {"factor": penalty} if penalty >= 0 else {"reward": penalty})
    if given.take("algo.dynamic_filtering_enable"):
        low, high = given.take("algo.dynamic_filtering_range", [0, 1])
        block["filtering"] = {"low": float(low), "high": float(high)}
    if given.value("algo.advantage.is_correction_level") == "token" and algorithm != "gspo":
        _mismatch(block, given)
    if algorithm == "ppo":
        block["gae_lambda"] = given.take("algo.advantage.lambd", 1)
        block["critic"] = {}
        given.fill(block["critic"], _CRITIC)
        _without_fall(block["critic"], given, "critic.")
        start = given.take("critic.model_name_or_path")
        if start == given.value("actor.model_name_or_path"):
            block["critic"]["start"] = "policy"
        elif start != given.value("reward.model_name_or_path"):  # none: that of the reward, or else the policy
            given.leave("critic.model_name_or_path", "see `critic.start`, which names a stage")
    if algorithm in ("ppo", "reinforce++"):
        block["gamma"] = given.take("algo.advantage.gamma", 1)
    if algorithm in ("grpo", "gspo", "dr-grpo"):
        block["divide_by_deviation"] = estimator != "dr_grpo" and not given.take("algo.advantage.no_std_norm", False)
    if algorithm == "gspo":
        block["aggregation"] = "sequence"
        given.leave("actor.loss_agg_mode", "gspo is a mean of completions")
    if algorithm == "rloo":
        block["kl_per_token"] = True
    return block


def _mismatch(block: dict[str, Any], given: Given) -> None:
    """Set the correction by the ratio of each token."""
    prefix = "algo.advantage.is_correction"
    given.take(f"{prefix}_level")
    if given.take(f"{prefix}_gating", "ratio") != "ratio":
        for name in ("level", "gating"):
            given.leave(f"{prefix}_{name}", "here what decides is the ratio of the two probabilities")
        return
    low, high = given.take(f"{prefix}_threshold", [0.5, 5.0])
    correction = {"mask": "mask", "clip": "truncate"}[given.take(f"{prefix}_mode", "mask")]
    block["mismatch"] = {"correction": correction, "low": low, "high": high}


def _reward(given: Given, origin: Origin, result: Translation) -> dict[str, Any]:
    named, model = given.take("reward.remote_url"), given.take("reward.model_name_or_path")
    if named is None and model is None:
        raise RecipeError(f"{origin.file}: it has no reward.remote_url and no reward.model_name_or_path")
    if named is None:
        return result.reward_model(model, normalize=given.take("reward.normalize_enable", False))
    given.leave("reward.model_name_or_path", "reward.remote_url comes first")
    if named.endswith(".py"):
        return {"type": "function", "path": _file(named, origin), "function": "reward_func", "form": "openrlhf"}
    urls = named.split(",")
    return {"type": "http", "form": "openrlhf", **({"url": urls[0]} if len(urls) == 1 else {"urls": urls})}


def _file(named: str, origin: Origin) -> str:
    """Return the path of a Python file that the script names, as the recipe has it."""
    file = origin.local(named)
    return named if file is None else place_of(file, origin.folder)
