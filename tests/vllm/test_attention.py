"""The draft layer's attention in a running engine, against attention over the visible set written out in torch."""

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")

import torch
from draft_passes import OFF, block_size, draft_layers, watch
from engines import GAMMA, engine, generate, text_prompts

from windowed_mtp import SinkWindow

WINDOW = {"sink": 4, "window": 300}
TOLERANCE = 0.02
"""Of outputs whose largest is about 1: bf16 keeps 8 bits, and the probabilities are rounded to it too."""


def attention(made, window, size, scale):
    """``[T, H, D]``: every query over its row's visible positions up to its own; float32."""
    outputs, start = [], 0
    for row, (length, queries) in enumerate(zip(made.seq_lens, made.query_lens, strict=True)):
        positions = torch.tensor(made.visible_positions(row, window, size))
        slots = made.table[row, positions // size].long() * size + positions % size
        query = made.query[start : start + queries].float()
        keys, values = (
            each[slots].repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (made.keys, made.values)
        )
        scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
        own = torch.arange(length - queries, length)
        scores.masked_fill_(positions[None, None] > own[None, :, None], float("-inf"))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        start += queries
    return torch.cat(outputs)


@pytest.mark.parametrize("budget", [4096, 512])
def test_draft_attention_is_attention_over_the_visible_set(budget):
    window = SinkWindow(**WINDOW)
    with engine(window=WINDOW, max_num_batched_tokens=budget) as llm:
        size = block_size(llm)
        [layer] = draft_layers(llm).values()
        checked: set[int] = set()
        others: list[float] = []

        def observe(made):
            want = attention(made, window, size, layer.impl.scale)
            got = made.output[: len(want)].reshape(want.shape).float()
            assert torch.isfinite(want).all()
            torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=TOLERANCE)
            engaged = [row for row in range(len(made.seq_lens)) if made.dropped_blocks(row, window, size)]
            checked.update(made.query_lens[row] for row in engaged)
            for other in (SinkWindow(4, 300, OFF), SinkWindow(0, 300)) if engaged else ():
                others.append(float((attention(made, other, size, layer.impl.scale) - got).abs().max()))

        with watch(llm, observe=observe) as seen:
            generate(llm, text_prompts(llm, [500, 1153, 2303, 3000]), 12)
        print("passes:", len(seen.passes), "queries a row:", sorted(checked), "other sets:", sorted(others)[:5])
        assert {1, GAMMA + 1} <= checked
        assert (max(checked) > GAMMA + 1) == (budget == 512)  # a prompt's chunks, where there are any
        # Every key, or no sinks, is nearly always something else.
        assert sum(other > 5 * TOLERANCE for other in others) > 0.8 * len(others) > 10
