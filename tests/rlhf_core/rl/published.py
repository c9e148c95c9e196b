"""What a trainer publishes, as the bytes of its safetensors file."""

from __future__ import annotations

from rlhf_core.rl.ranks import PolicyTrainer


def published(trainer: PolicyTrainer) -> bytes:
    with trainer.publication(1) as weights:
        (content,) = (file for name, file in weights.files().items() if name.endswith(".safetensors"))
    return content.tobytes()
