"""What holds for every window, every length and every pass."""

from hypothesis import given, settings
from hypothesis import strategies as st

from windowed_mtp.window import SinkWindow

SINKS = st.integers(0, 40)
WINDOWS = st.integers(1, 60)
LENGTHS = st.integers(0, 200)


@st.composite
def passes(draw: st.DrawFn) -> tuple[int, int]:
    """A pass that can be: its length and its number of queries."""
    length = draw(st.integers(1, 200))
    return length, draw(st.integers(1, length))


@settings(deadline=None)
@given(SINKS, WINDOWS, st.integers(0, 220), LENGTHS)
def test_positions_equal_the_definition(sink: int, window: int, min_context: int, length: int):
    policy = SinkWindow(sink, window, min_context)
    everything = range(length)
    expected = [p for p in everything if length < min_context or p < sink or p >= length - window]
    assert policy.positions(length) == expected
    assert policy.num_keys(length) == len(expected)
    assert policy.engages(length) == (len(expected) < length)


@settings(deadline=None)
@given(SINKS, WINDOWS, passes())
def test_a_pass_reads_the_union_of_its_queries(sink: int, window: int, a_pass: tuple[int, int]):
    policy, (length, query_len) = SinkWindow(sink, window), a_pass
    union = {p for end in range(length - query_len + 1, length + 1) for p in policy.positions(end)}
    assert policy.positions(length, query_len) == sorted(union)


@settings(deadline=None)
@given(SINKS, WINDOWS, st.integers(0, 220), passes())
def test_a_pass_reads_at_most_its_other_queries_more(sink: int, window: int, min_context: int, a_pass: tuple[int, int]):
    policy, (length, query_len) = SinkWindow(sink, window, min_context), a_pass
    read = policy.positions(length, query_len)
    assert set(policy.positions(length)) <= set(read)
    assert len(read) - policy.num_keys(length) <= query_len - 1


@settings(deadline=None)
@given(SINKS, WINDOWS, st.integers(0, 220), passes())
def test_tail_start_splits_the_positions(sink: int, window: int, min_context: int, a_pass: tuple[int, int]):
    policy, (length, query_len) = SinkWindow(sink, window, min_context), a_pass
    start, read = policy.tail_start(length, query_len), policy.positions(length, query_len)
    assert [p for p in read if p >= sink] == list(range(start, length))
    assert [p for p in read if p < sink] == list(range(min(sink, length)))


@settings(deadline=None)
@given(SINKS, WINDOWS, LENGTHS)
def test_a_window_is_inert_up_to_its_span(sink: int, window: int, length: int):
    policy = SinkWindow(sink, window)
    assert policy.engages(length) == (length > sink + window)
    assert policy.num_keys(length) == min(length, sink + window)


@settings(deadline=None)
@given(SINKS, WINDOWS, st.integers(0, 40), st.integers(0, 60), LENGTHS)
def test_a_wider_window_reads_no_less(sink: int, window: int, more_sink: int, more_window: int, length: int):
    narrow, wide = SinkWindow(sink, window), SinkWindow(sink + more_sink, window + more_window)
    assert set(narrow.positions(length)) <= set(wide.positions(length))
