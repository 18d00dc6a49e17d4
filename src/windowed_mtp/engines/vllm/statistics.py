"""What drafts read and what came of them: the scheduler's own counts, shared out by what an engine's front end sees."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import sub
from typing import Any, TypeVar

from windowed_mtp.engines.acceptance import by_position, conditional, unconditional
from windowed_mtp.engines.vllm.config import PluginConfig, PluginError
from windowed_mtp.paging import windowed_length
from windowed_mtp.window import SinkWindow

CONTEXTS = (1024, 4096, 16384, 65536, 262144)
"""Default bounds of context buckets, in tokens."""

_Part = TypeVar("_Part", bound=Hashable)
_HEADS = ("mtp", "eagle", "eagle3")


@dataclass
class History:
    """A request's last step: tokens that it emitted, and of the draft that it verified (``None``: not known)."""

    emitted: int = 0
    drafted: int | None = 0


@dataclass(frozen=True)
class Step:
    """What one iteration of the engine gave one request.

    Attributes
    ----------
    context : int or None
        Tokens of the sequence, prompt and output, before the step; ``None`` for a request that the front end no longer
        has.
    emitted_before : int or None
        Tokens emitted by the step before, over which the draft's first pass ran; 0 if that was the prefill, ``None``
        if it was not seen or if this one is the prefill.
    emitted : int
        Tokens that the step emitted. Of a request that stopped they may be fewer than were accepted.
    drafted_before : int or None
        Tokens of the draft that the step before verified; ``None`` for as many as are drafted at most.
    may_draft : bool
        Whether a draft can have been verified: not by a prefill, except where vLLM pads one of a single token.
    finished : bool
        Whether the engine ended the request with it.
    history : History or None
        Where the reader of steps keeps the request's last step, for the next one.
    """

    context: int | None
    emitted_before: int | None
    emitted: int
    drafted_before: int | None = None
    may_draft: bool = True
    finished: bool = False
    history: History | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Report:
    """The drafts that were verified in one iteration, as vLLM's scheduler reports them.

    Attributes
    ----------
    drafts : int
        Their number.
    drafted, accepted : tuple of int
        By draft position: how many drafts had a token there, and how many of these tokens were accepted.
    """

    drafts: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @classmethod
    def read(cls, stats: Any) -> Report:
        """Read vLLM's ``SpecDecodingStats``; ``None`` is an iteration without drafts."""
        if stats is None:
            return cls(0, (), ())
        drafted, accepted = stats.num_draft_tokens_per_pos, stats.num_accepted_tokens_per_pos
        return cls(stats.num_drafts, tuple(drafted), tuple(accepted))

    @classmethod
    def of(cls, drafted: int, accepted: Sequence[int], positions: int) -> Report:
        """Report drafts of one length, by the accepted tokens of each, in as many positions as others."""
        count = len(accepted)
        return cls(
            count,
            tuple(count * (index < drafted) for index in range(positions)),
            tuple(sum(each > index for each in accepted) for index in range(positions)),
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest draft; 0 without drafts."""
        return sum(count > 0 for count in self.drafted)

    @property
    def even(self) -> bool:
        """Whether all drafts have one length."""
        return all(count in (0, self.drafts) for count in self.drafted)

    @property
    def tested(self) -> tuple[int, ...]:
        """By draft position: drafts that had a token there, all before it being accepted.

        It is exact where the drafts have one length; where they have not, an upper bound, as a shorter draft may be
        among those that were accepted so far.
        """
        return tuple(map(min, (self.drafts, *self.accepted), self.drafted))

    def without(self, other: Report) -> Report | None:
        """Take drafts off; ``None`` if they cannot be among these."""
        drafts = self.drafts - other.drafts
        drafted = tuple(map(sub, self.drafted, other.drafted))
        accepted = tuple(map(sub, self.accepted, other.accepted))
        return Report(drafts, drafted, accepted) if min(drafts, *drafted, *accepted) >= 0 else None


def drafted_in(steps: Sequence[Step], report: Report, complete: bool = True) -> list[bool | None]:
    """Which of an iteration's steps verified a draft.

    Parameters
    ----------
    steps : sequence of Step
        Those of the front end.
    report : Report
        The iteration's drafts.
    complete : bool
        Whether the report is of these steps and no others.

    Returns
    -------
    list of (bool or None)
        ``None`` where it cannot be known: more steps could have had a draft than drafts are reported.
    """
    possible = sum(step.may_draft for step in steps)
    if complete and report.drafts in (0, possible):
        return [step.may_draft and report.drafts > 0 for step in steps]
    return [True if step.emitted > 1 else None if step.may_draft else False for step in steps]


def shares(
    steps: Sequence[Step], report: Report, part: Callable[[Step], _Part | None], complete: bool = True
) -> Iterator[tuple[_Part | None, Report]]:
    """Share a report out among parts, such as ranges of the context.

    A part gets what is surely its own: everything, if all that may have drafted belong to it; else the drafts of one
    length whose accepted tokens follow from what was emitted, and the rest if one part is left for it.

    Parameters
    ----------
    steps, report, complete
        As for `drafted_in`.
    part : callable
        Gives a step's part, or ``None`` if it has none.

    Yields
    ------
    tuple of (part, Report)
        They add up to the report; the part is ``None`` for what cannot be told.
    """
    if not report.drafts:
        return
    if not complete:
        yield None, report
        return
    known: dict[_Part | None, list[int]] = {}
    others: set[_Part | None] = set()
    for step, verdict in zip(steps, drafted_in(steps, report), strict=True):
        if verdict and report.even and (not step.finished or step.emitted > report.longest):
            known.setdefault(part(step), []).append(step.emitted - 1)
        elif verdict is not False:
            others.add(part(step))
    made = [(each, Report.of(report.longest, accepted, len(report.drafted))) for each, accepted in known.items()]
    rest: Report | None = report
    for _, its in made:
        rest = rest and rest.without(its)
    if rest is None or len(known.keys() | others) < 2:
        yield _only(known.keys() | others), report
        return
    yield from made
    if rest.drafts:
        yield _only(others), rest


def _only(parts: Set[_Part | None]) -> _Part | None:
    return next(iter(parts)) if len(parts) == 1 else None


@dataclass(frozen=True)
class DraftPlan:
    """The passes of a drafter, from which the keys that a draft reads follow in closed form.

    Attributes
    ----------
    window : SinkWindow or None
        What a draft query may read; ``None`` for everything.
    num_speculative_tokens : int
        Tokens a draft at most, at least 1.
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
    fixed : bool
        Whether every draft that is made has as many tokens. If not, the longest that is verified in an iteration tells
        how many were drafted: fewer than that where each of them was cut.
    not_counted : str or None
        Why keys are not counted, if they are not.
    """

    window: SinkWindow | None
    num_speculative_tokens: int
    block_size: int = 1
    window_first_pass: bool = True
    padded: bool = True
    slots: int = 0
    one_pass: bool = False
    own_queries: bool = False
    fixed: bool = True
    not_counted: str | None = None

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
            If the engine has no drafter.
        """
        config, speculative = PluginConfig.read(vllm_config.additional_config), vllm_config.speculative_config
        if speculative is None:
            raise PluginError("there are no drafts to count, as the engine has no speculative_config; set one.")
        cache, tokens, method = vllm_config.cache_config, speculative.num_speculative_tokens, speculative.method
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
            fixed=not getattr(speculative, "num_speculative_tokens_per_batch_size", None),
            not_counted=_not_counted(config, vllm_config),
        )

    def drafted(self, report: Report) -> int:
        """Tokens that each draft verified in an iteration was made with, as far as it is known."""
        return self.num_speculative_tokens if self.fixed else report.longest

    def passes(self, step: Step, drafted: int | None = None) -> list[tuple[int, int]]:
        """Entries and queries of the request's row in each pass of a draft of a step.

        A first pass over a prompt is prefill, and is left out.

        Parameters
        ----------
        step : Step
            One whose context, and what was emitted before, are known.
        drafted : int, optional
            Tokens that were drafted; as many as are drafted at most, by default.
        """
        assert step.context is not None and step.emitted_before is not None
        entries, tokens = step.context - 1, self.num_speculative_tokens if drafted is None else drafted
        if self.own_queries:
            return [(entries + tokens + 1, tokens + 1)]
        made = []
        if step.emitted_before:
            before = self.num_speculative_tokens if step.drafted_before is None else step.drafted_before
            queries = before + 1 if self.padded else step.emitted_before
            made.append((entries + queries - step.emitted_before + self.slots, queries + self.slots))
        if not self.one_pass:
            made += [(entries + self.slots + index, 1) for index in range(1, tokens)]
        return made

    def keys(self, step: Step, drafted: int | None = None) -> tuple[int, int]:
        """Keys that one draft layer reads for a draft, and what it would read without a window; as `passes`."""
        passes = self.passes(step, drafted)
        full = sum(entries for entries, _ in passes)
        if self.window is None:
            return full, full
        kept = passes if self.window_first_pass or not step.emitted_before else passes[1:]
        spared = sum(
            entries - windowed_length(entries, queries, block_size=self.block_size, window=self.window)
            for entries, queries in kept
        )
        return full - spared, full


