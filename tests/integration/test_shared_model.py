"""A request is the same whatever else uses its model, in another thread or within its own passes."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import tiny
import tiny_eagle3
import torch
from checks import generate, override, plain, prompt
from integration import test_eagle3
from torch import Tensor, nn
from transformers import LogitsProcessor, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from windowed_mtp import SinkWindow
from windowed_mtp.engines.protocol import StepContext
from windowed_mtp.engines.transformers import WindowedMTP
from windowed_mtp.vocab import HotSet, OnlineCounts

NEW = 12
FAMILIES = ["qwen3_5", "nemotron_h", "eagle3"]


@dataclass
class Request:
    """A windowed generation, with what its head proposed before rights and wrongs were put in its place."""

    family: str
    length: int = 40
    new_tokens: int = NEW
    own: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def model(self) -> PreTrainedModel:
        return tiny_eagle3.target("hybrid") if self.family == "eagle3" else tiny.model(self.family)

    @property
    def truth(self) -> Tensor:
        family = tiny_eagle3.DRAFTERS["hybrid"].target if self.family == "eagle3" else self.family
        return plain(family, self.length, self.new_tokens)

    def drafter(self) -> WindowedMTP:
        head = test_eagle3.head_of("hybrid") if self.family == "eagle3" else tiny.head(self.family)
        return WindowedMTP(self.model, head, window=SinkWindow(4, 16), override=self.propose)

    def propose(self, context: StepContext, own: tuple[int, ...]) -> Any:
        if not context.ids[0, : self.length].equal(prompt(self.length)[0]):
            return None  # of another request that shares the drafter
        self.own.append(own)
        return override("alternating", self.truth)(context, own)

    def run(self, drafter: WindowedMTP | None = None, plainly: bool = False) -> list[int]:
        ids = prompt(self.length)
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": self.new_tokens}
        if not plainly:
            options["custom_generate"] = drafter or self.drafter()
        return self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()


@contextmanager
def within(module: nn.Module, uses: Sequence[Callable[[], None]], thread: bool) -> Iterator[list[int]]:
    """Use the model whenever the first thread's pass reaches a module, in that thread or in another; counts them."""
    first, busy, calls = threading.current_thread(), False, [0]
    turns = itertools.cycle(uses)

    def reach(*_: Any) -> None:
        nonlocal busy
        if busy or threading.current_thread() is not first:
            return
        busy = True
        calls[0] += 1
        if thread:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(next(turns)).result()
        else:
            next(turns)()
        busy = False

    handle = module.register_forward_pre_hook(reach)
    try:
        yield calls
    finally:
        handle.remove()


def other_uses(family: str, shared: WindowedMTP) -> list[Callable[[], None]]:
    """Ways of using the model, each of which sees that its own result is right; ``shared`` is the request's drafter."""
    other = Request(family, length=33, new_tokens=4)
    expected = other.truth[0].tolist()

    @torch.no_grad()
    def forward() -> None:
        assert other.model(prompt(33)).logits[0, -1].argmax() == expected[33]

    def generation() -> None:
        assert other.run(plainly=True) == expected

    def windowed() -> None:
        assert other.run() == expected

    def same_drafter() -> None:
        assert other.run(shared) == expected
        assert (shared.stats.prompt_tokens, shared.stats.new_tokens) == (33, 4)

    return [forward, generation, windowed, same_drafter]


@pytest.mark.parametrize("thread", [True, False], ids=["another thread", "nested"])
@pytest.mark.parametrize("family", FAMILIES)
def test_others_may_use_the_model_in_the_middle_of_a_pass(family: str, thread: bool):
    alone = Request(family)
    assert alone.run() == alone.truth[0].tolist()
    request = Request(family)
    drafter = request.drafter()
    layers = request.model.get_decoder().layers
    for module in (layers[0], layers[-1], request.model.get_output_embeddings()):
        request.own.clear()
        with within(module, other_uses(family, drafter), thread) as calls:
            assert request.run(drafter) == alone.truth[0].tolist()
        assert calls[0] >= 1 + max(len(alone.own), 4), "the model was used in the prefill and in every step"
        assert request.own == alone.own, "the draft sees the same features"
        assert (drafter.stats.prompt_tokens, drafter.stats.new_tokens) == (40, NEW)
        assert drafter.stats.steps == len(alone.own)


