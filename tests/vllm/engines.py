"""Engines in this process: started, driven prompt by prompt, and taken down again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.model_executor.models import registry

from windowed_mtp.engines.vllm import register
from windowed_mtp.reference import checkpoint_path
from windowed_mtp.workloads.stdlib import heldout_text

GAMMA = 3
NEAR_TIE = 0.2
"""Logprobs closer than this are a near tie: bf16 logits of 16 to 32 are 0.125 apart."""

# A class of models is looked at in this process: one of its own would keep CUDA out of this, and import vLLM anew.
registry._run_in_subprocess = lambda look: look()


@contextmanager
def imports_left_out() -> Iterator[None]:
    """Keep what is imported out of the collections: vLLM would thaw it for each of the many at an engine's end."""
    gc.freeze()
    try:
        with patch("gc.freeze"), patch("gc.unfreeze"):
            yield
    finally:
        gc.unfreeze()


@contextmanager
def engine(
    model: str = "", window: dict[str, Any] | None = None, drafter: dict[str, Any] | None = None, **options: Any
) -> Iterator[LLM]:
    """An engine on ``model`` (the bundled checkpoint) with a drafter (its own head; ``{}`` for none)."""
    register()  # vLLM loads plugins in the first engine of a process only
    drafter = {"method": "mtp", "num_speculative_tokens": GAMMA} if drafter is None else drafter
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_model_len": 4096,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": 96,
        "disable_log_stats": False,
        "seed": 0,
    }
    llm = None
    with imports_left_out():
        try:
            llm = LLM(
                model=model or str(checkpoint_path()),
                speculative_config=drafter or None,
                additional_config={} if window is None else {"windowed_mtp": window},
                **{**settings, **options},
            )
            yield llm
        finally:
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
            del llm
            cleanup_dist_env_and_memory()
            gc.collect()


def runner_of(llm: LLM) -> Any:
    """The engine's model runner."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def counters(llm: LLM) -> dict[str, Any]:
    """The engine's counters: a number, or a list of numbers, by name."""
    found = {}
    for metric in llm.get_metrics():
        value = getattr(metric, "values", getattr(metric, "value", None))
        if value is not None:
            found[metric.name.removeprefix("vllm:")] = value
    return found


@dataclass
class Answer:
    """A prompt's continuation, the top logprobs of each token where they were asked for, and its cached tokens."""

    tokens: list[int]
    logprobs: list[dict[int, float]]
    cached: int


def generate(llm: LLM, prompts: list[list[int]], tokens: int = 48, logprobs: int | None = None) -> list[Answer]:
    """Greedy continuations of exactly ``tokens`` tokens."""
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=logprobs)
    made = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], sampling, use_tqdm=False)
    return [
        Answer(
            list(output.outputs[0].token_ids),
            [{token: entry.logprob for token, entry in top.items()} for top in output.outputs[0].logprobs or []],
            output.num_cached_tokens or 0,
        )
        for output in made
    ]


def text_prompts(llm: LLM, lengths: list[int]) -> list[list[int]]:
    """Prompts of held-out text, each of another part of it."""
    ids = llm.get_tokenizer()(heldout_text(4 * (sum(lengths) + 64), 0)).input_ids
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def same_up_to_near_ties(reference: list[Answer], others: list[Answer]) -> int:
    """Check continuations against those of a target alone, with logprobs; give the number that left at a near tie."""
    ties = 0
    for index, (want, got) in enumerate(zip(reference, others, strict=True)):
        assert len(want.tokens) == len(got.tokens)
        for position, (ours, theirs) in enumerate(zip(want.tokens, got.tokens, strict=True)):
            if ours != theirs:
                top = want.logprobs[position]
                margin = top[ours] - top.get(theirs, float("-inf"))
                assert margin < NEAR_TIE, f"prompt {index}, token {position}: {theirs}, not {ours}, by {margin}"
                ties += 1
                break
    return ties
