"""Keys of a draft in closed form equal those of a row walked through, entry by entry."""

from hypothesis import given, settings
from hypothesis import strategies as st

from windowed_mtp import SinkWindow
from windowed_mtp.engines.vllm.statistics import DraftPlan, Step


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
