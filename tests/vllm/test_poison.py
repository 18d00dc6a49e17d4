"""With NaN where a pass's window excludes, proposals stay as they are with the window and change without it."""

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")

from draft_passes import block_size
from engines import counters, engine, text_prompts
from poison import check_poison

from windowed_mtp import SinkWindow

WINDOW = {"sink": 4, "window": 300}


@pytest.fixture(scope="module")
def plain():
    with engine(window=WINDOW) as llm:
        assert block_size(llm) == 384
        yield llm


@pytest.mark.parametrize(
    "window",
    [SinkWindow(**WINDOW), SinkWindow(0, 1), SinkWindow(400, 385), SinkWindow(4, 300, min_context=2304)],
    ids=str,
)
def test_excluded_keys_are_not_read(plain, window):
    check_poison(plain, text_prompts(plain, [1500, 2290, 2304, 3000]), window)


def test_rows_below_and_above_the_window_share_a_batch(plain):
    _, seen, _ = check_poison(plain, text_prompts(plain, [40, 383, 1100, 2600]), SinkWindow(**WINDOW))
    assert any(min(each.seq_lens) < 304 and max(each.seq_lens) > 2000 for each in seen.passes)


def test_a_prompt_in_chunks():
    with engine(window=WINDOW, max_num_batched_tokens=512) as llm:
        _, seen, _ = check_poison(llm, text_prompts(llm, [1600, 2100]), SinkWindow(**WINDOW))
        rows = [pair for each in seen.passes for pair in zip(each.seq_lens, each.query_lens, strict=True)]
        assert any(length > 1500 and 200 < queries <= 512 for length, queries in rows)


def test_sequences_that_are_preempted():
    with engine(window=WINDOW, num_gpu_blocks_override=58) as llm:
        check_poison(llm, text_prompts(llm, [2200, 2250, 2280, 2300]), SinkWindow(**WINDOW), tokens=64)
        assert counters(llm)["num_preemptions"] > 0