def test_a_streamer_and_a_processor_may_generate():
    """Between passes, with a head that holds rows for each request."""
    counts = OnlineCounts(interval=4)
    drafter = tiny.drafter("qwen3_5", window=SinkWindow(4, 16), hot_vocabulary=HotSet(counts, size=20, prompt_tail=9))
    expected, inner, ran = plain("qwen3_5", 40, NEW)[0].tolist(), plain("qwen3_5", 33, 4)[0].tolist(), []

    def nested() -> None:
        output = generate("qwen3_5", prompt(33), max_new_tokens=4, custom_generate=drafter)
        ran.append(output[0].tolist() == inner and drafter.stats.prompt_tokens == 33)

    class Stream(BaseStreamer):
        def put(self, value):
            nested()

        def end(self):
            nested()

    class Process(LogitsProcessor):
        def __call__(self, input_ids, scores):
            nested()
            return scores

    options = {"streamer": Stream(), "logits_processor": [Process()]}
    output = generate("qwen3_5", prompt(40), max_new_tokens=NEW, custom_generate=drafter, **options)
    assert output[0].tolist() == expected
    assert len(ran) == 1 + NEW + 1 + NEW and all(ran)
    assert (drafter.stats.prompt_tokens, drafter.stats.new_tokens) == (40, NEW)


def test_threads_that_share_one_drafter():
    """Without an order of theirs: each output is its own, and each thread finds its own counts."""
    lengths = (40, 33, 25)
    expected = {length: plain("qwen3_5", length, NEW)[0].tolist() for length in lengths}
    drafter = tiny.drafter("qwen3_5", window=SinkWindow(4, 16))
    begin = threading.Barrier(len(lengths))

    def serve(length: int) -> None:
        begin.wait()
        for _ in range(4):
            output = generate("qwen3_5", prompt(length), max_new_tokens=NEW, custom_generate=drafter)
            assert output[0].tolist() == expected[length]
            assert (drafter.stats.prompt_tokens, drafter.stats.new_tokens) == (length, NEW)
            assert drafter.stats.step_tokens == NEW - 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(lengths)) as pool:
            for done in [pool.submit(serve, length) for length in lengths]:
                done.result()
    finally:
        sys.setswitchinterval(interval)
    assert drafter.stats.new_tokens == NEW, "a thread without a generation sees the last one's"


def test_a_hook_met_while_it_is_put_on_or_taken_off(monkeypatch: pytest.MonkeyPatch):
    """Torch calls it without keyword arguments then, in the pass of another thread; it lets that pass go by."""
    request = Request("eagle3")
    model, seen = request.model, []

    def without_kwargs(module: nn.Module, hook: Any, *args: Any, **kwargs: Any) -> Any:
        result = hook(module, (torch.zeros(1, 1, 1),), *([()] if hook.__name__ == "_keep_output" else []))
        seen.append((hook.__name__, result))
        return original[type(module)](module, hook, *args, **kwargs)

    original = {}
    for cls in {type(module) for module in model.get_decoder().layers}:
        original[cls] = cls.register_forward_pre_hook
        monkeypatch.setattr(cls, "register_forward_pre_hook", without_kwargs)
    assert request.run() == request.truth[0].tolist()
    assert seen and all(result is None for _, result in seen)


def test_several_threads_count_what_is_emitted():
    counts = OnlineCounts(interval=10, capacity=50)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda first: counts.update(list(range(first, first + 40)) * 100), range(0, 160, 40)))
    finally:
        sys.setswitchinterval(interval)
    assert counts.version == 1600
