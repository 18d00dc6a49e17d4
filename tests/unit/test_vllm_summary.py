"""The numbers that the vLLM plugin says are in force, against the lengths that it makes."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windowed_mtp import SinkWindow
from windowed_mtp.engines.vllm.summary import Drafting, LayerGroup, describe, engages_from, keys_a_step, most_keys
from windowed_mtp.paging import compact_block_table

WINDOWS = st.builds(SinkWindow, sink=st.integers(0, 40), window=st.integers(1, 90), min_context=st.integers(0, 300))


def lengths(contexts: range, queries: int, window: SinkWindow, block: int) -> dict[int, int]:
    """Windowed length of each context, for a pass of ``queries`` queries or of all that there are."""
    lens = torch.tensor(contexts, dtype=torch.int32)
    table = torch.zeros(len(contexts), contexts[-1] // block + 2, dtype=torch.int32)
    made = compact_block_table(table, lens, lens.clamp(max=queries), block_size=block, window=window)[1]
    return dict(zip(contexts, made.tolist(), strict=True))


@settings(max_examples=100)
@given(WINDOWS, st.sampled_from((1, 4, 16, 32)), st.integers(1, 8), st.integers(8, 500))
def test_thresholds_and_bounds_are_those_of_the_arithmetic(window: SinkWindow, block: int, queries: int, context: int):
    start = engages_from(window, block)
    one = lengths(range(1, start + 2 * block), 1, window, block)
    assert all((read < length) == (length >= start) for length, read in one.items())
    assert max(lengths(range(1, context + 1), queries, window, block).values()) <= most_keys(
        context, queries, window, block
    )
    always = SinkWindow(window.sink, window.window)
    far = range(start + queries, start + queries + 2 * block)
    assert max(lengths(far, queries, always, block).values()) == most_keys(10**6, queries, always, block)


def test_keys_of_a_step():
    window, every = SinkWindow(64, 4032), Drafting(6)
    decode = 64 + 4032 + 15
    assert keys_a_step(10**6, every, window, 16) == (decode + 6) + 5 * decode
    assert keys_a_step(10**6, Drafting(6, window_first_pass=False), window, 16) == 10**6 + 5 * decode
    assert keys_a_step(10**6, Drafting(6, one_pass=True), window, 16) == decode + 12
    assert keys_a_step(1000, every, window, 16) == 6000


def test_the_line():
    window = SinkWindow(4, 300)
    assert describe(window, Drafting(3), [LayerGroup(1, "CPU_ATTN", 384)], 4096) == (
        "1 draft layer with CPU_ATTN, in blocks of 384 tokens: from a context of 1,068 tokens on, a query reads the "
        "first 384 (sink 4) and the last 300 to 683 tokens (window 300); all 3 passes of a step are windowed; a step "
        "of 3 drafted tokens at 4,096 reads at most 3,204 keys a layer instead of 12,288."
    )


def test_the_line_says_what_is_not_windowed():
    groups = [LayerGroup(2, "FLASH_ATTN", 16), LayerGroup(None, "FLASHINFER", 1)]
    text = describe(SinkWindow(0, 300, 2000), Drafting(2, window_first_pass=False), groups, 4096)
    assert (
        "2 draft layers with FLASH_ATTN" in text and "the draft's layers with FLASHINFER, in blocks of 1 token" in text
    )
    assert "from a context of 2,000 tokens on (min_context), a query reads the last 300 to 315 tokens" in text
    assert "a query reads the last 300 tokens (window 300)" in text
    assert "1 of the 2 passes of a step are windowed, all but the first" in text
    one = describe(SinkWindow(), Drafting(7, one_pass=True), groups[:1], 10**5)
    assert "the step's one pass is windowed" in one
    without = describe(SinkWindow(64, 4032), Drafting(3), groups[:1], 4096)
    assert without.endswith(
        "up to the maximum length of 4,096, as sink 64 and window 4,032 leave keys out only from 4,112 on."
    )
    late = describe(SinkWindow(64, 4032, 9000), Drafting(3), groups[:1], 8192)
    assert late.endswith("as min_context is 9,000.")
