"""The poison check: one engine, four arms."""

from __future__ import annotations

from draft_passes import OFF, Seen, watch, window_as
from engines import Answer, generate
from vllm import LLM

from windowed_mtp import SinkWindow


def check_poison(
    llm: LLM, prompts: list[list[int]], window: SinkWindow, tokens: int = 24, warm: list[list[int]] | None = None
) -> tuple[list[Answer], Seen, Seen]:
    """Put NaN where a window excludes, with the window in force and without it, and compare with the clean runs.

    Every run finds just the prompts in ``warm`` cached. Returns what the clean windowed run answered and saw, and what
    the poisoned windowed run saw.
    """
    runs = {}
    for name, in_force in (("windowed", window), ("full", SinkWindow(window.sink, window.window, OFF))):
        for arm, poison in ((name, None), (f"{name}-poisoned", window)):
            assert llm.reset_prefix_cache()
            with window_as(llm, in_force):
                generate(llm, warm or [], 1)
            with window_as(llm, in_force), watch(llm, poison) as seen:
                runs[arm] = generate(llm, prompts, tokens), seen
            assert (seen.poisoned > 0) == (poison is not None), arm
    outputs = {arm: [answer.tokens for answer in answers] for arm, (answers, _) in runs.items()}
    proposals = {arm: seen.proposals for arm, (_, seen) in runs.items()}
    assert all(made == outputs["windowed"] for made in outputs.values())
    assert proposals["windowed-poisoned"] == proposals["windowed"]
    assert proposals["full-poisoned"] != proposals["full"]
    assert runs["windowed"][1].keys_read < runs["full"][1].keys_read
    return *runs["windowed"], runs["windowed-poisoned"][1]
