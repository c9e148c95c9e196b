"""What a stage asks of its models: that engines can serve them, adapters fit them, judges read the policy's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from rlhf_core.config.base import Dtype
from rlhf_core.config.base_model import BaseModelConfig, FolderModel, ScratchModel
from rlhf_core.config.distillation import STORED_INPUT, TEACHER_INPUT, DistillationConfig
from rlhf_core.config.evaluation import EvaluationConfig
from rlhf_core.config.logprobs import TopLogprobsConfig
from rlhf_core.config.reward_models import ProcessRewardModelConfig, RewardModelConfig
from rlhf_core.config.rewards import ModelReward
from rlhf_core.config.rl import RLConfig
from rlhf_core.config.rl_settings import POLICY_INPUT
from rlhf_core.config.sampled import FromCompletions, GenerateConfig, PairsConfig
from rlhf_core.config.stage import EnginesConfig, StageConfig
from rlhf_core.config.stages import MergeConfig, MergeModelsConfig
from rlhf_core.config.training import LoraConfig, SupervisedConfig
from rlhf_core.data.feedback import require_results_follow, require_turns_follow
from rlhf_core.errors import StageError
from rlhf_core.models.attention import attention_problem
from rlhf_core.models.folder import text_config
from rlhf_core.models.headers import stored_tensors
from rlhf_core.models.mixable import OTHER_TOKENIZER, mix_problem
from rlhf_core.models.readers import (
    STORED_SEPARATOR,
    judge_problem,
    reader_problem,
    scale_problem,
    separator_problem,
    teacher_problem,
)
from rlhf_core.models.remote_code import reads_images
from rlhf_core.models.scratch import linear_layers
from rlhf_core.models.served import problems_on_cpu, split_problems
from rlhf_core.models.targets import head_problems, target_problem
from rlhf_core.pipeline.drafting import Draft
from rlhf_core.pipeline.preflight_lengths import tokenizer_of
from rlhf_core.pipeline.preflight_model import BaseModel, settings_by_class


def check_models(nodes: Mapping[str, Draft], models: Mapping[str, BaseModel], root: Path) -> Iterator[str]:
    """models: by node, of those whose base model is at hand."""
    for node in nodes.values():
        for problem in _problems(node, nodes, models, root):
            yield f"{node.section}.{problem}"


def _problems(node: Draft, nodes: Mapping[str, Draft], models: Mapping[str, BaseModel], root: Path) -> Iterator[str]:
    config, model = node.config, models.get(node.name)
    if model is not None and config.engines is not None and not config.engines.gpus_per_engine:
        dtype = config.engine.dtype if isinstance(config, RLConfig) else _stored_dtype(nodes, node.inputs["model"])
        yield from (f"rollout: {problem}" for problem in problems_on_cpu(model.settings, config.engines, dtype))
    if model is not None and config.engines is not None and config.engines.gpus_of_engine > 1:
        yield from (f"rollout: {said}" for said in split_problems(settings_by_class(model, root), config.engines))
    if model is not None and isinstance(config, SupervisedConfig | RLConfig):
        unfit = attention_problem(model.settings, config.engine.attention)
        yield from () if unfit is None else (f"engine.attention: {unfit}",)
        if config.engine.freeze_vision and not reads_images(model.settings):
            yield "engine.freeze_vision: this model reads text alone: leave it out"
    for setting, (lora, start) in _adapters(config).items():
        base = models.get(node.inputs[start])
        if base is not None and (wrong := _targets(lora, base, root)):
            yield f"{setting}: {wrong}"
    if isinstance(config, RewardModelConfig) and config.language_model_coefficient > 0 and model is not None:
        tied = model.settings.get("tie_word_embeddings", True)  # left out: only the model's class knows
        yield from (f"language_model_coefficient: {problem}" for problem in head_problems(tied=tied))
    if isinstance(config, FromCompletions):
        yield from _samples(config, nodes[node.inputs["dataset"]].config)
    if isinstance(config, MergeModelsConfig) and model is not None:
        yield from _unmixable(config, node, models, root)
    if isinstance(config, MergeConfig) and model is not None:
        yield from _misfit(nodes[node.inputs["adapter"]], models.get(node.inputs["adapter"]), model)
    if model is not None:
        yield from _readers(config, node, models, root)
    if isinstance(config, DistillationConfig):
        yield from _teachers(config, node, nodes, models, root)
    if isinstance(config, EnginesConfig):
        yield from _separators(config, node, nodes)
    if isinstance(config, EnginesConfig) and model is not None:
        yield from _judges(config, node, nodes, models, root)
    if isinstance(config, RLConfig | EvaluationConfig) and model is not None and config.environment.appends_turns:
        try:
            require_turns_follow(tokenizer_of(model, root))
            if config.environment.calls_tools:
                require_results_follow(tokenizer_of(model, root))
        except StageError as error:
            yield f"environment: {error}"


def _samples(config: FromCompletions, made_by: StageConfig) -> Iterator[str]:
    """Of what is made of completions that a stage samples."""
    if not isinstance(made_by, GenerateConfig):
        return
    if config.reads_rewards and not made_by.rewards:
        yield "dataset: its completions have no rewards, which this stage reads: give that stage `generate` rewards"
    if isinstance(config, PairsConfig) and made_by.samples == 1:
        yield "dataset: it has one completion of each prompt, of which no pair can be made: raise its `samples`"


def _stored_dtype(nodes: Mapping[str, Draft], name: str) -> Dtype | None:
    """Of the weights that the node makes; None: not known here."""
    node = nodes[name]
    match node.config:
        case BaseModelConfig(dtype=dtype):
            return dtype
        case SupervisedConfig() | RLConfig():
            return node.config.engine.dtype
        case _:
            return _stored_dtype(nodes, node.inputs["model"]) if "model" in node.inputs else None


def _adapters(config: StageConfig) -> dict[str, tuple[LoraConfig, str]]:
    """The adapters that the stage makes: by setting its settings, and the input that it is put on."""
    found: dict[str, tuple[LoraConfig | None, str]] = {}
    if isinstance(config, SupervisedConfig):
        found["lora"] = config.adapter, "model"
    elif isinstance(config, RLConfig):
        found["lora"] = config.lora, POLICY_INPUT
        if (critic := config.settings.critic_settings) is not None:
            found[f"{config.block}.critic.lora"] = critic.lora, config.critic_input
    return {setting: (lora, start) for setting, (lora, start) in found.items() if lora is not None}


def _targets(lora: LoraConfig, base: BaseModel, root: Path) -> str | None:
    tied = bool(base.settings.get("tie_word_embeddings"))
    match base.config.source:
        case ScratchModel() as source:
            return target_problem(lora, linear_layers(source), tied=tied)
        case FolderModel(path=path) if "num_experts_per_tok" not in text_config(base.settings):
            layers = [
                name.removesuffix(".weight")
                for name, tensor in stored_tensors(root / path).items()
                if name.endswith(".weight") and len(tensor.shape) == 2
            ]
            return target_problem(lora, layers, tied=tied)
        case _:
            return None  # in memory experts are other layers than in the folder


def _misfit(adapter: Draft, trained_on: BaseModel | None, model: BaseModel) -> Iterator[str]:
    """Of a merge into another model than the adapter was trained on."""
    names = ["hidden_size", "num_hidden_layers"]
    if any(lora.target_modules == "all-linear" for lora, _ in _adapters(adapter.config).values()):
        names.append("intermediate_size")
    if trained_on is None:
        return
    for name in names:
        ours, theirs = text_config(model.settings).get(name), text_config(trained_on.settings).get(name)
        if ours is not None and theirs is not None and ours != theirs:
            yield (
                f"model: its {name} is {ours}, but `{adapter.name}` is an adapter of a model whose {name} is {theirs}: "
                "leave it out, to merge into that one"
            )
            return


def _unmixable(config: MergeModelsConfig, node: Draft, models: Mapping[str, BaseModel], root: Path) -> Iterator[str]:
    model = models[node.name]
    for place in range(len(config.others)):
        other = models.get(node.inputs[f"others.{place}.model"])
        if other is None:
            continue
        problem = OTHER_TOKENIZER if _same_tokens(other, model, root) is False else None
        problem = problem or mix_problem(model.settings, other.settings)
        if problem is not None:
            yield f"others.{place}.model: {problem}"


def _readers(config: StageConfig, node: Draft, models: Mapping[str, BaseModel], root: Path) -> Iterator[str]:
    """Of the models that read the tokens of the stage's own, where their base is at hand."""
    for setting, (name, advice) in config.token_readers.items():
        reader = models.get(node.inputs[name])
        same = None if reader is None else _same_tokens(reader, models[node.name], root)
        if reader is not None and same is not None:
            for bound, tokens in config.sequence_lengths().items():
                problem = reader_problem(reader.settings, bound, tokens, reads_tokens=same)
                if problem is not None:
                    yield f"{setting}: {problem}: {advice}"


