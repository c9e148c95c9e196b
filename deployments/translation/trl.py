"""Translation of TRL: a script with a trainer of GRPO, RLOO, DPO, KTO, Reward or SFT, or a YAML file of `trl grpo`,
`dpo` or `sft`.

Names and defaults are those of TRL 1.16. A script is parsed, never run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deployments.translation.settings import (
    ALWAYS,
    Given,
    Origin,
    Setting,
    Translation,
    UntranslatableError,
    epochs_for,
    number_of_epochs,
    one_of,
    optimizer,
    put,
    recipe_name,
    rl_steps,
    schedule,
    set_seed,
)
from deployments.translation.trl_files import TRLFile, read_file
from rlhf_core.errors import RecipeError

_MAX_LENGTH = 1024  # of the configs of supervised trainers
_COMPLETION_TOKENS = {"grpo": 512, "rloo": 256}  # of their configs
_PROMPT_TOKENS = 1024  # assumed: neither limits prompts

# Arguments of GRPOTrainer that make episodes, without which it would be another experiment, with their counterparts.
_EPISODES = {
    "environment_factory": "{type: agent, form: trl}",
    "tools": "{type: tools}, with tools of the type function",
    "rollout_func": "{type: executor}",
}
_STEPS_DECIDE = "max_steps is set, which comes first"
_REASONS = {
    **dict.fromkeys(("packing", "padding_free", "packing_strategy", "remove_unused_columns"), ALWAYS),
    **dict.fromkeys(("bias", "task_type", "lora_task_type", "use_peft", "completion_only_loss"), ALWAYS),
    "assistant_only_loss": "here only assistant turns are trained",
    "output_dir": "results are in the store; `alignment export` writes a model",
    **dict.fromkeys(("save_steps", "save_strategy", "save_total_limit", "resume_from_checkpoint"),
                    "checkpoints are by time, and a run resumes by itself: `checkpoint`"),
    **dict.fromkeys(("report_to", "run_name", "project", "log_completions", "num_completions_to_print"),
                    "trackers are in `tracking`, and rollouts are logged by `rl.log_rollouts`"),
    **dict.fromkeys(("push_to_hub", "hub_model_id"), "`alignment export` publishes a model"),
    **dict.fromkeys(("eval_strategy", "eval_steps", "per_device_eval_batch_size", "eval_dataset", "do_eval"),
                    "a held-out set is in `validation`, or in the stage `evaluation`"),
    **dict.fromkeys(("vllm_mode", "vllm_tensor_parallel_size", "vllm_enable_sleep_mode", "vllm_server_host",
                     "vllm_server_base_url", "vllm_server_port"), "devices are in `placement`, `rollout` and `hybrid`"),
    **dict.fromkeys(("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_min",
                     "vllm_importance_sampling_clip_max", "vllm_importance_sampling_correction"),
                    "use_vllm is not set, so that nothing is corrected there: see `mismatch`"),
    **dict.fromkeys(("processing_class", "tokenizer"), "the tokenizer is the model's"),
    "precompute_ref_log_probs": "a stage `logprobs` computes them",
    "fp16": "here weights are bfloat16 or float32",
    "logging_steps": "RL logs every step",
    "train_dataset.": "what is done to rows is in `columns`, or a source `function` makes them",
    "from_pretrained.": "how a model is loaded is in `engine`",
    "deepspeed": "settings of DeepSpeed are in `engine`",
    "dataset_num_proc": "`processes` of the data set",
}  # fmt: skip


def _optimizer_name(value: str) -> str:
    if not value.startswith("adamw_torch"):
        raise UntranslatableError("here the optimizer is AdamW, or muon")
    return "adamw"


_SCALES = {True: True, "group": True, "batch": "batch", False: False, "none": False}


def _beside_top_k(value: Any) -> float:
    raise UntranslatableError("set it in the recipe beside sampling.top_k, which bounds the tokens that RL stores")


_OPTIMIZER = {
    "optim": Setting("optimizer.name", None, _optimizer_name),
    "weight_decay": Setting("optimizer.weight_decay", 0.0, float),
    "adam_epsilon": Setting("optimizer.epsilon", 1e-8, float),
    "max_grad_norm": Setting("optimizer.max_gradient_norm", 1.0, lambda norm: float(norm) or None),
    "lr_scheduler_type": Setting("optimizer.schedule", "linear", schedule),
}
_ENGINE = {
    "bf16": Setting("engine.dtype", None, one_of({True: "bfloat16", False: "float32"})),
    "gradient_checkpointing": Setting("engine.gradient_checkpointing", True),
    "attn_implementation": Setting(
        "engine.attention", None,
        one_of({"sdpa": "sdpa", "eager": "eager", "flash_attention_2": "flash_attention_2"}),
    ),
}  # fmt: skip
_SUPERVISED = {
    **_ENGINE,
    "num_train_epochs": Setting("epochs", 3, number_of_epochs),
    "logging_steps": Setting("log_every", None, int),
    "router_aux_loss_coef": Setting("moe_coefficient"),
}
_RL = {
    **_ENGINE,
    "max_completion_length": Setting("sampling.max_tokens"),
    "temperature": Setting("sampling.temperature", 1.0, float),
    "top_p": Setting("sampling.top_p", None, _beside_top_k),
    "top_k": Setting("sampling.top_k", None, lambda most: max(0, int(most or 0))),
    "min_p": Setting("sampling.min_p", None, _beside_top_k),
    "vllm_gpu_memory_utilization": Setting("rollout.memory_share"),
}
_POLICY = {
    "num_generations": Setting("group_size", 8),
    "num_iterations": Setting("epochs", 1),
    "beta": Setting("kl.coefficient", 0.0, float),
    "epsilon": Setting("clip_low", 0.2),
    "epsilon_high": Setting("clip_high", None),
    "delta": Setting("dual_clip"),
    "scale_rewards": Setting("divide_by_deviation", "group", one_of(_SCALES)),
    "mask_truncated_completions": Setting("mask_truncated_completions"),
    "entropy_coef": Setting("entropy_coefficient"),
    "router_aux_loss_coef": Setting("moe_coefficient"),
}
_RLOO = {
    "num_generations": Setting("group_size", 2),
    "num_iterations": Setting("epochs", 1),
    "beta": Setting("kl.coefficient", 0.05, float),
    "epsilon": Setting("clip_low", 0.2),
    "epsilon_high": Setting("clip_high", None),
    "mask_truncated_completions": Setting("mask_truncated_completions"),
    "reward_clip_range": Setting("shaping.clip", None, list),
}
_AGGREGATIONS = {"grpo": "sequence", "dapo": "token", "bnpo": "token", "dr_grpo": "constant", "cispo": "token"}
_LOSSES = {
    "sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "exo_pair": "exo", "robust": "robust_dpo", "sppo_hard": "sppo",
    "apo_zero": "apo_zero", "apo_down": "apo_down", "sft": "nll",
}  # fmt: skip
_DIVERGENCES = {"reverse_kl": "reverse_kl", "forward_kl": "forward_kl", "js_divergence": "js"}
_SMOOTHED = ("dpo", "exo", "robust_dpo")
_DIVERGED = ("dpo", "exo", "robust_dpo", "hinge")
_LORA = {
    "r": Setting("rank", 8),
    "lora_alpha": Setting("alpha", 8, float),
    "lora_dropout": Setting("dropout", 0.0, float),
    "target_modules": Setting("target_modules"),
    "use_dora": Setting("dora"),
    "use_rslora": Setting("rank_stabilised"),
    "modules_to_save": Setting("modules_to_save"),
}
# Of ModelConfig, which a YAML file has.
_LORA_OF_YAML = {
    "lora_r": Setting("rank", 16),
    "lora_alpha": Setting("alpha", 32, float),
    "lora_dropout": Setting("dropout", 0.05, float),
    "lora_target_modules": Setting("target_modules"),
    "use_dora": Setting("dora"),
    "use_rslora": Setting("rank_stabilised"),
    "lora_modules_to_save": Setting("modules_to_save"),
}


_STAGES = {  # with the format of the rows
    "grpo": ("rl", "prompts"), "rloo": ("rl", "prompts"), "dpo": ("preference", "preferences"),
    "kto": ("kto", "unpaired"), "reward": ("reward_model", "preferences"), "sft": ("sft", "conversations"),
}  # fmt: skip
_CONFIGS = {"grpo": "GRPOConfig", "rloo": "RLOOConfig", "dpo": "DPOConfig", "kto": "KTOConfig",
            "reward": "RewardConfig", "sft": "SFTConfig"}  # fmt: skip


def translate(origin: Origin) -> Translation:
    """Translate a script (.py) or a YAML file. Raises RecipeError for a file that cannot be parsed."""
    read = read_file(origin)
    given, lora = Given(read.settings, _REASONS), Given(read.lora or {}, _REASONS)
    result = Translation({"name": recipe_name(origin.file)}, read.model, files=read.files)
    result.assumed += [
        f"the form of the reward {each.name}: {each.settings['form']}"
        for each in read.rewards
        if each.settings.get("type") == "function"
    ]
    set_seed(result.recipe, given, "seed")
    stage: dict[str, Any] = {"dataset": "train"}
    if read.lora is not None:
        stage["lora"] = {}
        lora.fill(stage["lora"], _LORA_OF_YAML if read.is_yaml else _LORA)
    batch = _Batch.of(given, result)
    source = origin.source(read.path, subset=read.subset, split=read.split)
    translated = {"grpo": _grpo, "rloo": _rloo, "dpo": _dpo, "kto": _kto, "reward": _reward_model, "sft": _sft}[
        read.kind
    ]
    translated(stage, given, _Task(origin, read, batch, origin.rows(source), result))
    if "dropout" in stage and not stage["dropout"] and stage.get("lora", {}).pop("dropout", 0):
        lora.leave("lora_dropout", "disable_dropout switches it off, there and here")
    name, data_format = _STAGES[read.kind]
    dataset: dict[str, Any] = {"format": data_format, "source": source}
    if answered := [reward.name for reward in read.rewards if reward.settings.get("type") == "verifier"]:
        dataset["columns"] = {"answer": "solution"}
        result.assumed.append(
            f"the column `solution`, which {answered[0]} reads, is `answer` here, and has no other name"
        )
    if name != "rl":  # TRL cuts rows
        dataset["on_long_row"] = "truncate"
    if source["type"] == "files":
        result.untranslated += [
            f"the {what} {part} of the data set: files have none"
            for what, part in (("subset", read.subset), ("split", read.split))
            if part not in (None, "train")
        ]
    of_engines = ", rollout: {engines: N, gpus_per_engine: 1}, hybrid: true" if name == "rl" else ""
    result.assumed.append(f"CPUs: for N GPUs give `{name}` placement: {{workers: N, gpus_per_worker: 1}}{of_engines}")
    result.recipe |= {"data": {"train": dataset}, name: stage}
    result.untranslated += [*given.untranslated(), *(f"LoraConfig.{each}" for each in lora.untranslated())]
    return result


@dataclass(frozen=True, slots=True)
class _Batch:
    device: int  # completions or rows of one forward
    accumulated: int

    @classmethod
    def of(cls, given: Given, result: Translation) -> _Batch:
        batch = cls(given.take("per_device_train_batch_size", 8), given.take("gradient_accumulation_steps", 1))
        result.assumed.append(
            f"a batch is per_device_train_batch_size x gradient_accumulation_steps = {batch.size}, of one process: "
            "multiply it by the processes that you start"
        )
        return batch

    @property
    def size(self) -> int:
        return self.device * self.accumulated


@dataclass(frozen=True, slots=True)
class _Task:
    origin: Origin
    read: TRLFile
    batch: _Batch
    rows: int | None  # of the data set; None: not counted
    result: Translation


def _sft(stage: dict[str, Any], given: Given, task: _Task) -> None:
    _supervised(stage, given, task, 2e-5)


def _kto(stage: dict[str, Any], given: Given, task: _Task) -> None:
    _supervised(stage, given, task, 1e-6)
    stage["dropout"] = not given.take("disable_dropout", True)
    if (loss := given.take("loss_type", "kto")) != "kto":
        raise RecipeError(f"loss_type {loss} of KTO has no counterpart here; there is kto")
    for name, default in (("beta", 0.1), ("desirable_weight", 1.0), ("undesirable_weight", 1.0)):
        stage[name] = float(given.take(name, default))


def _reward_model(stage: dict[str, Any], given: Given, task: _Task) -> None:
    _supervised(stage, given, task, 1e-4)
    stage["dropout"] = not given.take("disable_dropout", True)
    given.fill(stage, {"center_rewards_coefficient": Setting("centring_coefficient", None, float)})


def _dpo(stage: dict[str, Any], given: Given, task: _Task) -> None:
    _supervised(stage, given, task, 1e-6)
    stage["dropout"] = not given.take("disable_dropout", True)
    named = given.take("loss_type", ["sigmoid"])
    names = [named] if isinstance(named, str) else named
    weights = given.take("loss_weights") or [1.0] * len(names)
    if unknown := [name for name in names if name not in _LOSSES]:
        raise RecipeError(f"loss_type {unknown[0]} has no counterpart here; there are {', '.join(_LOSSES)}")
    beta, smoothing = given.take("beta", 0.1), given.take("label_smoothing", 0.0)
    divergence = given.take("f_divergence_type", "reverse_kl")
    if divergence not in _DIVERGENCES:
        given.leave("f_divergence_type", f"here there are only counterparts of {', '.join(_DIVERGENCES)}")
        divergence = "reverse_kl"
    kinds = {_LOSSES[name] for name in names}
    for setting, readers in (("label_smoothing", _SMOOTHED), ("f_divergence_type", _DIVERGED)):
        if not kinds.intersection(readers):
            given.leave(setting, "these losses do not read it")
    losses: dict[str, Any] = {}
    for name, weight in zip(names, weights, strict=True):
        kind = _LOSSES[name]
        loss: dict[str, Any] = {"type": kind, "weight": float(weight)}
        loss |= {} if kind == "nll" else {"beta": float(beta)}
        loss |= {"label_smoothing": smoothing} if kind in _SMOOTHED and smoothing else {}
        loss |= {"logprobs": "mean"} if kind == "ipo" else {}
        loss |= {"divergence": _DIVERGENCES[divergence]} if kind in _DIVERGED else {}
        losses[kind] = loss
    stage["losses"] = losses


def _supervised(stage: dict[str, Any], given: Given, task: _Task, rate: float) -> None:
    rows = task.rows
    stage |= {"batch_size": task.batch.size, "max_length": _max_length(given, task)}
    given.fill(stage, _SUPERVISED)
    if (steps := given.take("max_steps", -1)) > 0:
        stage |= {"max_steps": steps, "epochs": epochs_for(steps, task.batch.size, rows)}
        given.leave("num_train_epochs", _STEPS_DECIDE)
    if given.take("truncation_mode", "keep_start") != "keep_start":
        given.leave("truncation_mode", "here long rows are cut at the end, see on_long_row")
    known = steps if steps > 0 else rows and stage.get("epochs", 1) * math.ceil(rows / task.batch.size)
    _optimizer(stage, given, rate, known)


def _max_length(given: Given, task: _Task) -> int:
    """Return the tokens at which a row is truncated; an assumption unless the file has a number."""
    written = given.take("max_length")
    if isinstance(written, int):
        return written
    context = task.origin.context
    is_none = "max_length" in given.names("max_length") and given.value("max_length") is None
    length = context if is_none and context else min(_MAX_LENGTH, context or _MAX_LENGTH)
    config, stage = _CONFIGS[task.read.kind], _STAGES[task.read.kind][0]
    why = "max_length=None truncates nothing there" if is_none else f"{config}'s default is {_MAX_LENGTH}"
    of_model = f", the model's context {context}" if length == context else ""
    task.result.assumed.append(f"{stage}.max_length: {length}; {why}{of_model}")
    return length


def _optimizer(stage: dict[str, Any], given: Given, rate: float, steps: int | None) -> None:
    given.fill(stage, {"learning_rate": Setting("optimizer.learning_rate", rate, float), **_OPTIMIZER})
    betas = given.take("adam_beta1", 0.9), given.take("adam_beta2", 0.999)
    optimizer(stage, betas, 0.0)
    warmup = given.take("warmup_ratio", 0.0) or given.take("warmup_steps", 0)
    if warmup >= 1 and not steps:
        given.leave("warmup_steps", "it is a share of the steps here, whose number is not known: set warmup_share")
        warmup = 0.0
    stage["optimizer"]["warmup_share"] = warmup if warmup < 1 else min(1.0, round(warmup / (steps or 1), 6))


def _rloo(rl: dict[str, Any], given: Given, task: _Task) -> None:
    block: dict[str, Any] = {"rewards": {}}
    given.fill(block, _RLOO)
    block.setdefault("clip_high", block["clip_low"])
    block["kl"] |= {"place": "reward", "estimator": "k1"}
    if given.take("normalize_advantages"):
        given.leave("normalize_advantages", "rloo does not divide by a deviation here: see grpo's `batch`")
    task.result.assumed.append("clips are of the ratio of a token, and there of that of a completion")
    _online(rl, "rloo", block, given, task)


def _grpo(rl: dict[str, Any], given: Given, task: _Task) -> None:
    for name, counterpart in _EPISODES.items():
        if f"GRPOTrainer.{name}" in given:
            raise RecipeError(
                f"{task.origin.file}: GRPOTrainer has {name}, whose counterpart is `rl.environment: {counterpart}`, "
                "see docs/reference/other-frameworks.md: remove it to translate the rest, and add that to the recipe"
            )
    block: dict[str, Any] = {"rewards": {}}
    given.fill(block, _POLICY)
    loss, level = given.take("loss_type", "dapo"), given.take("importance_sampling_level", "token")
    algorithm = _algorithm(loss, level, given.take("multi_objective_aggregation", "sum_then_normalize"))
    if algorithm == "sapo":
        block = {key: value for key, value in block.items() if key not in ("clip_low", "clip_high", "dual_clip")}
        block["temperature_positive"] = given.take("sapo_temperature_pos", 1.0)
        block["temperature_negative"] = given.take("sapo_temperature_neg", 1.05)
        block["aggregation"] = "sequence"
        for name in ("epsilon", "epsilon_high", "delta"):
            given.leave(name, "sapo has none")
    elif algorithm == "cispo":  # its bound is of the ratio, ours of what it is above 1
        block["clip_high"] = block.get("clip_high", block["clip_low"]) - 1
        block |= {"clip_low": 1.0, "aggregation": "token"}
        block.pop("dual_clip", None)
        given.leave("delta", "cispo has none")
    else:
        block.setdefault("clip_high", block["clip_low"])
        block["aggregation"] = _AGGREGATIONS[loss]
    _online(rl, algorithm, block, given, task)


def _online(rl: dict[str, Any], algorithm: str, block: dict[str, Any], given: Given, task: _Task) -> None:
    """Fill the stage around the block of its algorithm: batches, steps, engines and rewards."""
    generated = given.take("generation_batch_size") or task.batch.device * (
        given.take("steps_per_generation") or task.batch.accumulated
    )
    given.take("steps_per_generation")
    if generated % block["group_size"] or generated % task.batch.size:
        raise RecipeError(
            f"{generated} completions of a batch are not divisible by num_generations={block['group_size']} and by the "
            f"{task.batch.size} of an update"
        )
    block["minibatches"] = generated // task.batch.size
    prompts = generated // block["group_size"]
    updates = block["minibatches"] * block["epochs"]
    max_steps, epochs = given.take("max_steps", -1), given.take("num_train_epochs", 3.0)
    steps = math.ceil(max_steps / updates) if max_steps > 0 else rl_steps(
        epochs, task.rows, prompts, "num_train_epochs", task.result.assumed
    )  # fmt: skip
    if max_steps > 0:
        given.leave("num_train_epochs", _STEPS_DECIDE)
    _optimizer(block, given, 1e-6, steps * updates)
    if given.take("use_vllm") and given.take("vllm_importance_sampling_correction", True):
        block["mismatch"] = _mismatch(given)
    put(rl, "sampling.max_tokens", _COMPLETION_TOKENS[task.read.kind])
    given.fill(rl, _RL)
    put(rl, "rollout.max_length", _rollout_length(rl["sampling"]["max_tokens"], given, task))
    rl["dropout"] = not given.take("disable_dropout", False) and bool(rl.get("lora", {}).get("dropout"))
    weights = given.take("reward_weights") or [1.0] * len(task.read.rewards)
    if len(weights) != len(task.read.rewards):
        raise RecipeError(f"reward_weights has {len(weights)} numbers for {len(task.read.rewards)} reward functions")
    for reward, weight in zip(task.read.rewards, weights, strict=True):
        if reward.overlong is not None:
            put(block, "shaping.overlong", _overlong(reward.overlong, float(weight), rl["sampling"]["max_tokens"]))
            continue
        settings = reward.settings if reward.model is None else task.result.reward_model(reward.model)
        name = reward.name if reward.model is None else settings["model"]
        block["rewards"][name] = settings | ({"weight": float(weight)} if weight != 1 else {})
    rl |= {"algorithm": algorithm, "steps": steps, "prompts_per_step": prompts, algorithm.replace("-", "_"): block}


def _overlong(arguments: Mapping[str, Any], weight: float, max_tokens: int) -> dict[str, Any]:
    """Return the penalty of a soft overlong punishment. Raises RecipeError unless it ends at `max_tokens`."""
    if arguments.get("max_completion_len") != max_tokens or not isinstance(arguments.get("soft_punish_cache"), int):
        shown = ", ".join(f"{name}={getattr(value, 'text', value)}" for name, value in arguments.items())
        raise RecipeError(
            f"get_soft_overlong_punishment({shown}) is `shaping.overlong` here, which ends at max_completion_length, "
            f"{max_tokens}: write both as numbers, with max_completion_len={max_tokens}"
        )
    return {"buffer": arguments["soft_punish_cache"], "penalty": weight}


def _rollout_length(completion: int, given: Given, task: _Task) -> int:
    """Return the tokens of prompt and completion; an assumption unless the file has them."""
    assumed, context, config = task.result.assumed, task.origin.context, _CONFIGS[task.read.kind]
    if "max_completion_length" not in given:
        assumed.append(f"rl.sampling.max_tokens: {completion}; {config}'s default of max_completion_length")
    length, prompt = given.take("vllm_max_model_length"), given.take("max_prompt_length")
    if length is not None:
        return int(length)
    if prompt is not None:  # of an earlier TRL
        what = f"max_prompt_length {prompt} and max_completion_length {completion}; a longer prompt is an error here"
    else:
        what = f"max_completion_length {completion} and {_PROMPT_TOKENS} for prompts, which {config} does not limit"
    whole = completion + int(prompt or _PROMPT_TOKENS)
    length = min(whole, context or whole)
    of_model = f", at most the model's context {context}" if length < whole else ""
    assumed.append(f"rl.rollout.max_length: {length}; {what}{of_model}")
    return length


def _mismatch(given: Given) -> dict[str, Any]:
    ratio_of, _, correction = given.take("vllm_importance_sampling_mode", "sequence_mask").partition("_")
    low = given.take("vllm_importance_sampling_clip_min", 0.0)
    high = given.take("vllm_importance_sampling_clip_max", 3.0)
    return {"correction": correction, "ratio_of": ratio_of, "low": float(low), "high": float(high)}


def _algorithm(loss: str, level: str, aggregation: str) -> str:
    if loss in ("cispo", "sapo"):
        return loss
    if loss not in _AGGREGATIONS:
        raise RecipeError(f"loss_type {loss} has no counterpart here; there are {', '.join((*_AGGREGATIONS, 'sapo'))}")
    if level not in ("token", "sequence") or aggregation not in ("sum_then_normalize", "normalize_then_sum"):
        raise RecipeError(f"importance_sampling_level {level} with {aggregation} has no counterpart here")
    if level == "sequence":
        return "gspo"
    return "gdpo" if aggregation == "normalize_then_sum" else "grpo"
