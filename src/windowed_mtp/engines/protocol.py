"""What an engine tells the outside about its steps, and what the outside may decide for it.

Probes, benchmarks and depth controllers see an engine only through these types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepContext:
    """The state before a step.

    Attributes
    ----------
    step : int
        Index of the step, from 0.
    ids : Any
        Token ids so far, a ``[1, length]`` int64 tensor; not to be modified.
    length : int
        Number of tokens so far.
    remaining : int
        Largest number of tokens that may still be emitted.
    """

    step: int
    ids: Any
    length: int
    remaining: int


@dataclass(frozen=True)
class StepEvent:
    """One finished step: draft, verify, emit.

    Attributes
    ----------
    step : int
        Index of the step, from 0.
    length : int
        Number of tokens before the step.
    depth : int
        Number of tokens the step was asked to draft.
    proposed : tuple of int
        Tokens handed to verification.
    accepted : int
        How many of them were emitted: those that the target accepted, less what a stopping criterion cut.
    emitted : tuple of int
        Tokens the step appended: the accepted ones, then, unless a stopping criterion cut it, the target's own.
    draft_keys : int
        Keys that the draft's attention read in the step, summed over its passes and layers.
    draft_seconds, verify_seconds : float
        Wall time of the two halves, in seconds. On a GPU they are exact only if the engine synchronises.
    shadow : mapping of str to tuple of int
        What each shadow head would have proposed at the same point.
    """

    step: int
    length: int
    depth: int
    proposed: tuple[int, ...]
    accepted: int
    emitted: tuple[int, ...]
    draft_keys: int
    draft_seconds: float
    verify_seconds: float
    shadow: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


DepthPolicy = Callable[[StepContext], int]
"""Gives the number of tokens to draft in the coming step; 0 skips the draft."""

ProposalOverride = Callable[[StepContext, tuple[int, ...]], Sequence[int] | None]
"""Replaces the head's proposals (second argument) before verification; ``None`` keeps them."""

StepObserver = Callable[[StepEvent], None]
"""Called after every step."""
