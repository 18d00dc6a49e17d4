"""Keys of a draft in closed form, against a row walked through; a report that is shared out, against the truth."""

from hypothesis import given, settings
from hypothesis import strategies as st

from windowed_mtp import SinkWindow
from windowed_mtp.engines.vllm.statistics import DraftPlan, Report, Step, drafted_in, shares


def keys_of_pass(entries: int, queries: int, block: int, window: SinkWindow | None) -> int:
    """Entries in blocks that hold one which some query of the pass may read."""
    if window is None or entries < window.min_context:
        return entries
    ends = range(entries - queries + 1, entries + 1)
    free = SinkWindow(window.sink, window.window)
    blocks = {position // block for end in ends for position in free.positions(max(end, 0))}
    return sum(position // block in blocks for position in range(entries))


@st.composite
def drafts(draw: st.DrawFn) -> tuple[DraftPlan, Step]:
    """A head's plan, and a step that fits it."""
    window = SinkWindow(draw(st.integers(0, 20)), draw(st.integers(1, 40)), draw(st.sampled_from([0, 0, 50, 90])))
    plan = DraftPlan(
        draw(st.sampled_from([window, window, None])),
        draw(st.integers(1, 5)),
        block_size=draw(st.integers(1, 17)),
        window_first_pass=draw(st.booleans()),
        padded=draw(st.booleans()),
    )
    before = draw(st.integers(0, plan.num_speculative_tokens + 1))
    return plan, Step(draw(st.integers(before + 2, 160)), before, draw(st.integers(1, plan.num_speculative_tokens + 1)))


@settings(max_examples=500)
@given(drafts())
def test_keys_of_a_head(drawn: tuple[DraftPlan, Step]):
    plan, step = drawn
    tokens, before = plan.num_speculative_tokens, step.emitted_before
    # What the target verified: tokens of the sequence before the step, then the last of them and the proposals.
    rows, computed = [], step.context - before - 1
    if before:
        queries = tokens + 1 if plan.padded else before
        rows.append((computed + queries, queries, plan.window_first_pass))
    for drafted in range(1, tokens):
        rows.append((computed + before + drafted, 1, True))
    read = sum(keys_of_pass(n, q, plan.block_size, plan.window if windowed else None) for n, q, windowed in rows)
    assert plan.keys(step) == (read, sum(n for n, _, _ in rows))


@given(drafts())
def test_larger_blocks_never_read_less(drawn: tuple[DraftPlan, Step]):
    plan, step = drawn
    args = plan.window, plan.num_speculative_tokens
    kept = {"window_first_pass": plan.window_first_pass, "padded": plan.padded}
    exact, small, large = (
        DraftPlan(*args, block_size=size, **kept).keys(step) for size in (1, plan.block_size, 3 * plan.block_size)
    )
    assert exact[0] <= small[0] <= large[0] <= large[1] == small[1] == exact[1]


def report_of(drafts: list[tuple[int, int]]) -> Report:
    """Of drafts with so many tokens each, and so many of them accepted."""
    drafted, accepted = (tuple(sum(each[index] > at for each in drafts) for at in range(4)) for index in (0, 1))
    return Report(len(drafts), drafted, accepted)


@st.composite
def iterations(draw: st.DrawFn) -> list[tuple[Step, int | None, tuple[int, int] | None]]:
    """Steps of an iteration, each with its part and its draft; neither of the two can be seen."""
    length, made = draw(st.integers(1, 4)), []
    for _ in range(draw(st.integers(1, 6))):
        tokens = draw(st.sampled_from([length, length, length, 0, draw(st.integers(0, length))]))
        accepted = draw(st.integers(0, tokens))
        finished = draw(st.booleans())
        emitted = draw(st.integers(1, accepted + 1)) if finished else accepted + 1
        part = draw(st.sampled_from([0, 0, 1, None]))
        may_draft = tokens > 0 or draw(st.booleans())
        step = Step(part, 1, emitted, may_draft=may_draft, finished=finished)
        made.append((step, part, (tokens, accepted) if tokens else None))
    return made


@settings(max_examples=1000)
@given(iterations())
def test_a_part_gets_no_draft_that_is_not_its_own(drawn: list[tuple[Step, int | None, tuple[int, int] | None]]):
    steps = [step for step, _, _ in drawn]
    report = report_of([draft for _, _, draft in drawn if draft])
    for (_, _, draft), verdict in zip(drawn, drafted_in(steps, report), strict=True):
        assert verdict is None or verdict == (draft is not None)
    given = list(shares(steps, report, lambda step: step.context))
    for part in {part for part, _ in given} - {None}:
        truth: Report | None = report_of([draft for _, its, draft in drawn if draft and its == part])
        for _, share in (each for each in given if each[0] == part):
            truth = truth and truth.without(share)
        assert truth is not None
    left: Report | None = report
    for _, share in given:
        left = left and left.without(share)
    assert left is not None and left.drafts == sum(left.drafted) == sum(left.accepted) == 0


@given(iterations())
def test_tested_tokens_are_never_too_few(drawn: list[tuple[Step, int | None, tuple[int, int] | None]]):
    drafts = [draft for _, _, draft in drawn if draft]
    report = report_of(drafts)
    truth = [sum(tokens > at <= accepted for tokens, accepted in drafts) for at in range(4)]
    assert all(bound >= exact for bound, exact in zip(report.tested, truth, strict=True))
    assert not report.even or list(report.tested) == truth
