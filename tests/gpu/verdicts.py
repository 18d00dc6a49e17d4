"""Whether a drafter's outputs are its target's own: equal, left at a near tie, or different."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

STEPS = 4
"""Logits no further apart than this many steps of bfloat16, at the size of the larger one, are a near tie.

Each of the two is rounded to the nearest step, so two runs that agree before rounding can differ by one; what they add
up in another order before that comes on top. Of 2,000 outputs of the bundled checkpoint on an H200, drafted without a
window, two left their target's at three steps, and none beyond.
"""


@dataclass(frozen=True)
class Fork:
    """Where an output first leaves its target's: its index, the position, and the token in the target's place."""

    index: int
    position: int
    token: int


@dataclass(frozen=True)
class Gap:
    """Logits of a target's best token and of the drafter's, after what the two outputs have in common."""

    best: float
    theirs: float

    @property
    def margin(self) -> float:
        """What the drafter's token lacks; 0 where the target itself chooses it."""
        return self.best - self.theirs

    @property
    def steps(self) -> float:
        """The margin in steps of bfloat16 at the size of the best."""
        return self.margin / step_at(self.best)

    @property
    def near(self) -> bool:
        """Whether the two are a near tie."""
        return self.steps <= STEPS


@dataclass
class Verdict:
    """What was found of a batch of outputs.

    Attributes
    ----------
    equal : int
        Outputs that are their target's, or the beginning of it where they were aborted.
    gaps : list of Gap
        One for each output that left its target's at a near tie.
    different : list of str
        A sentence for each of the others.
    """

    equal: int = 0
    gaps: list[Gap] = field(default_factory=list)
    different: list[str] = field(default_factory=list)

    @property
    def largest_margin(self) -> float:
        """Of the near ties."""
        return max((gap.margin for gap in self.gaps), default=0.0)


def step_at(logit: float) -> float:
    """Distance of neighbouring bfloat16 numbers of this size."""
    return float(2.0 ** (math.floor(math.log2(abs(logit))) - 7)) if logit else 2.0**-133


def judge(
    targets: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    aborted: Sequence[bool],
    gaps_at: Callable[[list[Fork]], list[Gap]],
) -> Verdict:
    """Compare outputs with those of the target alone.

    Parameters
    ----------
    targets, outputs : sequence of sequence of int
        Tokens of the target alone, and with a drafter.
    aborted : sequence of bool
        Whether an output ended early, so that it is to be the beginning of the target's.
    gaps_at : callable
        Runs the target once more over what each output and the target's have in common.

    Returns
    -------
    Verdict
    """
    made, forks = Verdict(), []
    for index, (want, got, cut) in enumerate(zip(targets, outputs, aborted, strict=True)):
        position = next((at for at, pair in enumerate(zip(want, got, strict=False)) if pair[0] != pair[1]), None)
        if position is not None:
            forks.append(Fork(index, position, got[position]))
        elif len(got) > len(want) or (len(got) < len(want) and not cut):
            made.different.append(f"output {index} has {len(got)} tokens, not {len(want)}")
        else:
            made.equal += 1
    for fork, gap in zip(forks, gaps_at(forks) if forks else [], strict=True):
        if gap.near:
            made.gaps.append(gap)
        else:
            made.different.append(
                f"output {fork.index} has {fork.token} at {fork.position}, {gap.margin:.3f} below {gap.best:.3f}"
            )
    return made