def keys_of(
    plan: DraftPlan, steps: Sequence[Step], report: Report, complete: bool = True
) -> Iterator[tuple[Step, int, int]]:
    """Count the keys of an iteration's drafts, and note for the next iteration what each step verified.

    Parameters
    ----------
    plan : DraftPlan
        The drafter's passes.
    steps, report, complete
        As for `drafted_in`.

    Yields
    ------
    tuple of (Step, int, int)
        Keys read and keys without a window, for each step that surely verified a draft of which both are known.
    """
    drafted = plan.drafted(report)
    for step, verdict in zip(steps, drafted_in(steps, report, complete), strict=True):
        if step.history is not None:
            step.history.drafted = 0 if verdict is False else drafted if verdict else None
        if verdict and plan.not_counted is None and None not in (step.context, step.emitted_before):
            yield step, *plan.keys(step, drafted)


def _not_counted(config: PluginConfig | None, vllm_config: Any) -> str | None:
    """Say why the front end cannot know what the engine's draft reads; ``None`` if it can."""
    speculative = vllm_config.speculative_config
    parallel = getattr(speculative, "parallel_drafting", False) or speculative.method == "dflash"
    table = getattr(speculative, "num_speculative_tokens_per_batch_size", None)
    if config is not None and not config.strict:
        return 'with "strict": false the front end is not told whether the window is in force'
    if speculative.method not in (*_HEADS, "draft_model", "dflash"):
        return f"the passes of this drafter ({speculative.method or 'none'}) are not known"
    if getattr(vllm_config, "use_v2_model_runner", False) and speculative.use_multi_module_mtp():
        return "the head has several modules, each with its own entries"
    if table and parallel:
        return "the passes of a parallel drafter are not known where the number of draft tokens changes"
    if table and not sees_all(vllm_config):
        return "the number of draft tokens changes, and an API server is told of all drafts together or of none"
    return None


