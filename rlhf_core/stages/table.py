"""The table of all stages. A new one is one file, its config class, and one line here."""

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.data.dataset import DatasetConfig, OverlapConfig
from rlhf_core.config.plugins import Table
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.config.stages.base_model import BaseModelConfig
from rlhf_core.config.stages.benchmark import BenchmarkConfig
from rlhf_core.config.stages.calibration import CalibrationConfig
from rlhf_core.config.stages.distillation import DistillationConfig
from rlhf_core.config.stages.evaluation import EvaluationConfig
from rlhf_core.config.stages.gate import ModelGateConfig
from rlhf_core.config.stages.kto import KTOConfig
from rlhf_core.config.stages.language_models import PretrainConfig, SFTConfig
from rlhf_core.config.stages.logprobs import LogprobsConfig, TopLogprobsConfig
from rlhf_core.config.stages.loop import RoundConfig, RoundPromptsConfig
from rlhf_core.config.stages.merging import MergeConfig, MergeModelsConfig
from rlhf_core.config.stages.outputs import ArtifactConfig, ReportConfig
from rlhf_core.config.stages.preference import PreferenceConfig
from rlhf_core.config.stages.quantisation import QuantiseConfig
from rlhf_core.config.stages.reward_models import ProcessRewardModelConfig, RewardModelConfig, RewardRegressionConfig
from rlhf_core.config.stages.sampled import (
    BestOfNConfig,
    ConditionalConfig,
    ConditionalPromptsConfig,
    GenerateConfig,
    PairsConfig,
    UnpairedConfig,
)
from rlhf_core.config.stages.score import ScoreConfig
from rlhf_core.contract import Stage
from rlhf_core.tracking.protocol import METRICS_FILE, SAMPLES_FILE, VERDICT_FILE

_TRAINED = frozenset({Kind.POLICY, Kind.ADAPTER})


def _only(kind: Kind) -> frozenset[Kind]:
    return frozenset({kind})


