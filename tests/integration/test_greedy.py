"""Greedy output equals plain greedy, token for token, for every family."""

import checks
import pytest
import tiny
from checks import FACTORS, Case, cases, check_greedy, pairwise

PAIRWISE = [case for seed, family in enumerate(tiny.BUILDERS) for case in cases(family, pairwise(seed, **FACTORS))]


@pytest.mark.parametrize("case", PAIRWISE, ids=str)
def test_pairwise(case: Case):
    check_greedy(case)


@pytest.mark.parametrize("family", tiny.BUILDERS)
@pytest.mark.parametrize("length", [1, 2, 3])
def test_prompts_shorter_than_the_draft_is_deep(family: str, length: int):
    for arrangement in checks.ARRANGEMENTS:
        for depth in (1, 5):
            check_greedy(Case(family, prompt=length, depth=depth, arrangement=arrangement, new_tokens=12))


@pytest.mark.full
@pytest.mark.parametrize("family", tiny.BUILDERS)
def test_full_product(family: str):
    names = list(FACTORS)
    rows = [dict(zip(names, values, strict=True)) for values in checks.itertools.product(*FACTORS.values())]
    for case in cases(family, rows):
        check_greedy(case)
