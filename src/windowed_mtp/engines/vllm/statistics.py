"""What drafts read and what came of them, counted from the lengths and tokens that an engine's front end sees."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from windowed_mtp.engines.vllm.config import PluginConfig, PluginError
from windowed_mtp.paging import windowed_length
from windowed_mtp.window import SinkWindow

CONTEXTS = (1024, 4096, 16384, 65536, 262144)
"""Default bounds of context buckets, in tokens."""

_HEADS = ("mtp", "eagle", "eagle3")


@dataclass(frozen=True)
class Step:
    """One draft of one request and its verification.

    Attributes
    ----------
    context : int
        Tokens of the sequence, prompt and output, when the draft was made.
    emitted_before : int
        Tokens emitted by the step that made the draft, over which its first pass ran; 0 if that was the prefill.
    emitted : int
        Tokens that the verification emitted: the accepted ones and one more, or fewer where a request stopped.
    """

    context: int
    emitted_before: int
    emitted: int


@dataclass(frozen=True)
class DraftPlan:
    """The passes of a drafter, from which the keys that a draft reads follow in closed form.

    Attributes
    ----------
    window : SinkWindow or None
        What a draft query may read; ``None`` for everything.
    num_speculative_tokens : int
        Tokens a draft, at least 1.
    block_size : int
        Tokens a block to which sink and window are rounded outward; 1 counts keys by the definition.
    window_first_pass : bool
        Whether the pass over the verified tokens is windowed too.
    padded : bool
        Whether that pass also holds the rejected tokens, as it does unless ``disable_padded_drafter_batch`` is set.
    slots : int
        Entries that the drafter adds to each row of that pass.
    one_pass : bool
        Whether there is no other pass.
    own_queries : bool
        Whether the only pass runs over queries of its own after the verified tokens (DFlash).
    """

    window: SinkWindow | None
    num_speculative_tokens: int
    block_size: int = 1
    window_first_pass: bool = True
    padded: bool = True
    slots: int = 0
    one_pass: bool = False
    own_queries: bool = False

    @classmethod
    def read(cls, vllm_config: Any) -> DraftPlan:
        """Read a started engine's settings.

        Parameters
        ----------
        vllm_config : VllmConfig
            As the front end has it.

        Returns
        -------
        DraftPlan
            In blocks of the engine's attention. A kernel that splits them reads less, never more.

        Raises
        ------
        PluginError
            If the front end cannot know what the engine's draft reads.
        """
        config, speculative = PluginConfig.read(vllm_config.additional_config), vllm_config.speculative_config
        if config is not None and not config.strict:
            raise _not_counted('with "strict": false the front end is not told whether the window is in force')
        method = getattr(speculative, "method", None)
        if method not in (*_HEADS, "draft_model", "dflash"):
            raise _not_counted(f"the passes of this drafter ({method or 'none'}) are not known")
        if getattr(speculative, "num_speculative_tokens_per_batch_size", None):
            raise _not_counted("the number of draft tokens changes from step to step")
        if getattr(vllm_config, "use_v2_model_runner", False) and speculative.use_multi_module_mtp():
            raise _not_counted("the head has several modules, each with its own entries")
        cache, tokens = vllm_config.cache_config, speculative.num_speculative_tokens
        parallel = bool(getattr(speculative, "parallel_drafting", False))
        return cls(
            window=None if config is None else config.window,
            num_speculative_tokens=tokens,
            block_size=getattr(cache, "effective_attention_block_size", None) or cache.block_size,
            window_first_pass=config is None or config.window_first_pass,
            padded=not getattr(speculative, "disable_padded_drafter_batch", False),
            slots=(tokens if parallel else 1) - (method in _HEADS) if method != "dflash" else 0,
            one_pass=parallel or method == "dflash",
            own_queries=method == "dflash",
        )

    def passes(self, step: Step) -> list[tuple[int, int]]:
        """Entries and queries of the request's row in each pass of a draft.

        A first pass over a prompt is prefill, and is left out.
        """
        entries, tokens = step.context - 1, self.num_speculative_tokens
        if self.own_queries:
            return [(entries + tokens + 1, tokens + 1)]
        made = []
        if step.emitted_before:
            queries = tokens + 1 if self.padded else step.emitted_before
            made.append((entries + queries - step.emitted_before + self.slots, queries + self.slots))
        if not self.one_pass:
            made += [(entries + self.slots + index, 1) for index in range(1, tokens)]
        return made

    def keys(self, step: Step) -> tuple[int, int]:
        """Keys that one draft layer reads for a draft, and what it would read without a window."""
        passes = self.passes(step)
        full = sum(entries for entries, _ in passes)
        if self.window is None:
            return full, full
        kept = passes if self.window_first_pass or not step.emitted_before else passes[1:]
        spared = sum(
            entries - windowed_length(entries, queries, block_size=self.block_size, window=self.window)
            for entries, queries in kept
        )
        return full - spared, full


def _not_counted(reason: str) -> PluginError:
    return PluginError(f"draft keys are not counted, as {reason}; vLLM's own spec_decode metrics give the acceptance.")


@dataclass
class DraftStatistics:
    """Counts over steps.

    Attributes
    ----------
    steps : int
        Drafts that were verified.
    windowed_steps : int
        Those whose draft read less than everything.
    emitted : int
        Tokens that the steps emitted.
    accepted_per_position : list of int
        By draft position: how many steps accepted its token.
    keys_read, keys_full : int
        Keys that one draft layer read, and would have read without a window; prefill excluded.
    """

    steps: int = 0
    windowed_steps: int = 0
    emitted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    keys_read: int = 0
    keys_full: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted a step (AL); NaN before the first step."""
        return self.emitted / self.steps if self.steps else float("nan")

    @property
    def acceptance(self) -> list[float]:
        """By draft position: share of all steps that accepted its token."""
        return [count / self.steps for count in self.accepted_per_position]

    @property
    def share_read(self) -> float:
        """Keys read as a share of what a full draft would have read; NaN before the first."""
        return self.keys_read / self.keys_full if self.keys_full else float("nan")

    def add(self, step: Step, plan: DraftPlan) -> None:
        """Count one step."""
        read, full = plan.keys(step)
        self.steps += 1
        self.windowed_steps += read < full
        self.emitted += step.emitted
        self.keys_read += read
        self.keys_full += full
        missing = plan.num_speculative_tokens - len(self.accepted_per_position)
        self.accepted_per_position += [0] * missing
        for position in range(step.emitted - 1):
            self.accepted_per_position[position] += 1


