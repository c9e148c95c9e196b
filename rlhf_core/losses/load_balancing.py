"""The load-balancing loss of mixture-of-experts models."""

from __future__ import annotations

from torch import Tensor


def load_balancing_loss(routing: Tensor, step_routing: Tensor) -> Tensor:
    """Return a micro-batch's part of E sum_e f_e P_e, eq. 4-6 of arXiv:2101.03961 over the whole optimizer step.

    f_e: the share of the step's tokens that are routed to expert e; P_e: the mean probability of expert e; both over
    all tokens and layers. f is computed over the whole step first, as arXiv:2501.11873 recommends. The rest is a sum
    over tokens, so the gradient does not depend on micro-batching or on the number of ranks.
    routing: (2, E), the micro-batch's `routing_sums`; step_routing: (2, E), their total over the step and all ranks.
    """
    choices, probabilities = step_routing.detach()
    tokens = probabilities.sum()  # a token's probabilities sum to 1
    loss: Tensor = choices.numel() * (choices / tokens * routing[1] / tokens).sum()
    return loss
