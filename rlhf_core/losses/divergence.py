"""Divergences of a student's next-token distribution q from a teacher's p, each with its gradient.

student, teacher: (M, V) log q and log p, normalised, of one float dtype. Each function returns the divergence of each
row (M,), in nats, and its gradient (M, V) with respect to the logits z of q = softmax(z): with the gradient g of a
function of q, that is q (g - sum q g). Equal distributions have 0 of both, exactly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def forward_kl(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q) = sum p (log p - log q), which is mode-covering: q spreads over the support of p; gradient q - p."""
    p = teacher.exp()
    return (p * (teacher - student)).sum(-1), student.exp() - p


def reverse_kl(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """KL(q || p) = sum q (log q - log p), which is mode-seeking: q avoids tokens improbable under p, arXiv:2306.08543;
    gradient q (log q - log p - KL).
    """
    q, difference = student.exp(), student - teacher
    value = (q * difference).sum(-1)
    return value, difference.sub_(value.unsqueeze(-1)).mul_(q)


def jensen_shannon(student: Tensor, teacher: Tensor, *, weight: float) -> tuple[Tensor, Tensor]:
    """w KL(p || m) + (1 - w) KL(q || m) with the mixture m = w p + (1 - w) q, eq. 1 of arXiv:2306.13649.

    weight: w, of the teacher, between 0 and 1. Divided by w, the limit for w -> 0 is the forward KL; divided by 1 - w,
    the limit for w -> 1 the reverse KL. Gradient (1 - w) q (log q - log m - KL(q || m)).
    """
    p, q, difference = teacher.exp(), student.exp(), teacher - student
    # log m less the larger of log p and log q: nothing overflows, and where both are equal it is exactly 0.
    larger = torch.where(difference > 0, difference.new_tensor(1 - weight), difference.new_tensor(weight))
    mixture = torch.log1p(difference.abs().neg_().expm1().mul_(larger))
    over_teacher = mixture + difference.clamp(max=0).neg_()  # log m - log p
    over_student = mixture + difference.clamp(min=0)  # log m - log q
    of_teacher, of_student = -(p * over_teacher).sum(-1), -(q * over_student).sum(-1)
    gradient = over_student.add_(of_student.unsqueeze(-1)).mul_(q).mul_(weight - 1)
    return weight * of_teacher + (1 - weight) * of_student, gradient


def top_forward_kl(student: Tensor, tokens: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q) over the teacher's k most probable tokens, with all others merged into one:

        sum_i p_i (log p_i - log q_i) + p_rest (log p_rest - log q_rest),

    which is at most the KL of the whole distributions, and equal to it where k = V or where student and teacher
    distribute probability over the other tokens alike. Gradient q_i - p_i, and for the others q_j - p_rest q_j /
    q_rest.

    student: (M, V) log q; tokens: (M, k) int64; teacher: (M, k + 1) their log p, and log p_rest, -inf where k = V.
    """
    # By logsumexp, not by subtracting from 1, which would lose precision.
    others = student.scatter(-1, tokens, -math.inf)
    rest = others.logsumexp(-1, keepdim=True)
    p, of_student = teacher.exp(), torch.cat([student.gather(-1, tokens), rest], dim=-1)
    value = torch.where(p > 0, p * (teacher - of_student), 0).sum(-1)
    target = others.sub_(rest).exp_().mul_(p[:, -1:]).scatter_(-1, tokens, p[:, :-1])
    return value, student.exp().sub_(target)
