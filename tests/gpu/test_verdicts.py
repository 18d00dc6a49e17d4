"""What compares a drafter's outputs with its target's finds what was planted; no device is needed."""

import pytest
from verdicts import STEPS, Fork, Gap, judge, step_at

TARGET = [[1, 2, 3, 4], [5, 6, 7, 8]]


def never(forks: list[Fork]) -> list[Gap]:
    raise AssertionError(f"nothing differs: {forks}")


def test_steps_of_bfloat16():
    assert [step_at(logit) for logit in (1.0, 1.99, -2.0, 20.0, 127.0)] == [2**-7, 2**-7, 2**-6, 0.125, 0.5]
    assert step_at(0.0) > 0


def test_equal_outputs_and_beginnings_of_aborted_ones():
    verdict = judge(TARGET, [[1, 2, 3, 4], [5, 6]], [False, True], never)
    assert (verdict.equal, verdict.gaps, verdict.different) == (2, [], [])


@pytest.mark.parametrize(
    ("outputs", "aborted"), [([[1, 2, 3, 4], [5, 6]], [False, False]), ([[1, 2, 3, 4, 9], [5, 6]], [True, True])]
)
def test_an_output_of_another_length_is_different(outputs: list[list[int]], aborted: list[bool]):
    verdict = judge(TARGET, outputs, aborted, never)
    assert verdict.equal == 1 and len(verdict.different) == 1


def test_a_planted_difference_is_near_or_not_by_its_first_token():
    seen: list[Fork] = []

    def gaps_at(forks: list[Fork]) -> list[Gap]:
        seen.extend(forks)
        return [Gap(20.0, 20.0 - STEPS * 0.125), Gap(20.0, 20.0 - (STEPS + 1) * 0.125)]

    verdict = judge(TARGET, [[1, 2, 9, 9], [5, 0]], [False, True], gaps_at)
    assert seen == [Fork(0, 2, 9), Fork(1, 1, 0)]
    assert verdict.equal == 0 and verdict.largest_margin == STEPS * 0.125
    assert verdict.different == [f"output 1 has 0 at 1, {(STEPS + 1) * 0.125:.3f} below 20.000"]
