"""The quick start of TRL's SFTTrainer."""

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("trl-lib/Capybara", split="train")

trainer = SFTTrainer(
    model="Qwen/Qwen3-0.6B",
    args=SFTConfig("out", packing=True, max_length=128, lr_scheduler_type="cosine", warmup_ratio=0.1),
    train_dataset=dataset,
)
trainer.train()
