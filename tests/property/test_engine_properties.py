"""Whatever is proposed, at whatever depth and window, greedy output is plain greedy's and the draft its reference's."""

import random

import checks
import tiny
from checks import ARRANGEMENTS, Case, check_greedy, check_reference, generate, plain, prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from windowed_mtp.engines.protocol import StepContext

NEW_TOKENS = 20
WINDOWS = st.one_of(st.none(), st.tuples(st.integers(0, 12), st.integers(1, 40)))


@st.composite
def any_case(draw: st.DrawFn, families: list[str], new_tokens: int) -> Case:
    window = draw(WINDOWS)
    return Case(
        draw(st.sampled_from(families)),
        prompt=draw(st.sampled_from((5, 17, 64, 200))),
        depth=draw(st.integers(1, 6)),
        changing=draw(st.booleans()),
        window=window,
        drafter=draw(st.sampled_from(checks.DRAFTERS)),
        arrangement=draw(st.sampled_from(list(ARRANGEMENTS))) if window else "all",
        new_tokens=new_tokens,
    )


@settings(max_examples=60)
@given(any_case(list(tiny.BUILDERS), NEW_TOKENS), st.integers(0, 2**32))
def test_random_depths_and_mixed_proposals(case: Case, seed: int):
    rng = random.Random(seed)
    truth = plain(case.family, case.prompt, NEW_TOKENS)

    def mixed(context: StepContext, own: tuple[int, ...]) -> list[int]:
        right = truth[0, context.length : context.length + len(own)].tolist()
        proposed = [rng.choice((r, r, r, o, rng.randrange(tiny.VOCAB))) for r, o in zip(right, own, strict=True)]
        return proposed[: rng.randint(0, len(proposed))]

    made = checks.drafter(case, depth=lambda context: rng.randint(0, case.depth), override=mixed)
    output = generate(case.family, prompt(case.prompt), max_new_tokens=NEW_TOKENS, custom_generate=made)
    assert output.tolist() == truth.tolist()


@settings(max_examples=40)
@given(any_case(list(tiny.BUILDERS), NEW_TOKENS))
def test_greedy(case: Case):
    check_greedy(case)


@settings(max_examples=30)
@given(any_case(list(tiny.BUILDERS), 12), st.booleans())
def test_reference(case: Case, sighted: bool):
    check_reference(case, sighted)
