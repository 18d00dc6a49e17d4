"""With NaN where a pass's window excludes, proposals stay as they are with the window and change without it."""

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")

from draft_passes import block_size
from engines import counters, engine, text_prompts
from poison import check_poison

from windowed_mtp import SinkWindow

WINDOW = {"sink": 4, "window": 300}


def test_excluded_keys_are_not_read():
    with engine(window=WINDOW) as llm:
        assert block_size(llm) == 384
        prompts = text_prompts(llm, [40, 1152, 1900])
        for window in (SinkWindow(**WINDOW), SinkWindow(0, 1), SinkWindow(400, 385, 1600)):
            _, seen, _ = check_poison(llm, prompts, window)
        # Rows that the window does not reach, in a batch with rows that it does.
        assert any(min(each.seq_lens) < 100 and max(each.seq_lens) > 1800 for each in seen.passes)


def test_a_prompt_in_chunks():
    with engine(window=WINDOW, max_num_batched_tokens=512) as llm:
        _, seen, _ = check_poison(llm, text_prompts(llm, [900, 1700]), SinkWindow(**WINDOW))
        assert any(length > 1500 and 200 < queries <= 512 for each in seen.passes for length, queries in each.rows)


def test_sequences_that_are_preempted():
    with engine(window=WINDOW, num_gpu_blocks_override=34) as llm:
        check_poison(llm, text_prompts(llm, [1090, 1105, 1120, 1135]), SinkWindow(**WINDOW), tokens=64)
        assert counters(llm)["num_preemptions"] > 0
