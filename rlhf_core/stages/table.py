"""Every stage there is. A new one is one file, its config class, and one line here."""

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.base_model import BaseModelConfig
from rlhf_core.config.data import DatasetConfig
from rlhf_core.config.evaluation import EvaluationConfig
from rlhf_core.config.rl import RLConfig
from rlhf_core.config.stages import MergeConfig, PretrainConfig, ReportConfig, RewardModelConfig, SFTConfig
from rlhf_core.contract import Stage

MODELS = frozenset({Kind.BASE_MODEL, Kind.POLICY})  # full weights: an adapter is merged before anything builds on it
TRAINED = frozenset({Kind.POLICY, Kind.ADAPTER})
DATASET = frozenset({Kind.DATASET})
ANY = frozenset(Kind)


def _only(kind: Kind) -> frozenset[Kind]:
    return frozenset({kind})


# An input name that ends in ".*" stands for any number of inputs, "exclude.test" and so on.
_STAGES = (
    Stage("dataset", 2, DatasetConfig, {"exclude.*": DATASET, "held_out.*": DATASET}, DATASET,
          "rlhf_core.stages.dataset:run"),
    Stage("base", 1, BaseModelConfig, {}, _only(Kind.BASE_MODEL), "rlhf_core.stages.base:run"),
    Stage("pretrain", 1, PretrainConfig, {"model": MODELS, "dataset": DATASET}, _only(Kind.BASE_MODEL),
          "rlhf_core.stages.pretrain:run"),
    Stage("sft", 1, SFTConfig, {"model": MODELS, "dataset": DATASET}, TRAINED, "rlhf_core.stages.sft:run"),
    Stage("reward_model", 1, RewardModelConfig, {"model": MODELS, "dataset": DATASET}, _only(Kind.REWARD_MODEL),
          "rlhf_core.stages.reward_model:run"),
    Stage("rl", 1, RLConfig, {"model": MODELS, "dataset": DATASET, "validation_dataset": DATASET,
                              "reward_model": _only(Kind.REWARD_MODEL)}, TRAINED, "rlhf_core.stages.rl:run"),
    Stage("merge", 1, MergeConfig, {"model": MODELS, "adapter": _only(Kind.ADAPTER)}, _only(Kind.POLICY),
          "rlhf_core.stages.merge:run"),
    Stage("evaluation", 1, EvaluationConfig, {"model": MODELS, "dataset": DATASET}, _only(Kind.EVALUATION),
          "rlhf_core.stages.evaluation:run"),
    Stage("report", 2, ReportConfig, {"node.*": ANY}, _only(Kind.REPORT), "rlhf_core.stages.report:run",
          files={"node.*": frozenset({"metrics.jsonl", "samples.jsonl"})}),
)  # fmt: skip

STAGES: dict[str, Stage] = {stage.name: stage for stage in _STAGES}
