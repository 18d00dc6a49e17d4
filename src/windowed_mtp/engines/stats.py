"""Counts and times of one generation."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from windowed_mtp.engines.acceptance import conditional, unconditional
from windowed_mtp.engines.protocol import StepEvent


@dataclass
class DecodeStats:
    """What one call of ``generate`` did.

    Attributes
    ----------
    prompt_tokens, new_tokens : int
        Tokens in the prompt, and tokens generated (the first comes from the prefill, not from a step).
    steps : int
        Number of target forward passes after the prefill.
    step_tokens : int
        Tokens emitted by steps.
    proposed, accepted : list of int
        By draft position: how often a token of the output was tested against a proposal there, all before it being
        accepted, and how often it was accepted. What was verified beyond the output's end does not count.
    draft_keys_read : int
        Keys that draft attention read over all steps (prefill excluded).
    draft_kv_bytes : int
        Bytes of draft KV in use at the end.
    hot_head_bytes : int
        Bytes of the output head's hot rows, which are held beside the head; 0 where all tokens are hot.
    target_prefill_seconds, draft_prefill_seconds, draft_seconds, verify_seconds : float
        Wall times in seconds.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    step_tokens: int = 0
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    draft_keys_read: int = 0
    draft_kv_bytes: int = 0
    hot_head_bytes: int = 0
    target_prefill_seconds: float = 0.0
    draft_prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted a step (AL); NaN before the first step."""
        return self.step_tokens / self.steps if self.steps else float("nan")

    @property
    def unconditional_acceptance(self) -> list[float]:
        """By draft position: share of all drafts whose token was accepted."""
        return unconditional(self.accepted, self.proposed[0]) if self.proposed else []

    @property
    def conditional_acceptance(self) -> list[float]:
        """By draft position: share of tokens accepted, given that all before it in the draft were."""
        return conditional(self.accepted, self.proposed)

    @property
    def ms_per_step(self) -> float:
        """Mean wall time of a step in milliseconds, draft and verify; NaN before the first step."""
        return 1e3 * (self.draft_seconds + self.verify_seconds) / self.steps if self.steps else float("nan")

    @property
    def keys_per_step(self) -> float:
        """Mean number of draft keys read a step; NaN before the first step."""
        return self.draft_keys_read / self.steps if self.steps else float("nan")

    def add(self, event: StepEvent) -> None:
        """Count one step."""
        self.steps += 1
        self.step_tokens += len(event.emitted)
        self.draft_keys_read += event.draft_keys
        self.draft_seconds += event.draft_seconds
        self.verify_seconds += event.verify_seconds
        tested = min(len(event.emitted), len(event.proposed))
        while len(self.proposed) < tested:
            self.proposed.append(0)
            self.accepted.append(0)
        for position in range(tested):
            self.proposed[position] += 1
            self.accepted[position] += position < event.accepted


class StatsByThread:
    """The last counts of each thread, so that generations side by side do not see each other's."""

    def __init__(self) -> None:
        self._last = DecodeStats()
        self._by_thread: WeakKeyDictionary[threading.Thread, DecodeStats] = WeakKeyDictionary()

    def put(self, stats: DecodeStats) -> None:
        """Keep the counts of a generation of this thread."""
        self._last = self._by_thread[threading.current_thread()] = stats

    def get(self) -> DecodeStats:
        """Return this thread's counts; in a thread without a generation, the last of any."""
        return self._by_thread.get(threading.current_thread(), self._last)
