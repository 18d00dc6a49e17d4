"""Batches as full CUDA graphs want them, padded to what was captured, with targets that are no hybrids."""

import os
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")
if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "1":
    pytest.skip("another model runner is set up in this process", allow_module_level=True)

from drafters import DFLASH, FULL_MTP, Drafter
from eagle3_checkpoints import llama_with_eagle3
from models import random_prompts
from replays import capture_model, full_graphs
from v2_passes import as_windowed, block_size, builders, dropped, untouched, watch
from vllm import LLM, SamplingParams, TokensPrompt

from windowed_mtp import SinkWindow

EAGLE3 = Drafter("eagle3", llama_with_eagle3)
WINDOW = SinkWindow(4, 64)
OPTIONS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "num_gpu_blocks_override": 160}
LENGTHS, LAST = [247, 248, 9, 130, 60, 190], [3, 13, 5, 9, 7, 11]
"""Prompts, and how many tokens each of them gets: a request leaves every step or two."""


def answers(llm: LLM) -> list[list[int]]:
    sampling = [SamplingParams(temperature=0, max_tokens=last, ignore_eos=True) for last in LAST]
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in random_prompts(LENGTHS, seed=3)]
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, sampling, use_tqdm=False)]


@pytest.mark.parametrize("drafter", [FULL_MTP, EAGLE3, DFLASH], ids=lambda drafter: drafter.method)
def test_padded_batches_are_windowed_and_change_no_output(drafter: Drafter):
    with drafter.running(gamma=0, **OPTIONS) as llm:
        want = answers(llm)
    window = {"sink": WINDOW.sink, "window": WINDOW.window}
    with full_graphs() as replays, drafter.running(window, **OPTIONS) as llm:
        capture_model(llm)
        assert all(builder.windowing.limits.graphs for builder in builders(llm).values())
        replays.padded = replays.whole = 0
        with watch(llm) as seen:
            assert answers(llm) == want
        assert replays.padded > 10
        assert replays.whole
        passes = [entry for step in seen.steps for entry in step]
        assert all(as_windowed(entry, WINDOW, block_size(llm)) for entry in passes)
        padded = [entry for entry in passes if 0 in entry.source.seq_lens]
        assert any(dropped(entry) for entry in padded)
        assert seen.target and all(untouched(entry) for entry in seen.target)
