"""Unbiased estimate of pass@k."""

from __future__ import annotations


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the probability that one of k samples passes, if c of n samples passed: 1 - C(n-c, k) / C(n, k).

    Equation 1 of arXiv:2107.03374, computed as a product that does not overflow. Raises ValueError unless
    1 <= k <= n and 0 <= c <= n.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {max(k, 1)} samples of each prompt, there are {samples}")
    if not 0 <= passed <= samples:
        raise ValueError(f"{passed} of {samples} samples passed")
    none_passes = 1.0
    for index in range(samples - passed + 1, samples + 1):
        none_passes *= max(0.0, 1.0 - k / index)
    return 1.0 - none_passes
