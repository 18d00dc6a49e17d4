"""The two acceptances of a draft position, from counts.

A draft proposes tokens at positions 0, 1, ...; the target accepts the first a of them. Over D verified drafts let A_j
be the drafts with a > j, and T_j those that had a token at position j with all before it accepted.

- *Unconditional*: A_j / D, a share of all drafts. vLLM's "Per-position acceptance rate" is this one. It never rises
  with j, its sum is AL - 1, and a draft too short to have a token at j counts as one that did not accept it.
- *Conditional*: A_j / T_j, given that all before it were accepted. T_0 is D; with drafts of one length T_j is A_(j-1).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan


def unconditional(accepted: Sequence[float], drafts: float) -> list[float]:
    """Share of all drafts whose token was accepted, by draft position.

    Parameters
    ----------
    accepted : sequence of float
        By draft position: drafts whose token there was accepted.
    drafts : float
        All drafts that were verified.

    Returns
    -------
    list of float
        NaN without drafts.
    """
    return [_share(count, drafts) for count in accepted]


def conditional(accepted: Sequence[float], tested: Sequence[float]) -> list[float]:
    """Share of tested tokens that were accepted, by draft position.

    Parameters
    ----------
    accepted, tested : sequence of float
        By draft position: drafts whose token there was accepted, and those that had one there, all before it being
        accepted.

    Returns
    -------
    list of float
        NaN where nothing was tested.
    """
    return [_share(count, of) for count, of in zip(accepted, tested, strict=True)]


def _share(count: float, of: float) -> float:
    return count / of if of else float("nan")


def by_position(shares: Sequence[float], digits: int = 2) -> str:
    """Write shares in the order of positions, such as ``"0.81 0.62 -"``; a dash for NaN."""
    return " ".join("-" if isnan(share) else f"{share:.{digits}f}" for share in shares)