def _teachers(
    config: DistillationConfig, node: Draft, nodes: Mapping[str, Draft], models: Mapping[str, BaseModel], root: Path
) -> Iterator[str]:
    if node.inputs.get(TEACHER_INPUT) == node.inputs["model"] and config.cross_entropy_coefficient == 0:
        yield f"{TEACHER_INPUT}: it is what the student starts from, so that nothing would be learned: name another"
    student = models.get(node.name)
    for name in config.stored_inputs or (TEACHER_INPUT,):
        teacher = models.get(node.inputs[name])
        same = None if student is None or teacher is None else _same_tokens(teacher, student, root)
        if student is None or teacher is None or same is None:
            continue
        longest = 0 if config.stored_inputs else config.max_length  # of stored ones their own stage has a limit
        problem = teacher_problem(teacher.settings, student.settings, max_length=longest, reads_tokens=same)
        if problem is not None:
            yield f"{name}: {problem}: name another model"
    stored = [nodes[node.inputs[name]] for name in config.stored_inputs]
    asked = {(each.config.k, each.config.temperature) for each in stored if isinstance(each.config, TopLogprobsConfig)}
    if len(asked) > 1:
        yield f"{STORED_INPUT}: its stages have different `k` or `temperature`: give them the same"
    if all(isinstance(each.config, TopLogprobsConfig) for each in stored) and stored:
        read = {each.inputs["dataset"] for each in stored}
        for setting, dataset in node.inputs.items():
            if setting.endswith("dataset") and dataset not in read:
                yield (
                    f"{STORED_INPUT}: none of its stages reads the rows of `{setting}`, {dataset}: add one that does, "
                    "with the teacher as its model"
                )


