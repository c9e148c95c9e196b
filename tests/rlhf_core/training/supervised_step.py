"""One step of preference learning, KTO and reward models, on one rank or on two: of test_two_ranks.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.stages.kto import KTOConfig
from rlhf_core.config.stages.preference import PreferenceConfig
from rlhf_core.config.stages.reward_models import ProcessRewardModelConfig, RewardModelConfig
from rlhf_core.supervised.examples import divide
from rlhf_core.supervised.kto import KTOWorker, labelled_example, pack_unpaired
from rlhf_core.supervised.pairs import pack_pairs, pair_example
from rlhf_core.supervised.preference import PreferenceWorker
from rlhf_core.supervised.reward_model import RewardModelWorker, judged_pair
from rlhf_core.supervised.targets import ProcessRewardModelWorker, labelled_steps, pack_targets
from rlhf_core.supervised.worker import SupervisedWorker
from rlhf_core.training.metrics import StepMetrics
from rlhf_core.types import PackedBatch
from tests.rlhf_core.stages.context import LocalContext, local_input
from tests.rlhf_core.stages.supervised_runs import pairs
from tests.rlhf_core.training.tiny_engine import GRADIENT

METHODS = ("preference", "kto", "reward_model", "process_reward_model")
WHOLE, SMALL = 1000, 40  # tokens of a micro-batch: of a whole step, and of a sequence or two
PAIRS = [*pairs(4), {**pairs(1)[0], "chosen": "a much longer answer", "rejected": "b"}]
ANSWERS = ["a", "bcd", "a longer one", "ef", "g"]
STEPS = [
    (["one", "t", "three"], [1.0, 0.0, 0.25]),
    (["a longer step than the others"], [1.0]),
    (["x", "y"], [0.5, 0.0]),
]


def one_step(
    method: str, folder: Path, work: Path, *, zero_stage: int, rank: int = 0, ranks: int = 1
) -> tuple[SupervisedWorker[Any], StepMetrics]:
    """folder: with the models `words` and `other words`. On one rank the step is one micro-batch."""
    policy, other = (local_input(folder / name / "model", Kind.BASE_MODEL) for name in ("words", "other words"))
    context = LocalContext(work, given_seed=3, artifacts={each.manifest.ref.path: each for each in (policy, other)})
    settings: dict[str, Any] = {
        "dataset": "d", "batch_size": 5, "max_length": 64, "optimizer": GRADIENT,
        "engine": EngineConfig(dtype="float32", zero_stage=zero_stage),
    }  # fmt: skip
    arguments = (context, policy.manifest.ref, 4)
    worker: SupervisedWorker[Any]
    match method:
        case "preference":
            settings |= {"reference": {"model": "other"}, "losses": {"dpo": {"type": "dpo", "beta": 0.3}}}
            worker = PreferenceWorker(PreferenceConfig.model_validate(settings), *arguments, other.manifest.ref)
        case "kto":
            settings |= {"reference": {"model": "other"}, "beta": 0.4}
            worker = KTOWorker(KTOConfig.model_validate(settings), *arguments, other.manifest.ref)
        case "reward_model":
            settings |= {"language_model_coefficient": 0.1, "centring_coefficient": 0.01}
            worker = RewardModelWorker(RewardModelConfig.model_validate(settings), *arguments)
        case _:
            worker = ProcessRewardModelWorker(ProcessRewardModelConfig.model_validate(settings), *arguments)
    shards = divide(batch_of(method, policy.folder), ranks, WHOLE if ranks == 1 else SMALL)
    (metrics,) = worker.train([shards[rank]])
    return worker, metrics


def batch_of(method: str, model: Path) -> PackedBatch:
    tokenizer = load_tokenizer(model)
    rows = [{"id": str(number), **row} for number, row in enumerate(PAIRS)]
    match method:
        case "preference":
            return pack_pairs([pair_example(tokenizer, row) for row in rows])
        case "reward_model":
            return pack_pairs([judged_pair(tokenizer, row) for row in rows])
        case "kto":
            labelled = [
                {**row, "completion": text, "label": index % 3 == 0}
                for index, (row, text) in enumerate(zip(rows, ANSWERS, strict=True))
            ]
            return pack_unpaired([labelled_example(tokenizer, row) for row in labelled], 64)
        case _:
            prompt = rows[0]["prompt"]
            return pack_targets(
                [
                    labelled_steps(
                        tokenizer,
                        {"id": str(i), "prompt": prompt, "steps": steps, "labels": labels, "separator": "\n"},
                    )
                    for i, (steps, labels) in enumerate(STEPS)
                ]
            )
