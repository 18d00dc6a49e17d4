"""Logits processors and stopping criteria are asked what plain decoding asks them, however much of a draft is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from checks import Case, drafter, generate, override, prompt
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria, SynthIDTextWatermarkLogitsProcessor
from transformers.generation import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation.streamers import BaseStreamer

from windowed_mtp.engines.protocol import StepEvent

FAMILIES = ["qwen3_5", "deepseek_v3"]
KINDS = ["own", "right", "alternating"]
LENGTH, NEW = 40, 20
Journal = list[tuple[str, tuple[int, ...]]]


def new(ids: Tensor) -> tuple[int, ...]:
    return tuple(ids.flatten().tolist()[LENGTH:])


class Note(LogitsProcessor):
    """Notes what it is asked, and favours some tokens."""

    def __init__(self, journal: Journal):
        self.journal = journal

    def __call__(self, input_ids, scores):
        self.journal.append(("processor", new(input_ids)))
        scores[:, input_ids.shape[1] % 7 :: 7] += 2.0
        return scores


class Stop(StoppingCriteria):
    """Notes what it is asked, and ends at a length."""

    def __init__(self, journal: Journal, length: int):
        self.journal, self.length = journal, length

    def __call__(self, input_ids, scores, **kwargs):
        self.journal.append(("criterion", new(input_ids)))
        return torch.tensor([input_ids.shape[1] >= self.length])


class Stream(BaseStreamer):
    """Notes the tokens that it is given."""

    def __init__(self, journal: Journal):
        self.journal = journal

    def put(self, value):
        self.journal.append(("streamer", tuple(value.flatten().tolist())))

    def end(self):
        self.journal.append(("end", ()))


class Matcher(LogitsProcessor):
    """A grammar that goes on with the last token at each call but the first, and fails where it is not allowed.

    Token t may be followed by those t' with (t + t') % 3 == 0, or by ``end``, which ends all.
    """

    def __init__(self, end: int):
        self.end = end
        self.state: int | None = None
        self.begun = self.terminated = False

    def allowed(self) -> Tensor:
        tokens = torch.arange(tiny.VOCAB)
        return torch.ones(tiny.VOCAB, dtype=torch.bool) if self.state is None else (tokens + self.state) % 3 == 0

    def __call__(self, input_ids, scores):
        assert input_ids.shape[0] == 1
        if self.begun:
            token = int(input_ids[0, -1])
            assert not self.terminated and (self.allowed()[token] or token == self.end)
            self.state, self.terminated = token, token == self.end
        self.begun = True
        allowed = self.allowed()
        allowed[self.end] = True
        scores.masked_fill_(~allowed, float("-inf"))
        return scores


def same(family: str, kind: str, options: Callable[[], dict[str, Any]], **case: Any) -> list[StepEvent]:
    """Plain output and ours are equal, with what ``options`` makes anew for each."""
    expected = generate(family, prompt(LENGTH), max_new_tokens=NEW, **options())
    steps: list[StepEvent] = []
    padded = torch.cat([expected, torch.zeros(1, NEW, dtype=torch.int64)], dim=1)
    made = drafter(Case(family, **{"depth": 4, **case}), override=override(kind, padded), on_step=steps.append)
    output = generate(family, prompt(LENGTH), max_new_tokens=NEW, custom_generate=made, **options())
    assert output.tolist() == expected.tolist()
    assert any(step.proposed for step in steps)
    if kind == "right":
        assert any(step.accepted > 1 for step in steps)
    return steps


@pytest.mark.parametrize("stop", [LENGTH + 7, LENGTH + NEW])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_processors_criteria_and_streamer_are_called_as_by_plain_decoding(family: str, kind: str, stop: int):
    journals: list[Journal] = []

    def options() -> dict[str, Any]:
        journals.append(journal := [])

        def allowed(batch: int, ids: Tensor) -> list[int]:
            journal.append(("prefix", new(ids)))
            return list(range(ids.shape[0] % 2, tiny.VOCAB, 2))

        return {
            "logits_processor": [Note(journal)], "stopping_criteria": [Stop(journal, stop)],
            "streamer": Stream(journal), "prefix_allowed_tokens_fn": allowed, "repetition_penalty": 1.2,
        }  # fmt: skip

    steps = same(family, kind, options)
    assert journals[1] == journals[0]
    if kind == "right" and stop == LENGTH + 7:
        assert len(steps[-1].emitted) < len(steps[-1].proposed), "the end was in the middle of a step"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_grammar_that_advances_with_each_call(family: str, kind: str):
    first = Matcher(end=0)
    expected = generate(family, prompt(LENGTH), max_new_tokens=NEW, logits_processor=[first])
    assert first.state == expected[0, -2]
    tokens = expected[0, LENGTH:].tolist()
    end = next(token for at, token in enumerate(tokens) if at > 5 and token not in tokens[:at])
    same(family, kind, lambda: {"logits_processor": [Matcher(end)], "eos_token_id": end, "pad_token_id": 0})


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_a_processor_that_knows_emitted_prefixes_only(sample: bool):
    """The draft has no words for a prefix that the processor cannot judge, and the request goes on."""
    ids = prompt(LENGTH)
    asked: list[int] = []

    class Strict(LogitsProcessor):
        def __call__(self, input_ids, scores):
            asked.append(input_ids.shape[1])
            if asked[-1] != LENGTH - 1 + len(asked):
                raise LookupError("asked out of order")
            return scores

    made = drafter(Case("qwen3_5", depth=4))
    options = {"logits_processor": [Strict()], "do_sample": sample, "temperature": 2.0}
    output = generate("qwen3_5", ids, max_new_tokens=NEW, custom_generate=made, **options)
    assert output.shape[1] == LENGTH + NEW == LENGTH + len(asked)
    assert sum(made.stats.proposed) > 0


class Guidance(UnbatchedClassifierFreeGuidanceLogitsProcessor):
    """Somebody's own guidance."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", ["guidance_scale", "subclass", "synthid"])
def test_processors_that_keep_a_state(family: str, kind: str, way: str):
    def options() -> dict[str, Any]:
        if way == "guidance_scale":
            return {"guidance_scale": 1.5}
        if way == "subclass":
            return {"logits_processor": [Guidance(1.5, tiny.model(family))]}
        keys = [654, 400, 836, 123]
        return {
            "logits_processor": [
                SynthIDTextWatermarkLogitsProcessor(
                    ngram_len=3, keys=keys, sampling_table_size=64, sampling_table_seed=0, context_history_size=32,
                    device="cpu",
                )
            ]
        }  # fmt: skip

    same(family, kind, options)


@pytest.mark.parametrize("stop", range(LENGTH + 2, LENGTH + 9))
def test_only_what_is_emitted_counts_as_accepted(stop: int):
    truth = generate("qwen3_5", prompt(LENGTH), max_new_tokens=NEW)
    steps: list[StepEvent] = []
    made = drafter(Case("qwen3_5", depth=5), override=override("right", truth), on_step=steps.append)
    options = {"max_new_tokens": NEW, "stopping_criteria": [Stop([], stop)]}
    output = generate("qwen3_5", prompt(LENGTH), custom_generate=made, **options)
    assert output.shape[1] == stop
    # Six tokens a step at the most, the last of which no draft proposed.
    counts = [sum(1 for length in range(LENGTH + 1, stop) if (length - LENGTH - 1) % 6 == at) for at in range(5)]
    assert made.stats.accepted == made.stats.proposed == [count for count in counts if count]
    assert all(step.accepted == min(len(step.emitted), len(step.proposed)) for step in steps)
