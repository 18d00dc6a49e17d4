"""The draft layer's attention in a running engine, against attention over the visible set written out in torch."""

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")

import torch
from draft_passes import OFF, block_size, draft_layers, watch
from drafters import DFLASH, FULL_MTP, LATENT_MTP
from engines import GAMMA, engine, generate, text_prompts
from models import random_prompts

from windowed_mtp import SinkWindow

HYBRID_WINDOW, WINDOW = SinkWindow(4, 300), SinkWindow(4, 64)
TOLERANCES = {torch.bfloat16: 0.02, torch.float32: 1e-4}
"""Of outputs whose largest is about 1: bfloat16 keeps 8 bits, and the probabilities are rounded to it too."""


def settings(window):
    return {"sink": window.sink, "window": window.window}


def keys_and_values(made, layer):
    """``[S, H, D]`` each, by slot: what a layer cached, or what it makes of the latent vectors that it cached."""
    if not layer.attn_backend.is_mla():
        heads = made.query.shape[1]
        return [each.repeat_interleave(heads // each.shape[1], dim=1) for each in (made.keys, made.values)]
    made_of_latent = layer.kv_b_proj(made.keys.to(made.query.dtype))[0].float().unflatten(1, (layer.num_heads, -1))
    key, value = made_of_latent.split([layer.qk_nope_head_dim, layer.v_head_dim], dim=-1)
    return [torch.cat([key, made.values.expand(-1, layer.num_heads, -1)], dim=-1), value]


def attention(made, window, size, layer, causal):
    """``[T, H, D]``: every query over its row's visible positions, up to its own if ``causal``; float32."""
    outputs, start, cached = [], 0, keys_and_values(made, layer)
    for row, (length, queries) in enumerate(zip(made.seq_lens, made.query_lens, strict=True)):
        positions = torch.tensor(made.visible_positions(row, window, size))
        slots = made.table[row, positions // size].long() * size + positions % size
        query = made.query[start : start + queries].float()
        keys, values = (each[slots] for each in cached)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * layer.impl.scale
        if causal:
            own = torch.arange(length - queries, length)
            scores.masked_fill_(positions[None, None] > own[None, :, None], float("-inf"))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        start += queries
    return torch.cat(outputs)


def check(llm, prompts, window, causal=True):
    """Compare every draft pass of a run with attention written out; gives the numbers of queries of windowed rows."""
    size, layer = block_size(llm), next(iter(draft_layers(llm).values()))
    checked: set[int] = set()
    others: list[float] = []

    def observe(made):
        tolerance = TOLERANCES[made.query.dtype]
        want = attention(made, window, size, layer, causal)
        got = made.output[: len(want)].reshape(want.shape).float()
        assert torch.isfinite(want).all()
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
        engaged = [row for row in range(len(made.seq_lens)) if made.dropped_blocks(row, window, size)]
        checked.update(made.query_lens[row] for row in engaged)
        for other in (SinkWindow(4, window.window, OFF), SinkWindow(0, window.window)) if engaged else ():
            others.append(float((attention(made, other, size, layer, causal) - got).abs().max()) / tolerance)

    with watch(llm, observe=observe) as seen:
        generate(llm, prompts, 12)
    print("passes:", len(seen.passes), "queries a row:", sorted(checked), "other sets:", sorted(others)[:5])
    # Every key, or no sinks, is nearly always something else.
    assert sum(other > 5 for other in others) > 0.8 * len(others) > 10
    return checked


@pytest.mark.parametrize("budget", [4096, 512])
def test_a_hybrids_draft_attention_is_attention_over_the_visible_set(budget):
    with engine(window=settings(HYBRID_WINDOW), max_num_batched_tokens=budget) as llm:
        checked = check(llm, text_prompts(llm, [500, 1153, 2303, 3000]), HYBRID_WINDOW)
    assert {1, GAMMA + 1} <= checked
    assert (max(checked) > GAMMA + 1) == (budget == 512)  # a prompt's chunks, where there are any


@pytest.mark.parametrize("drafter", [FULL_MTP, LATENT_MTP, DFLASH], ids=["full", "latent", "dflash"])
def test_draft_attention_is_attention_over_the_visible_set(drafter):
    budget = {"max_num_batched_tokens": 128, "max_model_len": 512} if drafter.reuses else {}
    with drafter.running(settings(WINDOW), dtype="float32", enable_prefix_caching=False, **budget) as llm:
        checked = check(llm, random_prompts([100, 260, 383, 450]), WINDOW, causal=not drafter.parallel)
    if drafter.parallel:
        assert checked == {GAMMA + 1}
    else:
        assert {1, GAMMA + 1} <= checked
        assert (max(checked) > GAMMA + 1) == drafter.reuses
