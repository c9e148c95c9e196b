"""Models that are incompatible with their stage's settings: engines, adapters, judges."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.numpy import load_file, save_file

from tests.rlhf_core.recipes import OPTIMIZER, Change, Problems, both, file, model_folder, put

pytestmark = pytest.mark.parts

SHORT = {"stage": "base", "source": {"type": "scratch", "context_length": 32}}
FOREIGN = {"stage": "base", "source": {"type": "scratch", "context_length": 64, "words": ["two"]}}
PAIRS = {"stage": "reward_model", "dataset": "pairs", "batch_size": 1, "max_length": 32, "optimizer": OPTIMIZER}

DPO = {"stage": "preference", "dataset": "pairs", "model": "sft", "batch_size": 1, "max_length": 64,
       "optimizer": OPTIMIZER, "losses": {"dpo": {"type": "dpo"}}, "reference": {"model": "other"}}  # fmt: skip

TOOLS = {"type": "tools", "parser": "hermes", "tools": {"python": {"type": "python"}}}


def first(**stages: Any) -> Change:
    """Stages above all others."""

    def change(recipe: dict[str, Any], root: Path) -> None:
        rest = {name: recipe.pop(name) for name in list(recipe) if name not in ("name", "data")}
        recipe.update(stages | rest)

    return change


def merged_into(other: dict[str, Any], **lora: Any) -> Change:
    merge = put("merged", value={"stage": "merge", "adapter": "sft", "model": "other"})
    adapter = put("sft", "lora", value={"rank": 2, **lora})
    return both(first(other={"stage": "base", "source": {"type": "scratch", "context_length": 64, **other}}), adapter,
                merge, put("sft", "model", value="base"), evaluated("rl"))  # fmt: skip


def judged_by(base: dict[str, Any], **reward: Any) -> Change:
    """PPO with a critic and a reward of a reward model that was trained from `base`."""
    block = {
        "rewards": {"taste": {"type": "reward_model", "model": "judge", **reward}},
        "optimizer": OPTIMIZER,
        "critic": {"optimizer": OPTIMIZER, "start": "policy"},
    }
    return both(first(other=base, judge=PAIRS), put("rl", "ppo", value=block), evaluated("rl"))


def evaluated(*models: str) -> Change:
    return put("evaluation", "models", value=list(models))


def folder(**settings: Any) -> Change:
    """A base model of the user's, with these settings in its config.json."""

    def change(recipe: dict[str, Any], root: Path) -> None:
        model_folder(root)
        path = root / "model" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
        recipe["base"]["source"] = {"type": "folder", "path": "model"}

    return change


def sampled(base: dict[str, Any], **settings: Any) -> Change:
    """A stage `generate` with a reward model that was trained from `base`, or with other settings."""
    judge = {"rewards": {"taste": {"type": "reward_model", "model": "judge"}}}
    stage = {"stage": "generate", "model": "sft", "dataset": "prompts", "sampling": {"max_tokens": 8},
             "rollout": {"max_length": 64}, **(settings or judge)}  # fmt: skip
    return both(first(other=base, judge=PAIRS), put("sampled", value=stage), evaluated("rl"))


def spread(**sizes: int) -> Change:
    """The engines of RL over several GPUs each."""
    gpus = float(math.prod(sizes.values()))
    rollout = {"max_length": 64, "gpus_per_engine": gpus, **sizes}
    return both(put("rl", "rollout", value=rollout), evaluated("rl"))


def vocabulary(size: int) -> Change:
    """Another base model in a folder, with the same tokenizer and more rows."""

    def change(recipe: dict[str, Any], root: Path) -> None:
        shutil.copytree(root / "model", root / "wider")
        path = root / "wider" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": size}))
        tensors = load_file(root / "wider" / "model.safetensors")
        tensors["model.embed_tokens.weight"] = numpy.ones((size, 64), dtype=numpy.float32)
        save_file(tensors, root / "wider" / "model.safetensors", metadata={"format": "pt"})
        first(other={"stage": "base", "source": {"type": "folder", "path": "wider"}})(recipe, root)

    return change


def two_heads() -> dict[str, Any]:
    return {"stage": "base", "source": {"type": "scratch", "context_length": 64, "heads": 2}}


