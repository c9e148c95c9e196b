"""Routing of a mixture-of-experts model: the chosen experts and the routers' probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.errors import StageError
from rlhf_core.models.adapters import base_model


def experts_per_token(model: nn.Module) -> int:
    """Return the number of experts per token of each router of the model (a PreTrainedModel, or a PeftModel of one).

    Raises StageError if the model has no routers that transformers would balance.
    """
    causal: Any = base_model(model)
    config = causal.config.get_text_config()
    count = getattr(config, "num_experts_per_tok", None)
    if not isinstance(count, int) or not hasattr(config, "router_aux_loss_coef"):
        raise StageError(
            f"moe_coefficient is set, but {type(causal).__name__} has no experts to balance; set the coefficient to 0"
        )
    return count


def routing_sums(router_logits: Sequence[Tensor], counted: Tensor, top_k: int) -> Tensor:
    """Return how often each of E experts was chosen, and the sum of its probabilities, over all layers, (2, E) float32.

    router_logits: (N, E) of each layer; counted: (N,) bool, the tokens that count. Only the second row has a gradient.
    """
    chosen, probability = [], []
    for logits in router_logits:
        probabilities = torch.softmax(logits[counted].float(), dim=-1)
        experts = probabilities.topk(top_k, dim=-1).indices.flatten()
        chosen.append(torch.bincount(experts, minlength=logits.shape[-1]).float())
        probability.append(probabilities.sum(0))
    return torch.stack([torch.stack(chosen).sum(0), torch.stack(probability).sum(0)])