def _separators(config: EnginesConfig, node: Draft, nodes: Mapping[str, Draft]) -> Iterator[str]:
    """Of process reward models that the recipe trains."""
    for judged in config.judges():
        if not isinstance(judged.judge, ModelReward):
            continue
        trained = nodes[node.inputs[f"{judged.setting}.model"]].config
        if isinstance(trained, ProcessRewardModelConfig):
            problem = separator_problem(trained.separator, judged.judge)
            yield from () if problem is None else (f"{judged.setting}: {problem}",)


def _judges(
    config: EnginesConfig, node: Draft, nodes: Mapping[str, Draft], models: Mapping[str, BaseModel], root: Path
) -> Iterator[str]:
    policy, tokens = models[node.name], config.rollout.max_length
    for judged in config.judges():
        reward = judged.judge
        if not isinstance(reward, ModelReward):
            continue
        judge = node.inputs[f"{judged.setting}.model"]
        model = models.get(judge)
        if model is None:
            continue
        problem = None
        if isinstance(nodes[judge].config, BaseModelConfig):  # one that was trained here has a scale
            problem = scale_problem(model.settings, reward)
            problem = problem or separator_problem(model.settings.get(STORED_SEPARATOR), reward)
        same = _same_tokens(model, policy, root)
        if problem is None and same is not None:
            reads = same and _template(model, root) == _template(policy, root)
            problem = judge_problem(model.settings, reward, reads_tokens=reads, tokens=tokens)
        if problem is not None:
            yield f"{judged.setting}: {problem}"


def _same_tokens(model: BaseModel, other: BaseModel, root: Path) -> bool | None:
    """Whether the tokenizers of two models are one; None where their jobs will show it."""
    match model.config.source, other.config.source:
        case ScratchModel(words=ours), ScratchModel(words=theirs):
            return tuple(dict.fromkeys(ours)) == tuple(dict.fromkeys(theirs))
        case FolderModel(path=ours), FolderModel(path=theirs):
            return (root / ours / "tokenizer.json").read_bytes() == (root / theirs / "tokenizer.json").read_bytes()
        case _:
            return None


def _template(model: BaseModel, root: Path) -> str:
    return str(tokenizer_of(model, root).chat_template)