def taught_by(**stages: dict[str, Any]) -> Change:
    student = put("student", value={**STUDENT, "teacher": {"top_logprobs": list(stages)}})
    return both(*(put(name, value=stage) for name, stage in stages.items()), student)


def made_of_samples(stage: dict[str, Any], **settings: Any) -> Change:
    """A stage that makes a dataset of what a stage `generate` with `settings` samples."""
    sampled = {"stage": "generate", "model": "sft", "dataset": "prompts", "sampling": {"max_tokens": 8},
               "rollout": {"max_length": 64}, "rewards": {"exact": {"type": "verifier"}}, **settings}  # fmt: skip
    return both(put("sampled", value=sampled), put("made", value={**stage, "dataset": "sampled"}), evaluated("sft"))


SIZES = "on CPU vLLM serves 32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512"
ENDLESS = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TOP = {"stage": "top_logprobs", "dataset": "talks", "model": "other", "max_length": 64, "k": 8}
STUDENT = {"stage": "distillation", "dataset": "talks", "model": "sft", "batch_size": 1, "max_length": 64,
           "optimizer": OPTIMIZER, "teacher": {"model": "other"}}  # fmt: skip
MIXED = {"stage": "merge_models", "model": "sft", "method": "linear", "others": [{"model": "other", "weight": 0.5}]}
HELD_OUT = {"format": "conversations", "source": {"type": "files", "paths": ["held_out.jsonl"]}}
VALIDATION = {"dataset": "held_out", "every_steps": 1}
KL = {"rewards": {"exact": {"type": "verifier"}}, "optimizer": OPTIMIZER}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            made_of_samples({"stage": "best_of_n"}, rewards={}),
            [
                "made.dataset: its completions have no rewards, which this stage reads: give that stage `generate` "
                "rewards"
            ],
        ),
        (
            made_of_samples({"stage": "pairs"}, samples=1),
            ["made.dataset: it has one completion of each prompt, of which no pair can be made: raise its `samples`"],
        ),
        (put("base", "source", "heads", value=1), []),
        (
            put("base", "source", "heads", value=8),
            [
                f"{node}.rollout: the model's attention heads have size 16; {SIZES}: take another model, or set "
                "rollout.gpus_per_engine"
                for node in ("rl", "evaluation")
            ],
        ),
        (both(put("base", "source", "heads", value=8), *(put(node, "rollout", "gpus_per_engine", value=1.0)
              for node in ("rl", "evaluation"))), []),
        (both(folder(num_attention_heads=4, num_key_value_heads=4), put("rl", value=None)),
         ["evaluation.rollout: the model's attention heads have size 16"]),
        (spread(tensor_parallel_size=2, pipeline_parallel_size=4), []),
        (spread(tensor_parallel_size=3),
         ["rl.rollout: rollout.tensor_parallel_size=3 does not divide the model's 4 attention heads, of which every "
          "GPU has an equal part: set it to 2 (or 1)"]),
        (spread(tensor_parallel_size=8),
         ["rl.rollout: rollout.tensor_parallel_size=8 does not divide the model's 4 attention heads, of which every "
          "GPU has an equal part: set it to 4 (or 1, 2)"]),
        (spread(pipeline_parallel_size=5),
         ["rl.rollout: rollout.pipeline_parallel_size=5 is more than the model's 4 layers"]),
        (both(put("base", "source", value={"type": "scratch", "context_length": 64, "intermediate_size": 10}),
              spread(tensor_parallel_size=4)),
         ["rl.rollout: rollout.tensor_parallel_size=4 does not divide the model's intermediate_size of 10"]),
        (both(folder(), spread(tensor_parallel_size=4)),
         ["rl.rollout: rollout.tensor_parallel_size=4 does not divide the model's 2 attention heads"]),
        (
            put("rl", "rollout", "cpu_cache_gib", value=0.00048),
            [
                "rl.rollout: rollout.cpu_cache_gib=0.00048 has no room for one sequence of rollout.max_length=64 "
                "tokens, whose keys and values are 0.000488 GiB of this model: raise it"
            ],
        ),
        (put("rl", "rollout", "cpu_cache_gib", value=0.00049), []),
        (put("evaluation", "rollout", "cpu_cache_gib", value=1e-9),
         ["evaluation.rollout: rollout.cpu_cache_gib=1e-09 has no room"]),
        (
            put("sft", "lora", value={"rank": 2, "target_modules": ["q_proj", "query"]}),
            [
                "sft.lora: lora.target_modules names query; the linear layers of this model are down_proj, gate_proj, "
                "k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
            ],
        ),
        (put("sft", "lora", value={"rank": 2, "target_modules": ["layers.3.self_attn.q_proj"]}), []),
        (put("sft", "lora", value={"rank": 2, "target_modules": ["layers.4.self_attn.q_proj"]}),
         ["sft.lora: lora.target_modules names layers.4.self_attn.q_proj;"]),
        (put("sft", "lora", value={"rank": 2, "target_modules": ["lm_head"]}),
         ["sft.lora: lora.target_modules names lm_head, whose weights are the embedding's too in this model"]),
        (put("sft", "lora", value={"rank": 2, "modules_to_save": ["embed_tokens"]}),
         ["sft.lora: lora.modules_to_save names embed_tokens, but embedding and lm_head are one tensor in this model"]),
        (both(folder(), put("sft", "lora", value={"rank": 2, "modules_to_save": ["head"]})),
         ["sft.lora: lora.modules_to_save names head, which is not a module of this model"]),
        (both(folder(), put("sft", "lora", value={"rank": 2, "modules_to_save": ["model.norm"]})), []),
        (both(folder(), put("sft", "lora", value={"rank": 2, "target_modules": ["q_proj"],
                                           "modules_to_save": ["q_proj"]})),
         ["sft.lora: lora.modules_to_save names q_proj, which lora.target_modules names too"]),
        (put("rl", "ppo", "critic", "lora", value={"rank": 2, "target_modules": ["score"]}),
         ["rl.ppo.critic.lora: lora.target_modules names score;"]),
        (both(folder(), put("sft", "lora", value={"rank": 2, "target_modules": ["q_proj", "c_attn"]})),
         ["sft.lora: lora.target_modules names c_attn; the linear layers of this model are"]),
        (both(folder(), put("sft", "lora", value={"rank": 2, "target_modules": ["q_proj"]})), []),
        (both(put("base", "source", "tie_word_embeddings", value=False),
              put("reward_model", "language_model_coefficient", value=0.5)),
         ["reward_model.language_model_coefficient: it needs a model with tied embeddings, which this is not"]),
        (judged_by(SHORT),
         ["rl.ppo.rewards.taste: its context is 32 tokens, and sequences have up to rollout.max_length=64"]),
        (judged_by(FOREIGN), []),
        (sampled(SHORT),
         ["sampled.rewards.taste: its context is 32 tokens, and sequences have up to rollout.max_length=64"]),
        (sampled(FOREIGN), []),
        (sampled(SHORT, reference={"model": "other"}),
         ["sampled.reference.model: its context is 32 tokens, and sequences have up to rollout.max_length=64: name"]),
        (sampled(FOREIGN, reference={"model": "other"}),
         ["sampled.reference.model: its tokenizer differs from the policy's: name another model, or remove it"]),
        (merged_into({}, quantised="nf4"),
         ["merged.model: `sft` was trained on a quantised base, whose weights this model does not have: remove it"]),
        (merged_into({"layers": 2}),
         ["merged.model: its num_hidden_layers is 2, but `sft` is an adapter"]),
        (merged_into({"intermediate_size": 16}),
         ["merged.model: its intermediate_size is 16, but `sft` is an adapter"]),
        (merged_into({"intermediate_size": 16}, target_modules=["q_proj"]), []),
        (merged_into({}), []),
        (judged_by(FOREIGN, type="process_reward_model"),
         ["rl.ppo.rewards.taste: the reward model's tokenizer differs from the policy's"]),
        (both(judged_by(FOREIGN), put("rl", "ppo", "critic", "start", value="judge")),
         ["rl.ppo.critic.start: its tokenizer differs from the policy's: set critic.start: policy"]),
        (both(first(other=SHORT), evaluated("rl"), put("rl", "algorithm", value="grpo"),
              put("rl", "grpo", value={**KL, "kl": {"coefficient": 0.1, "reference": "other"}})),
         ["rl.grpo.kl.reference: its context is 32 tokens, and sequences have up to rollout.max_length=64: name"]),
        (both(first(other=FOREIGN), evaluated("rl"), put("rl", "algorithm", value="on-policy-distillation"),
              put("rl", "on_policy_distillation", value={"teacher": {"model": "other"}, "optimizer": OPTIMIZER})),
         ["rl.on_policy_distillation.teacher.model: its tokenizer differs from the policy's: name another model"]),
        (both(first(other=SHORT), put("dpo", value=DPO), evaluated("rl")),
         ["dpo.reference.model: its context is 32 tokens, and sequences have up to max_length=64: name another"]),
        (both(first(other=FOREIGN), put("dpo", value=DPO), evaluated("rl")),
         ["dpo.reference.model: its tokenizer differs from the policy's: name another model, or remove it"]),
        (both(first(other=SHORT), put("student", value=STUDENT), evaluated("rl")),
         ["student.teacher.model: its context is 32 tokens, and sequences have up to max_length=64: name another"]),
        (both(first(other=FOREIGN), put("student", value=STUDENT), evaluated("rl")),
         ["student.teacher.model: its tokenizer differs from the student's: name another model"]),
        (both(folder(), vocabulary(130), put("student", value=STUDENT), evaluated("rl")),
         ["student.teacher.model: its distributions are over 130 tokens, and the student's over"]),
        (both(first(other=FOREIGN), taught_by(top=TOP), evaluated("rl")),
         ["student.teacher.top_logprobs.top: its tokenizer differs from the student's: name another model"]),
        (both(first(other=SHORT), taught_by(top={**TOP, "max_length": 32}), evaluated("rl")), []),
        (both(taught_by(top={**TOP, "model": "sft"}, more={**TOP, "model": "sft", "k": 4}), evaluated("rl")),
         ["student.teacher.top_logprobs: its stages have different `k` or `temperature`: give them the same"]),
        (both(taught_by(top={**TOP, "model": "sft"}), evaluated("rl"),
              put("data", "held_out", value=HELD_OUT), put("student", "validation", value=VALIDATION)),
         ["student.teacher.top_logprobs: none of its stages reads the rows of `validation.dataset`, data.held_out"]),
        (both(put("student", value={**STUDENT, "teacher": {"model": "sft"}}), evaluated("rl")),
         ["student.teacher.model: the student starts from this model, so nothing would be learned"]),
        (both(put("student", value={**STUDENT, "teacher": {"model": "sft"}, "cross_entropy_coefficient": 1}),
              evaluated("rl")), []),
        (put("sft", "engine", value={"freeze_vision": True}),
         ["sft.engine.freeze_vision: this model reads text alone: remove it"]),
        (both(put("sft", "engine", value={"sequence_parallel": 2}), put("sft", "placement", value={"workers": 2})), []),
        (both(put("sft", "engine", value={"tensor_parallel": 2}), put("sft", "placement", value={"workers": 2})), []),
        (both(put("sft", "engine", value={"tensor_parallel": 3}), put("sft", "placement", value={"workers": 3})),
         ["sft.engine.tensor_parallel: 3 workers cannot share 4 query heads (num_attention_heads) equally: set a num"]),
        (both(first(other=SHORT), put("mixed", value=MIXED), evaluated("rl")), []),
        (both(first(other=two_heads()), put("mixed", value=MIXED), evaluated("rl")),
         ["mixed.others.0.model: its num_attention_heads is 2, and that of `model` is 4: only models of one"]),
        (both(first(other=FOREIGN), put("mixed", value=MIXED), evaluated("rl")),
         ["mixed.others.0.model: its tokenizer is not that of `model`: name another"]),
        (both(put("rl", "environment", value={"type": "retry", "max_turns": 2}), file("own.jinja", ENDLESS),
              put("base", "chat_template", value="own.jinja")),
         ["rl.environment: the chat template does not end each assistant turn with a special token"]),
        (put("rl", "environment", value=TOOLS),
         ["rl.environment: the chat template refuses a conversation: this model knows user and assistant turns only"]),
    ],
)  # fmt: skip
@pytest.mark.slow("a process builds the model's class")
def test_what_a_model_cannot_do_is_said_before_its_job(problems: Problems, change: Change, expected: list[str]) -> None:
    said = problems(change)
    assert len(said) == len(expected), said
    assert all(sentence.startswith(begin) for sentence, begin in zip(said, expected, strict=True)), said
