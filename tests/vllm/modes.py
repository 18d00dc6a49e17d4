"""The ways in which a batch may run, as a product of settings, and the few of them that hold every pair."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import combinations, product
from typing import Any

import pytest
import torch
from draft_passes import Seen, block_size
from drafters import Drafter
from engines import GAMMA, Answer, counters, generate
from models import random_prompts
from poison import check_poison
from vllm import LLM

from windowed_mtp import SinkWindow

WINDOW = SinkWindow(4, 64)
BUDGET = 96
"""Tokens a step where prompts are in chunks."""
TOKENS = 24
PROMPTS = {"alike": [242, 243, 247, 249], "mixed": [26, 150, 215, 375]}
"""Lengths of a batch: drafted tokens need no block more at first, and `TOKENS` need one each, or more."""


@dataclass(frozen=True)
class Mode:
    """One way to run a batch.

    Attributes
    ----------
    window : SinkWindow
        What the draft reads.
    gamma : int
        Number of draft tokens.
    lengths : str
        ``"alike"`` or ``"mixed"``, which has a row that no window reaches.
    chunks, prefixes, scarce : bool
        Whether prompts are prefilled in chunks, whether beginnings of them are cached before, and whether there
        are so few blocks that sequences are preempted.
    dtype : str
        Of weights and cache. Many CPUs emulate products in bfloat16, slowly.
    """

    window: SinkWindow
    gamma: int
    lengths: str
    chunks: bool
    prefixes: bool
    scarce: bool
    dtype: str

    def __str__(self) -> str:
        window = "-".join(str(value) for value in asdict(self.window).values())
        flags = [name for name in ("chunks", "prefixes", "scarce") if getattr(self, name)]
        return "+".join([f"window {window}", f"gamma {self.gamma}", self.lengths, *flags, self.dtype])


def modes(
    drafter: Drafter, gammas: tuple[int, ...] = (GAMMA, 1), dtypes: tuple[str, ...] = ("float32", "bfloat16")
) -> list[Any]:
    """Every mode of a drafter as a test's parameter; those beyond the pairwise ones are marked ``full``."""
    either = (False, True)
    factors: dict[str, tuple[Any, ...]] = {
        "window": (WINDOW, SinkWindow(0, 1), SinkWindow(40, 33, 200)),
        "gamma": gammas,
        "lengths": ("alike", "mixed"),
        "chunks": either if drafter.reuses else (False,),
        "prefixes": either if drafter.reuses else (False,),
        "scarce": either,
        "dtype": dtypes,
    }
    rows = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    few = pairwise(rows)
    return [
        pytest.param(Mode(**row), marks=() if row in few else pytest.mark.full, id=str(Mode(**row))) for row in rows
    ]


def pairwise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Few of the rows, so that any two settings that stand in a row together do so in one of them."""
    pairs = [set(combinations(row.items(), 2)) for row in rows]
    left, chosen = set().union(*pairs), []
    while left:
        best = max(range(len(rows)), key=lambda index: len(pairs[index] & left))
        chosen.append(rows[best])
        left -= pairs[best]
    return chosen


@contextmanager
def in_mode(drafter: Drafter, mode: Mode) -> Iterator[LLM]:
    """An engine that runs `PROMPTS` in this mode."""
    options: dict[str, Any] = {"enable_prefix_caching": mode.prefixes, "max_model_len": 512, "dtype": mode.dtype}
    if mode.chunks:
        options["max_num_batched_tokens"] = BUDGET
    if mode.scarce:
        # One block is vLLM's own; two are left once the prompts are in.
        options["num_gpu_blocks_override"] = 3 + sum(-(-length // drafter.block) for length in PROMPTS[mode.lengths])
    window = {name: value for name, value in asdict(mode.window).items() if value}
    with drafter.running({"window": 1, **window}, mode.gamma, **options) as llm:
        yield llm


def check_mode(drafter: Drafter, mode: Mode) -> None:
    """The poison check in one mode, and that the mode is what it says."""
    with in_mode(drafter, mode) as llm:
        assert block_size(llm) == drafter.block
        before = counters(llm)["num_preemptions"]
        prompts = random_prompts(PROMPTS[mode.lengths], seed=1)
        warm = [prompt[: len(prompt) // 2] for prompt in prompts] if mode.prefixes else []
        answers, seen, _ = check_poison(llm, prompts, mode.window, TOKENS, warm)
        assert max(each.draft_index for each in seen.passes) == (0 if drafter.parallel else mode.gamma - 1)
        _check_is(mode, answers, seen)
        assert (counters(llm)["num_preemptions"] > before) == mode.scarce


def _check_is(mode: Mode, answers: list[Answer], seen: Seen) -> None:
    assert any(answer.cached > 0 for answer in answers) == mode.prefixes
    if mode.chunks:
        whole = [range(length, length + TOKENS + 2 * (GAMMA + 1)) for length in PROMPTS[mode.lengths]]
        lengths = {length for each in seen.passes for length in each.seq_lens}
        assert any(all(length not in each for each in whole) for length in lengths)
    if mode.lengths == "mixed" and mode.window.span > TOKENS:
        # Rows that the window does not reach, in a batch with rows that it does.
        reached = [[mode.window.engages(length) for length in each.seq_lens] for each in seen.passes]
        assert any(any(each) and not all(each) for each in reached)


def check_output(drafter: Drafter) -> None:
    """Greedy output and prefix hits with the window are those without it and without a drafter, cold and warm.

    So are the logits of what is chosen, which a target that reads less would change.
    """
    block = drafter.block
    lengths = [20, 8 * block - 1, 8 * block, 8 * block + 1, 10 * block + 5, 16 * block]
    prompts = random_prompts(lengths)
    longer = [[*prompt, 7, 8, 9] for prompt in prompts]
    window = {"sink": WINDOW.sink, "window": WINDOW.window}
    outputs, logits, cached = {}, {}, {}
    for name, window_of, gamma in (("target", None, 0), ("unwindowed", None, GAMMA), ("windowed", window, GAMMA)):
        with drafter.running(window_of, gamma, dtype="float32", logprobs_mode="raw_logits") as llm:
            before = counters(llm)
            answers = [each for batch in (prompts, longer) for each in generate(llm, batch, TOKENS, logprobs=1)]
            after = counters(llm)
        outputs[name] = [each.tokens for each in answers]
        logits[name] = torch.tensor([[top[t] for t, top in zip(a.tokens, a.logprobs, strict=True)] for a in answers])
        cached[name] = [each.cached for each in answers]
        if gamma:
            drafts, accepted = (
                after[f"spec_decode_num_{what}"] - before.get(f"spec_decode_num_{what}", 0)
                for what in ("drafts", "accepted_tokens")
            )
            print(name, "acceptance length:", 1 + accepted / drafts, "cached:", cached[name])
            print("largest logit:", logits[name].max(), "off by", (logits[name] - logits["target"]).abs().max())
            assert 0.05 < accepted / drafts < 0.9 * GAMMA
            torch.testing.assert_close(logits[name], logits["target"], atol=0.1, rtol=0)
    assert outputs["windowed"] == outputs["unwindowed"] == outputs["target"]
    assert cached["windowed"] == cached["unwindowed"]
    for hits, length in zip(cached["windowed"][len(lengths) :], lengths, strict=True):
        assert hits >= length - 2 * block if drafter.reuses else hits == 0
