"""What must hold of a drafter in the V2 model runner, in each way that a batch may run; all of it in one engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from draft_passes import OFF
from drafters import Drafter
from engines import GAMMA, counters, generate
from models import random_prompts
from modes import WINDOW, Mode
from modes import modes as modes_of
from v2_passes import Seen, as_windowed, block_size, draft_layers, dropped, untouched, watch, window_as
from vllm import LLM

PROMPTS = {"alike": [246, 247, 248], "mixed": [247, 248, 9, 130]}
BUDGET = 290
"""Tokens a step where prompts are in chunks."""
TOKENS = 8
OPTIONS: dict[str, Any] = {"max_model_len": 512, "max_num_batched_tokens": 1024, "num_gpu_blocks_override": 96}
WARM = 100
"""Tokens of each prompt that are run beforehand, for a prefix to be found."""
modes = partial(modes_of, gammas=(GAMMA,), dtypes=("bfloat16",))
"""Gives every mode of a drafter that one engine can run."""


@dataclass(frozen=True)
class Reference:
    """What engines without the plugin give: continuations of both, and cached tokens with the drafter."""

    modes: dict[str, list[list[int]]]
    target: list[list[list[int]]]
    unwindowed: list[list[list[int]]]
    cached: list[list[int]]


def prompts_of(lengths: str) -> list[list[int]]:
    """The prompts of a mode."""
    return random_prompts(PROMPTS[lengths], seed=1)


def cold_and_warm(llm: LLM, block: int) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Outputs and cached tokens of prompts of lengths around multiples of a block, and of the same with more tokens."""
    prompts = random_prompts(lengths_around(block))
    batches = [generate(llm, given, TOKENS) for given in (prompts, [[*prompt, 7, 8, 9] for prompt in prompts])]
    return [[each.tokens for each in batch] for batch in batches], [
        [each.cached for each in batch] for batch in batches
    ]


def lengths_around(block: int) -> list[int]:
    """Lengths around multiples of a block."""
    return [20, 5 * block - 1, 5 * block, 5 * block + 1, 8 * block - 1, 8 * block]


def reference_of(drafter: Drafter) -> Reference:
    """Run the engines without the plugin."""
    with drafter.running(gamma=0, **OPTIONS) as llm:
        own = {lengths: [each.tokens for each in generate(llm, prompts_of(lengths), TOKENS)] for lengths in PROMPTS}
        target, _ = cold_and_warm(llm, drafter.block)
    with drafter.running(**OPTIONS) as llm:
        unwindowed, cached = cold_and_warm(llm, drafter.block)
    return Reference(own, target, unwindowed, cached)


def running(drafter: Drafter) -> Any:
    """The engine with the window."""
    return drafter.running({"sink": WINDOW.sink, "window": WINDOW.window}, **OPTIONS)


def check_output(drafter: Drafter, reference: Reference, llm: LLM) -> None:
    """Greedy output and prefix hits with the window are those without it and without a drafter, cold and warm."""
    assert llm.reset_prefix_cache()
    before = counters(llm)
    outputs, cached = cold_and_warm(llm, drafter.block)
    after = counters(llm)
    assert outputs == reference.unwindowed == reference.target
    assert cached == reference.cached
    for hits, length in zip(cached[1], lengths_around(drafter.block), strict=True):
        assert hits >= length - 2 * drafter.block if drafter.reuses else hits == 0
    drafts, accepted = (
        after[f"spec_decode_num_{what}"] - before.get(f"spec_decode_num_{what}", 0)
        for what in ("drafts", "accepted_tokens")
    )
    assert 0.05 < accepted / drafts < 0.9 * GAMMA


def check_mode(drafter: Drafter, reference: Reference, llm: LLM, mode: Mode, passes: int = GAMMA) -> None:
    """In one mode: which blocks reach each kernel, and the poison check; ``passes`` is what the drafter runs a step."""
    prompts, runs = prompts_of(mode.lengths), {}
    for name, in_force in (("windowed", mode.window), ("full", replace(mode.window, min_context=OFF))):
        for arm, poison in ((name, None), (f"{name}-poisoned", mode.window)):
            assert llm.reset_prefix_cache()
            with window_as(llm, in_force):
                generate(llm, [prompt[:WARM] for prompt in prompts] if mode.prefixes else [], 1)
                with _in_mode(llm, mode), watch(llm, poison) as seen:
                    answers = generate(llm, prompts, TOKENS)
            assert [each.tokens for each in answers] == reference.modes[mode.lengths], arm
            assert any(each.cached > 0 for each in answers) == mode.prefixes
            assert (seen.poisoned > 0) == (poison is not None), arm
            assert seen.target and all(untouched(entry) for entry in seen.target), arm
            runs[arm] = seen
    assert runs["windowed-poisoned"].proposals == runs["windowed"].proposals
    assert runs["full-poisoned"].proposals != runs["full"].proposals
    assert all(untouched(entry) for step in runs["full"].steps for entry in step)
    _check_windowed(runs["windowed"], mode, passes * len(draft_layers(llm)), block_size(llm))


def _check_windowed(seen: Seen, mode: Mode, entries: int, block: int) -> None:
    assert {len(step) for step in seen.steps} == {entries}
    for index in range(entries):
        given = [step[index] for step in seen.steps]
        assert all(as_windowed(entry, mode.window, block) for entry in given)
        assert any(dropped(entry) for entry in given)
    _check_is(seen, mode, block)


def _check_is(seen: Seen, mode: Mode, block: int) -> None:
    """That a batch ran in its mode: chunks end within prompts, and some rows are reached beside some that are not."""
    lengths = {length for entry in seen.target for length in entry.source.seq_lens}
    whole = {prompt + more for prompt in PROMPTS[mode.lengths] for more in range(TOKENS + GAMMA + 1)}
    assert bool(lengths - whole) == mode.chunks, lengths - whole
    reached = [
        {entry.source.dropped_blocks(row, mode.window, block) > 0 for row in range(len(entry.lens))}
        for step in seen.steps
        for entry in step
    ]
    assert mode.lengths != "mixed" or {True, False} in reached


@contextmanager
def _in_mode(llm: LLM, mode: Mode) -> Iterator[None]:
    """Have the scheduler run batches in a mode, and see that it did."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    budget, pool = scheduler.max_num_scheduled_tokens, scheduler.kv_cache_manager.block_pool
    block, before = block_size(llm), counters(llm)["num_preemptions"]
    # What the prompts take, and not what is generated.
    enough = sum(-(-length // block) for length in PROMPTS[mode.lengths])
    held = pool.get_new_blocks(pool.get_num_free_blocks() - enough) if mode.scarce else []
    scheduler.max_num_scheduled_tokens = BUDGET if mode.chunks else budget
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens = budget
        pool.free_blocks(held)
    assert (counters(llm)["num_preemptions"] > before) == mode.scarce