_STAGES = (
    Stage("dataset", 9, DatasetConfig, _only(Kind.DATASET), "rlhf_core.stages.dataset:run", reads_images=True),
    Stage("overlap", 2, OverlapConfig, _only(Kind.REPORT), "rlhf_core.stages.overlap:run",
          checks="rlhf_core.preflight.stages.datasets:overlap", reads_images=True),
    Stage("base", 4, BaseModelConfig, frozenset({Kind.BASE_MODEL, Kind.REWARD_MODEL}), "rlhf_core.stages.base:run"),
    Stage("artifact", 1, ArtifactConfig, frozenset(Kind), entry=""),
    Stage("pretrain", 3, PretrainConfig, frozenset({Kind.BASE_MODEL, Kind.ADAPTER}),
          "rlhf_core.stages.pretrain:run", runs="actors",
          checks="rlhf_core.preflight.stages.supervised:check"),
    Stage("sft", 3, SFTConfig, _TRAINED, "rlhf_core.stages.sft:run", runs="actors", needs_template=True,
          checks="rlhf_core.preflight.stages.supervised:check", reads_images=True),
    Stage("reward_model", 5, RewardModelConfig, _only(Kind.REWARD_MODEL), "rlhf_core.stages.reward_model:run",
          runs="actors", needs_template=True, serves=True,
          checks="rlhf_core.preflight.stages.supervised:reward_model", reads_images=True),
    Stage("reward_regression", 3, RewardRegressionConfig, _only(Kind.REWARD_MODEL),
          "rlhf_core.stages.reward_regression:run", runs="actors", needs_template=True, serves=True,
          checks="rlhf_core.preflight.stages.supervised:reward_regression"),
    Stage("process_reward_model", 2, ProcessRewardModelConfig, _only(Kind.REWARD_MODEL),
          "rlhf_core.stages.process_reward_model:run", runs="actors", needs_template=True, serves=True,
          checks="rlhf_core.preflight.stages.supervised:process_reward_model"),
    Stage("logprobs", 3, LogprobsConfig, _only(Kind.LOGPROBS), "rlhf_core.stages.logprobs:run", runs="actors",
          needs_template=True,
          checks="rlhf_core.preflight.stages.supervised:unread_rows", reads_images=True),
    Stage("preference", 2, PreferenceConfig, _TRAINED, "rlhf_core.stages.preference:run", runs="actors",
          needs_template=True,
          checks="rlhf_core.preflight.stages.supervised:preference", reads_images=True),
    Stage("kto", 2, KTOConfig, _TRAINED, "rlhf_core.stages.kto:run", runs="actors", needs_template=True,
          checks="rlhf_core.preflight.stages.supervised:check", reads_images=True),
    Stage("top_logprobs", 1, TopLogprobsConfig, _only(Kind.TOP_LOGPROBS), "rlhf_core.stages.top_logprobs:run",
          runs="actors", needs_template=True),
    Stage("distillation", 2, DistillationConfig, _TRAINED, "rlhf_core.stages.distillation:run", runs="actors",
          needs_template=True,
          checks="rlhf_core.preflight.stages.distillation:check"),
    Stage("rl", 7, RLConfig, _TRAINED, "rlhf_core.stages.rl:run", runs="actors", needs_template=True,
          checks="rlhf_core.preflight.stages.rl:check", reads_images=True),
    Stage("merge", 2, MergeConfig, _only(Kind.POLICY), "rlhf_core.stages.merge:run",
          checks="rlhf_core.preflight.stages.merging:merge"),
    Stage("quantise", 1, QuantiseConfig, _only(Kind.POLICY), "rlhf_core.stages.quantise:run",
          checks="rlhf_core.preflight.stages.merging:quantise"),
    Stage("merge_models", 2, MergeModelsConfig, _only(Kind.POLICY), "rlhf_core.stages.merge_models:run",
          checks="rlhf_core.preflight.stages.merging:merge_models"),
    Stage("generate", 3, GenerateConfig, _only(Kind.DATASET), "rlhf_core.stages.generate:run", runs="actors",
          needs_template=True, reads_images=True),
    Stage("pairs", 2, PairsConfig, _only(Kind.DATASET), "rlhf_core.stages.sampled:pairs",
          checks="rlhf_core.preflight.stages.sampled:pairs", reads_images=True),
    Stage("unpaired", 2, UnpairedConfig, _only(Kind.DATASET), "rlhf_core.stages.sampled:unpaired",
          checks="rlhf_core.preflight.stages.sampled:unpaired", reads_images=True),
    Stage("best_of_n", 2, BestOfNConfig, _only(Kind.DATASET), "rlhf_core.stages.sampled:best_of_n",
          checks="rlhf_core.preflight.stages.sampled:best_of_n", reads_images=True),
    Stage("conditional", 2, ConditionalConfig, _only(Kind.DATASET),
          "rlhf_core.stages.sampled:conditional_conversations",
          checks="rlhf_core.preflight.stages.sampled:rewarded", reads_images=True),
    Stage("conditional_prompts", 1, ConditionalPromptsConfig, _only(Kind.DATASET),
          "rlhf_core.stages.sampled:conditional_prompts",
          checks="rlhf_core.preflight.stages.sampled:conditional_prompts", reads_images=True),
    Stage("score", 1, ScoreConfig, frozenset({Kind.DATASET, Kind.EVALUATION}), "rlhf_core.stages.score:run",
          runs="actors", checks="rlhf_core.preflight.stages.score:check", reads_images=True),
    Stage("evaluation", 3, EvaluationConfig, _only(Kind.EVALUATION), "rlhf_core.stages.evaluation:run",
          runs="actors", needs_template=True, reads_images=True),
    Stage("benchmark", 1, BenchmarkConfig, _only(Kind.EVALUATION), "rlhf_core.stages.benchmark:run", runs="actors",
          checks="rlhf_core.preflight.stages.benchmark:check"),
    Stage("calibration", 1, CalibrationConfig, _only(Kind.CALIBRATION), "rlhf_core.stages.calibration:run",
          checks="rlhf_core.preflight.stages.calibration:check"),
    Stage("gate", 1, ModelGateConfig, _only(Kind.GATE), "rlhf_core.stages.gate:run",
          files={"*.evaluation.*": frozenset({SAMPLES_FILE}), "*": frozenset()},
          checks="rlhf_core.preflight.stages.gate:check"),
    Stage("round_prompts", 1, RoundPromptsConfig, _only(Kind.DATASET), "rlhf_core.stages.round_prompts:run",
          reads_images=True),
    Stage("round", 1, RoundConfig, _only(Kind.ROUND), "rlhf_core.stages.round:run",
          files={"*_evaluation": frozenset({SAMPLES_FILE}), "*": frozenset()}),
    Stage("report", 8, ReportConfig, _only(Kind.REPORT), "rlhf_core.stages.report:run", reads_all=True,
          files={"node.*": frozenset({METRICS_FILE, SAMPLES_FILE, VERDICT_FILE})}),
)  # fmt: skip

STAGES: Table[Stage] = Table("stages", Stage, {stage.name: stage for stage in _STAGES})