class ContextStatistics:
    """Counts over steps, by the context that a draft was made at.

    Parameters
    ----------
    plan : DraftPlan
        The drafter's passes.
    bounds : sequence of int
        Increasing contexts in tokens, at each of which a new bucket begins.

    Attributes
    ----------
    buckets : list of DraftStatistics
        ``len(bounds) + 1`` buckets, the shortest contexts first.
    total : DraftStatistics
        All steps.

    Raises
    ------
    PluginError
        If the bounds do not increase.
    """

    def __init__(self, plan: DraftPlan, bounds: Sequence[int] = CONTEXTS) -> None:
        if list(bounds) != sorted(set(bounds)):
            raise PluginError(f"the bounds of context buckets are {list(bounds)}, but they must increase; sort them.")
        self.plan = plan
        self.bounds = tuple(bounds)
        self.buckets = [DraftStatistics() for _ in range(len(self.bounds) + 1)]
        self.total = DraftStatistics()

    def add(self, step: Step) -> None:
        """Count one step."""
        for counts in (self.buckets[bisect_right(self.bounds, step.context)], self.total):
            counts.add(step, self.plan)

    def table(self) -> str:
        """Lay the counts out as text: a line for each bucket that has steps, and one for all of them."""
        head = ("context", "steps", "windowed", "AL", "accepted by position", "keys/step", "full", "read")
        names = [f"< {self.bounds[0]:,}"] if self.bounds else []
        names += [f"{low:,} - {high - 1:,}" for low, high in zip(self.bounds, self.bounds[1:], strict=False)]
        names += [f">= {self.bounds[-1]:,}"] if self.bounds else []
        rows = [head, *(_row(name, counts) for name, counts in zip(names, self.buckets, strict=False) if counts.steps)]
        rows.append(_row("all", self.total))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join((first.ljust(widths[0]), *map(str.rjust, rest, widths[1:]))).rstrip() for first, *rest in rows
        )
        return "\n".join(lines)


def _row(name: str, counts: DraftStatistics) -> tuple[str, ...]:
    steps = counts.steps or 1
    return (
        name,
        f"{counts.steps:,}",
        f"{counts.windowed_steps:,}",
        f"{counts.acceptance_length:.2f}",
        " ".join(f"{share:.2f}" for share in counts.acceptance),
        f"{counts.keys_read / steps:,.0f}",
        f"{counts.keys_full / steps:,.0f}",
        f"{counts.share_read:.1%}",
    )
