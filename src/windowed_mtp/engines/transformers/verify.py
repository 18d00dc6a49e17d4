"""Acceptance rules: which drafted tokens the target keeps, and which token it emits itself.

Both rules leave the output as the target alone would have produced it: the greedy one token for token, the sampled
one in distribution (Leviathan et al., 2023, arXiv 2211.17192, appendix A.1).
"""

from __future__ import annotations

import torch
from torch import Tensor


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Probability of accepting each token where it is drafted: ``min(1, p/q)``.

    Parameters
    ----------
    p, q : Tensor
        Target and draft probabilities of the same tokens, any equal shape, float32; ``q > 0`` where a token can be
        drafted.

    Returns
    -------
    Tensor
        The same shape; 1 where ``q`` is 0.
    """
    return torch.where(q > 0, p / q, 1.0).clamp_max(1.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Distribution drawn from after a rejection: ``max(p - q, 0)``, normalised.

    Parameters
    ----------
    p, q : Tensor
        Target and draft distributions, ``[N, V]`` float32, rows summing to 1.

    Returns
    -------
    Tensor
        ``[N, V]``; ``p`` in rows where nothing is left, which are never rejected.
    """
    left = (p - q).clamp_min(0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, p)


def accept_or_resample(p: Tensor, q: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
    """Accept drafted tokens with probability ``min(1, p/q)``, else draw from the residual.

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
    chance = acceptance(p.gather(1, drafted[:, None]), q.gather(1, drafted[:, None]))[:, 0]
    accepted = torch.rand_like(chance) < chance
    redrawn = torch.multinomial(residual(p, q), 1)[:, 0]
    return torch.where(accepted, drafted, redrawn), accepted


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
