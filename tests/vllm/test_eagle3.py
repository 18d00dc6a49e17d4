"""EAGLE-3 on a full-attention target: equality, the poison check, and real prefix hits."""

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")

from draft_passes import block_size
from engines import GAMMA, counters, engine, generate
from models import llama_with_eagle3, random_prompts
from poison import check_poison

from windowed_mtp import SinkWindow

BLOCK = 32
WINDOW = {"sink": 4, "window": 64}
LENGTHS = [20, 4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1, 10 * BLOCK, 500, 32 * BLOCK - 1, 32 * BLOCK]
OPTIONS = {
    "skip_tokenizer_init": True,
    "block_size": BLOCK,
    "num_gpu_blocks_override": 512,
    "enable_prefix_caching": True,
    "max_model_len": 2048,
}


def running(window=None, speculate=True, **options):
    target, eagle3 = llama_with_eagle3()
    drafter = {"method": "eagle3", "model": eagle3, "num_speculative_tokens": GAMMA} if speculate else {}
    return engine(target, window, drafter, **{**OPTIONS, **options})


def cold_and_warm(llm, prompts):
    """Outputs and cached tokens of prompts, and of the same with three tokens more."""
    cold = generate(llm, prompts)
    warm = generate(llm, [[*prompt, 7, 8, 9] for prompt in prompts])
    return [[each.tokens for each in answers] for answers in (cold, warm)], [
        [each.cached for each in answers] for answers in (cold, warm)
    ]


def test_output_and_prefix_hits_are_those_without_the_plugin():
    prompts = random_prompts(LENGTHS)
    runs = {}
    for name, window, speculate in (("target", None, False), ("unwindowed", None, True), ("windowed", WINDOW, True)):
        with running(window, speculate) as llm:
            before = counters(llm)
            runs[name] = *cold_and_warm(llm, prompts), before, counters(llm)
    assert runs["windowed"][0] == runs["unwindowed"][0] == runs["target"][0]
    assert runs["windowed"][1] == runs["unwindowed"][1]
    assert all(cached >= length - 2 * BLOCK for cached, length in zip(runs["windowed"][1][1], LENGTHS, strict=True))
    for name in ("unwindowed", "windowed"):
        before, after = runs[name][2:]
        drafts, accepted = (
            after[f"spec_decode_num_{what}"] - before.get(f"spec_decode_num_{what}", 0)
            for what in ("drafts", "accepted_tokens")
        )
        print(name, "acceptance length:", 1 + accepted / drafts, "cached:", runs[name][1])
        assert 0.05 < accepted / drafts < 0.9 * GAMMA


def test_excluded_keys_are_not_read():
    prompts = random_prompts(LENGTHS[3:7], seed=1)
    with running(WINDOW) as llm:
        assert block_size(llm) == BLOCK
        generate(llm, prompts)  # so that every arm finds the same prefixes cached
        for window in (SinkWindow(**WINDOW), SinkWindow(0, 1), SinkWindow(40, 33, 300)):
            answers, seen, _ = check_poison(llm, prompts, window)
            assert [answer.cached for answer in answers] == [(len(p) - 1) // BLOCK * BLOCK - BLOCK for p in prompts]
            assert any(1 < queries < length for each in seen.passes for length, queries in each.rows)


def test_excluded_keys_are_not_read_in_chunks():
    with running(WINDOW, max_num_batched_tokens=128, enable_prefix_caching=False) as llm:
        _, seen, _ = check_poison(llm, random_prompts([700, 1000, 90], seed=2), SinkWindow(**WINDOW))
        assert any(length > 500 and queries > 60 for each in seen.passes for length, queries in each.rows)


def test_excluded_keys_are_not_read_where_sequences_are_preempted():
    with running(WINDOW, num_gpu_blocks_override=67, enable_prefix_caching=False) as llm:
        check_poison(llm, random_prompts([500, 505, 509, 511], seed=3), SinkWindow(**WINDOW), tokens=64)
        assert counters(llm)["num_preemptions"] > 0
