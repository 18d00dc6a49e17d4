"""Acceptance rules: which drafted tokens the target keeps, and which token it emits itself.

Both rules leave the output as the target alone would have produced it: the greedy one token for token, the sampled
one in distribution (Leviathan et al., 2023, arXiv 2211.17192, appendix A.1).
"""

from __future__ import annotations

import torch
from torch import Tensor


def accept_or_resample(p: Tensor, q: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
    """Accept drafted tokens with probability ``min(1, p/q)``, else draw from the residual ``max(p - q, 0)``.

    The returned token has distribution ``p`` whatever ``q`` is, provided that ``drafted`` was drawn from ``q``.

    Parameters
    ----------
    p, q : Tensor
        Target and draft distributions, ``[N, V]`` float32, rows summing to 1.
    drafted : Tensor
        Tokens drawn from ``q``, ``[N]`` int64.

    Returns
    -------
    tokens : Tensor
        ``[N]`` int64: the drafted token where accepted, else a draw from the residual.
    accepted : Tensor
        ``[N]`` bool.
    """
    at = drafted[:, None]
    p_at, q_at = p.gather(1, at)[:, 0], q.gather(1, at)[:, 0]
    accepted = torch.rand_like(p_at) * q_at < p_at
    if bool(accepted.all()):
        return drafted, accepted
    residual = (p - q).clamp_min_(0)
    # Where p == q the residual is empty, but then acceptance is certain and the draw is not used.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
    return torch.where(accepted, drafted, torch.multinomial(residual, 1)[:, 0]), accepted


def point_mass(token: Tensor, vocab_size: int) -> Tensor:
    """Distribution that is 1 at ``token``.

    Parameters
    ----------
    token : Tensor
        ``[N]`` int64.
    vocab_size : int
        Number of tokens V.

    Returns
    -------
    Tensor
        ``[N, V]`` float32.
    """
    return torch.zeros(token.shape[0], vocab_size, device=token.device).scatter_(1, token[:, None], 1.0)
