"""A script of TRL, as its page on GRPO describes one."""

import re

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

LEARNING_RATE = 2e-5
PATTERN = re.compile(r"answer: (\w+)")


def last_answer(text):
    found = PATTERN.findall(text)
    return found[-1] if found else None


def accuracy(completions, solution, **kwargs):
    return [
        float(last_answer(completion[0]["content"]) == truth)
        for completion, truth in zip(completions, solution, strict=True)
    ]


def brevity(completions, **kwargs):
    return [-len(completion[0]["content"]) / 100 for completion in completions]


def tokenize(row):
    raise RuntimeError("a script is parsed and never run")


def main():
    dataset = load_dataset("json", data_files="prompts.jsonl", split="train")
    dataset = dataset.filter(lambda row: len(row["prompt"]) < 1000)
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", dtype=torch.bfloat16)
    training_args = GRPOConfig(
        output_dir="out",
        learning_rate=LEARNING_RATE,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        steps_per_generation=8,
        num_generations=4,
        num_iterations=2,
        max_completion_length=64,
        max_steps=200,
        warmup_steps=20,
        beta=0.04,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="grpo",
        reward_weights=[1.0, 0.2],
        temperature=0.9,
        top_p=0.95,
        bf16=True,
        logging_steps=1,
        log_completions=True,
        vllm_mode="colocate",
        seed=torch.initial_seed(),
    )
    training_args.max_grad_norm = 0.5
    trainer = GRPOTrainer(
        model=model,
        args=training_args,
        reward_funcs=[accuracy, brevity],
        train_dataset=dataset,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        callbacks=[],
    )
    trainer.train()


if __name__ == "__main__":
    main()
