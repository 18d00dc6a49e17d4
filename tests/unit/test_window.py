"""The closed forms of the visible set against its definition, and the sentences for bad input."""

import re

import pytest

from windowed_mtp.errors import WindowedMTPError, WindowError
from windowed_mtp.window import SinkWindow


def visible(sink: int, window: int, min_context: int, length: int) -> set[int]:
    """The definition, entry by entry."""
    if length < min_context:
        return set(range(length))
    return {p for p in range(length) if p < sink or p >= length - window}


def test_defaults_are_the_papers_operating_point():
    assert SinkWindow() == SinkWindow(sink=64, window=4032, min_context=0)
    assert SinkWindow().span == 4096


@pytest.mark.parametrize("min_context", [0, 1, 5, 9, 40])
@pytest.mark.parametrize("window", [1, 2, 5, 30])
@pytest.mark.parametrize("sink", [0, 1, 2, 4])
def test_closed_forms_equal_the_definition(sink: int, window: int, min_context: int):
    policy = SinkWindow(sink, window, min_context)
    for length in range(45):
        expected = visible(sink, window, min_context, length)
        assert policy.positions(length) == sorted(expected)
        assert policy.num_keys(length) == len(expected)
        assert policy.engages(length) == (len(expected) < length)


@pytest.mark.parametrize(
    ("policy", "length", "expected"),
    [
        (SinkWindow(0, 1), 0, []),
        (SinkWindow(0, 1), 1, [0]),
        (SinkWindow(0, 1), 7, [6]),
        (SinkWindow(1, 2), 3, [0, 1, 2]),
        (SinkWindow(1, 2), 4, [0, 2, 3]),
        (SinkWindow(1, 2), 9, [0, 7, 8]),
        (SinkWindow(3, 100), 6, [0, 1, 2, 3, 4, 5]),
        (SinkWindow(9, 1), 4, [0, 1, 2, 3]),
        (SinkWindow(1, 2, min_context=6), 5, [0, 1, 2, 3, 4]),
        (SinkWindow(1, 2, min_context=6), 6, [0, 4, 5]),
    ],
)
def test_positions_by_hand(policy: SinkWindow, length: int, expected: list[int]):
    assert policy.positions(length) == expected


@pytest.mark.parametrize(
    ("length", "query_len", "expected"),
    [
        (10, 1, [0, 8, 9]),
        (10, 2, [0, 7, 8, 9]),
        (10, 4, [0, 5, 6, 7, 8, 9]),
        (4, 4, [0, 1, 2, 3]),
        (5, 3, [0, 1, 2, 3, 4]),
    ],
)
def test_a_pass_of_several_queries_takes_the_bound_of_its_first(length: int, query_len: int, expected: list[int]):
    assert SinkWindow(1, 2).positions(length, query_len) == expected


@pytest.mark.parametrize(
    ("length", "query_len", "expected"),
    [(0, 1, 0), (2, 1, 2), (4, 1, 4), (7, 1, 4), (8, 1, 5), (20, 1, 17), (20, 6, 12), (20, 20, 4)],
)
def test_tail_start(length: int, query_len: int, expected: int):
    assert SinkWindow(4, 3).tail_start(length, query_len) == expected


def test_tail_start_below_min_context_is_the_end_of_the_sinks():
    policy = SinkWindow(4, 3, min_context=20)
    assert [policy.tail_start(length) for length in (2, 19, 20)] == [2, 4, 17]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sink": -1}, "sink is -1, but it must be at least 0; pass a larger value."),
        ({"window": 0}, "window is 0, but it must be at least 1; pass a larger value."),
        ({"min_context": -2}, "min_context is -2, but it must be at least 0; pass a larger value."),
        ({"window": 1.5}, "window is 1.5, but it must be a whole number; pass an integer."),
        ({"sink": "64"}, "sink is '64', but it must be a whole number; pass an integer."),
        ({"min_context": None}, "min_context is None, but it must be a whole number; pass an integer."),
    ],
)
def test_bad_values_are_refused_in_one_sentence(arguments: dict, message: str):
    with pytest.raises(WindowError, match=f"^{re.escape(message)}$"):
        SinkWindow(**arguments)


@pytest.mark.parametrize(("length", "query_len"), [(-1, 1), (3, 0), (3, -1), (3, 4), (0, 2)])
def test_an_impossible_pass_is_refused_in_one_sentence(length: int, query_len: int):
    message = f"a pass of {query_len} queries cannot end at {length} entries; pass 1 <= query_len <= length."
    with pytest.raises(WindowError, match=f"^{re.escape(message)}$"):
        SinkWindow().positions(length, query_len)


def test_errors_are_value_errors_of_the_package():
    assert issubclass(WindowError, WindowedMTPError)
    assert issubclass(WindowedMTPError, ValueError)


def test_a_window_is_an_immutable_value():
    policy = SinkWindow(1, 2)
    assert hash(policy) == hash(SinkWindow(1, 2))
    with pytest.raises(AttributeError):
        policy.window = 3  # type: ignore[misc]
