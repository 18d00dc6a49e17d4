"""Batches of every size in full CUDA graphs: requests that join and leave, with and without cached prefixes.

A process has one kind of runner: V2 here, and V1 with VLLM_USE_V2_MODEL_RUNNER=0.
"""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.version", reason="vllm is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from counts import Counts, counting, proposals, windowings
from engines import GAMMA, counters, runner_of
from gpu_targets import TARGETS, Prompts
from traffic import Request, Served, serve, verdict_of

from windowed_mtp import SinkWindow

pytestmark = pytest.mark.gpu

V2 = os.environ["VLLM_USE_V2_MODEL_RUNNER"] != "0"
SIZES = range(1, 18)
OPTIONS: dict[str, Any] = {"max_num_seqs": 20, "max_num_batched_tokens": 8192}
OFF = 2**30
NAMES = [name for name in TARGETS if name != "bundled"] if V2 else ["bundled", "mtp"]


def batches(name: str) -> list[list[Request]]:
    """A batch of each size: some in reach of the window and some not, that end at different steps."""
    draw, prompt = random.Random(2), Prompts(TARGETS[name], seed=3)
    lengths = (700, 1400) if TARGETS[name].reads_text else (100, 900)
    shortest = TARGETS[name].shortest
    return [
        [
            Request(prompt(draw.randint(*lengths) if index % 3 else draw.randint(shortest, 60)), draw.randint(24, 48))
            for index in range(size)
        ]
        for size in SIZES
    ]


def run(llm: Any, made: list[list[Request]]) -> tuple[list[Request], list[Served]]:
    """Run one batch after the other, cold, and then with its prompts' beginnings cached.

    Half of a batch is there at once; the others join two steps later.
    """
    assert llm.reset_prefix_cache()
    longer = [[Request([*each.prompt, 7, 8, 9], each.tokens) for each in batch] for batch in made]
    served = [each for batch in (*made, *longer) for each in serve(llm, batch, joining(len(batch)))]
    return [each for batch in (*made, *longer) for each in batch], served


def joining(size: int) -> Callable[[int, int], int]:
    """Half of a batch at once, and the rest two steps later."""
    return lambda step, live: {0: (size + 1) // 2, 2: size}.get(step, 0)


@pytest.mark.parametrize("name", NAMES)
def test_every_batch_size_in_graphs(name: str):
    target, made = TARGETS[name], batches(name)
    outputs: dict[str, list[Served]] = {}
    with target.running(drafting=True, widest=2048, **OPTIONS) as llm:
        runner, before = runner_of(llm), counters(llm)
        assert hasattr(runner, "speculator") == V2
        with counting(llm) as counts:
            requests, outputs["windowed"] = run(llm, made)
        after = counters(llm)
        if V2:
            outputs |= poisoned(llm, target.window, made)
        vocab = runner.vllm_config.model_config.get_vocab_size()
    print(name, counts)
    check_counts(counts, before, after)
    assert any(each.cached for each in outputs["windowed"])
    with target.running(drafting=False, max_num_seqs=128) as alone:
        for arm, served in outputs.items():
            verdict = verdict_of(alone, vocab, requests, served)
            print(name, arm, "equal:", verdict.equal, "near ties:", [round(gap.margin, 3) for gap in verdict.gaps])
            assert not verdict.different, arm


def check_counts(counts: Counts, before: dict[str, Any], after: dict[str, Any]) -> None:
    """That batches of all sizes were padded and replayed, and that the window dropped keys."""
    assert counts.full > 0 and counts.padded > 0
    if V2:
        assert set(SIZES) <= set(counts.sizes)
        # A drafter whose only pass is always replayed windows its batches inside the graph alone.
        assert counts.passes == 0 or (counts.padded_passes > 0 and counts.dropped > 0)
        assert len(counts.captured) > 1 and set(counts.replays) == counts.captured
        assert counts.dropped_in_loop > 0
    else:
        assert counts.dropped > 0
    drafts, accepted = (
        after[f"spec_decode_num_{what}"] - before.get(f"spec_decode_num_{what}", 0)
        for what in ("drafts", "accepted_tokens")
    )
    assert 0 < accepted < GAMMA * drafts


def poisoned(llm: Any, window: SinkWindow, made: list[list[Request]]) -> dict[str, list[Served]]:
    """The poison check, in force and out of it: outputs of the four runs."""
    runner = runner_of(llm)
    own = [*windowings(runner), *windowings(runner.speculator)]
    outputs, seen = {}, {}
    for name, in_force in (("windowed", window), ("off", SinkWindow(window.sink, window.window, OFF))):
        for windowing in own:
            windowing.window = in_force
        for arm, poison in ((f"{name} again", None), (f"{name}, poisoned", window)):
            with proposals(llm, poison) as seen[arm]:
                _, outputs[arm] = run(llm, made)
    assert seen["windowed, poisoned"].poisoned > 0
    assert seen["windowed, poisoned"].tokens == seen["windowed again"].tokens
    assert seen["off, poisoned"].tokens != seen["off again"].tokens
    return outputs