def sees_all(vllm_config: Any) -> bool:
    """Whether the engine has one front end, which gets every output beside the scheduler's report of it."""
    return getattr(getattr(vllm_config, "parallel_config", None), "_api_process_count", 1) == 1


@dataclass
class DraftStatistics:
    """Counts over drafts that were verified.

    Attributes
    ----------
    drafts : int
        Their number, as vLLM's scheduler reports it.
    drafted_per_position, accepted_per_position : list of int
        By draft position: how many drafts had a token there, and how many of these tokens were accepted. A request that
        stops inside a draft has accepted tokens that it does not emit.
    tested_per_position : list of int
        By draft position: drafts that had a token there, all before it being accepted.
    uneven_drafts : int
        Drafts that were verified beside some of another length: among these ``tested_per_position`` is an upper bound,
        as the report does not say which draft was the shorter one.
    keyed_drafts : int
        Drafts whose keys were counted: all, unless it cannot be known who drafted, or from which state.
    windowed_drafts : int
        Of these, the ones that read less than everything.
    keys_read, keys_full : int
        Keys that one draft layer read for them, and would have read without a window; prefill excluded.
    """

    drafts: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    tested_per_position: list[int] = field(default_factory=list)
    uneven_drafts: int = 0
    keyed_drafts: int = 0
    windowed_drafts: int = 0
    keys_read: int = 0
    keys_full: int = 0

    @property
    def draft_tokens(self) -> int:
        """Tokens of all drafts."""
        return sum(self.drafted_per_position)

    @property
    def accepted_tokens(self) -> int:
        """Tokens that were accepted."""
        return sum(self.accepted_per_position)

    @property
    def acceptance_length(self) -> float:
        """Mean number of accepted tokens of a draft and the target's own one (AL); NaN before the first draft."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else float("nan")

    @property
    def unconditional_acceptance(self) -> list[float]:
        """By draft position: share of all drafts whose token was accepted."""
        return unconditional(self.accepted_per_position, self.drafts)

    @property
    def conditional_acceptance(self) -> list[float]:
        """By draft position: share accepted, given that all before it in the draft were.

        A lower bound if there are ``uneven_drafts``; NaN where no draft got so far.
        """
        return conditional(self.accepted_per_position, self.tested_per_position)

    @property
    def share_read(self) -> float:
        """Keys read as a share of what a full draft would have read; NaN before the first."""
        return self.keys_read / self.keys_full if self.keys_full else float("nan")

    def add(self, report: Report) -> None:
        """Count reported drafts."""
        self.drafts += report.drafts
        self.uneven_drafts += 0 if report.even else report.drafts
        for counts, more in (
            (self.drafted_per_position, report.drafted),
            (self.accepted_per_position, report.accepted),
            (self.tested_per_position, report.tested),
        ):
            counts[:] = map(sum, zip_longest(counts, more, fillvalue=0))

    def add_keys(self, read: int, full: int) -> None:
        """Count the keys of one draft."""
        self.keyed_drafts += 1
        self.windowed_drafts += read < full
        self.keys_read += read
        self.keys_full += full


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
    elsewhere : DraftStatistics
        Drafts of which the front end cannot tell the context: of requests that it has dropped, or where requests in
        several buckets stopped at once.
    total : DraftStatistics
        All drafts; the counts of drafts and tokens are the scheduler's own.

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
        self.elsewhere = DraftStatistics()
        self.total = DraftStatistics()

    def add(self, steps: Sequence[Step], report: Report) -> None:
        """Count one iteration of the engine: what each request got, and the drafts that the scheduler reports."""
        for step, read, full in keys_of(self.plan, steps, report):
            for counts in (self._bucket(step), self.total):
                counts.add_keys(read, full)
        for index, share in shares(steps, report, self._index):
            for counts in (self.elsewhere if index is None else self.buckets[index], self.total):
                counts.add(share)

    def table(self) -> str:
        """Lay the counts out as text: a line for each bucket that has drafts, one for all, and what to know of them."""
        names = [f"< {self.bounds[0]:,}"] if self.bounds else []
        names += [f"{low:,} - {high - 1:,}" for low, high in zip(self.bounds, self.bounds[1:], strict=False)]
        names += [f">= {self.bounds[-1]:,}"] if self.bounds else ["any"]
        counted = [*zip(names, self.buckets, strict=True), ("not known", self.elsewhere)]
        rows = [_HEAD, *(_row(name, counts) for name, counts in counted if counts.drafts), _row("all", self.total)]
        if self.plan.not_counted:
            rows = [row[:_KEYS] for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join((first.ljust(widths[0]), *map(str.rjust, rest, widths[1:]))).rstrip() for first, *rest in rows
        ]
        return "\n".join([*lines, *self._notes()])

    def _index(self, step: Step) -> int | None:
        return None if step.context is None else bisect_right(self.bounds, step.context)

    def _bucket(self, step: Step) -> DraftStatistics:
        index = self._index(step)
        assert index is not None  # its keys are known
        return self.buckets[index]

    def _notes(self) -> Iterator[str]:
        total = self.total
        if total.uneven_drafts:
            yield (
                f"{total.uneven_drafts:,} drafts were verified beside some of another length: there the conditional "
                "acceptance is a lower bound."
            )
        if self.plan.not_counted:
            yield f"Draft keys are not counted: {self.plan.not_counted}."
        elif total.keyed_drafts != total.drafts:
            yield f"Draft keys are known of {total.keyed_drafts:,} of {total.drafts:,} drafts."


_ACCEPTANCE = "unconditional acceptance", "conditional acceptance"
_HEAD = ("context", "drafts", "AL", *_ACCEPTANCE, "windowed", "keys/draft", "full", "read")
_KEYS = _HEAD.index("windowed")


def _row(name: str, counts: DraftStatistics) -> tuple[str, ...]:
    keyed = counts.keyed_drafts
    return (
        name,
        f"{counts.drafts:,}",
        f"{counts.acceptance_length:.2f}",
        by_position(counts.unconditional_acceptance),
        by_position(counts.conditional_acceptance),
        f"{counts.windowed_drafts:,}",
        f"{counts.keys_read / keyed:,.0f}" if keyed else "-",
        f"{counts.keys_full / keyed:,.0f}" if keyed else "-",
        f"{counts.share_read:.1%}" if keyed else "-",
    )
