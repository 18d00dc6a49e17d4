"""A hot vocabulary changes what is proposed, and nothing that comes out."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
import tiny
import tiny_eagle3
import torch
from checks import Case, drafter, generate, plain, prompt
from integration import test_sampling
from torch import Tensor, nn

from windowed_mtp.engines.protocol import StepEvent
from windowed_mtp.engines.transformers import WindowedMTP
from windowed_mtp.engines.transformers import drafter as drafter_module
from windowed_mtp.engines.transformers.drafter import _Decoding
from windowed_mtp.engines.transformers.heads.hot import HotHead
from windowed_mtp.errors import VocabularyError
from windowed_mtp.probes.lossless import SampledCheck
from windowed_mtp.vocab import HotSet, HotVocabulary, OnlineCounts, TokenizerIdentity

FAMILY = "qwen3_5"
RUNS = 800
WORD = TokenizerIdentity(name="words", size=tiny.VOCAB, sha256="0")


def ranking(ids: Sequence[int], special: Sequence[int] = ()) -> HotVocabulary:
    """A ranking without a tokenizer."""
    return HotVocabulary(tokenizer=WORD, special=tuple(special), ranked=tuple(ids), counts=(1,) * len(ids))


def only_specials() -> HotSet:
    return HotSet(ranking([], special=[1, 2]), size=2)


def at_random() -> HotSet:
    return HotSet(ranking(random.Random(0).sample(range(tiny.VOCAB), 20)), size=20)


def stale() -> HotSet:
    """Ranks what another text had, and never looks again."""
    counts = OnlineCounts(interval=1000)
    counts.update([5, 6, 7, 8] * 250)
    return HotSet(counts, size=4)


def following() -> HotSet:
    return HotSet(OnlineCounts(special=[0], interval=3), size=12, prompt_tail=5)


HOT_SETS = {"only specials": only_specials, "random": at_random, "stale": stale, "following": following}


def decode(ids: Tensor, seed: int | None = None, **options: Any) -> tuple[list[int], list[StepEvent], WindowedMTP]:
    """Output, steps and drafter of one generation, sampled where there is a seed."""
    steps: list[StepEvent] = []
    made = drafter(Case(FAMILY, window=(2, 8)), on_step=steps.append, **options)
    torch.manual_seed(seed or 0)
    sampling = {} if seed is None else {"do_sample": True, "temperature": 1.5, "top_k": 0}
    output = generate(FAMILY, ids, custom_generate=made, max_new_tokens=40, **sampling)
    return output[0, ids.shape[1] :].tolist(), steps, made


# --- output ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hot", HOT_SETS)
@pytest.mark.parametrize("family", tiny.BUILDERS)
def test_greedy_output_is_the_targets_own(family: str, hot: str):
    case = Case(family, arrangement="ring")
    made = drafter(case, hot_vocabulary=HOT_SETS[hot]())
    output = generate(family, prompt(case.prompt), max_new_tokens=case.new_tokens, custom_generate=made)
    assert output.tolist() == plain(family, case.prompt, case.new_tokens).tolist()


def test_sampled_output_keeps_the_targets_distribution(monkeypatch: pytest.MonkeyPatch):
    """Outcome by outcome, with some of the allowed tokens hot, and others as they are emitted."""
    monkeypatch.setattr(test_sampling, "RUNS", RUNS)
    hot = HotSet(OnlineCounts(ranking([65, 14, 80]), interval=64, decay=0.5), size=3)
    p_value, acceptance = test_sampling.sampled_p_value(hot_vocabulary=hot)
    assert p_value > 1e-4
    assert 0.1 < acceptance < 0.95


def test_a_draft_that_reports_what_the_whole_head_would_is_caught(monkeypatch: pytest.MonkeyPatch):
    """It draws among hot tokens, but claims the distribution over all."""
    logits, honest = HotHead.logits, torch.multinomial
    cold: list[Tensor] = []

    def all_logits(self: HotHead, layer: int, out: Tensor) -> Tensor:
        cold.append(logits(self, layer, out).isinf())
        return self.head.logits(layer, out)

    def hot_draw(probabilities: Tensor, *args: object) -> Tensor:
        return honest(probabilities.masked_fill(cold.pop(), 0) if cold else probabilities, *args)

    monkeypatch.setattr(test_sampling, "RUNS", RUNS)
    monkeypatch.setattr(HotHead, "logits", all_logits)
    monkeypatch.setattr(torch, "multinomial", hot_draw)
    assert test_sampling.sampled_p_value(hot_vocabulary=HotSet(ranking([3, 15]), size=2))[0] < 1e-6


@pytest.mark.parametrize("hot", HOT_SETS)
def test_the_lossless_probe_finds_sampled_output_consistent(hot: str):
    torch.manual_seed(0)
    made = tiny.drafter(FAMILY, hot_vocabulary=HOT_SETS[hot]())
    check = SampledCheck(made, [prompt(20), prompt(21)], tokens=400, new_tokens=50)
    list(check.run())
    verdict = check.verdict()
    assert verdict.verdict == "consistent"
    assert verdict.control_p_value < 1e-6, "the same test must notice the draft's own tokens"


# --- proposals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 3], ids=["greedy", "sampled"])
def test_a_hot_set_of_all_tokens_proposes_the_same_to_the_bit(seed: int | None, monkeypatch: pytest.MonkeyPatch):
    seen: list[Tensor] = []
    copied = drafter_module._copied
    monkeypatch.setattr(drafter_module, "_copied", lambda logits: seen.append(logits) or copied(logits))
    without, steps, _ = decode(prompt(40), seed)
    expected = seen.copy()
    seen.clear()
    everything = HotSet(ranking(random.Random(1).sample(range(tiny.VOCAB), tiny.VOCAB)), size=tiny.VOCAB)
    output, hot_steps, made = decode(prompt(40), seed, hot_vocabulary=everything)
    assert output == without
    assert [step.proposed for step in hot_steps] == [step.proposed for step in steps]
    assert len(seen) == len(expected) and all(map(torch.equal, seen, expected))
    assert made.stats.hot_head_bytes == 0


@pytest.mark.parametrize("seed", [None, 3], ids=["greedy", "sampled"])
def test_proposals_are_hot_and_come_from_the_distribution_reported(seed: int | None, monkeypatch: pytest.MonkeyPatch):
    hot = at_random()
    ids = hot.ids(tiny.VOCAB)
    outs: list[tuple[int, Tensor]] = []
    logits, propose = HotHead.logits, _Decoding._propose
    reported: list[Tensor] = []

    def seen(self: HotHead, layer: int, out: Tensor) -> Tensor:
        outs.append((layer, out))
        return logits(self, layer, out)

    def proposed(self: _Decoding, *args: Any) -> Any:
        drafted, distributions = propose(self, *args)
        reported.extend(distributions)
        return drafted, distributions

    monkeypatch.setattr(HotHead, "logits", seen)
    monkeypatch.setattr(_Decoding, "_propose", proposed)
    _, steps, _ = decode(prompt(40), seed, hot_vocabulary=hot)
    tokens = [token for step in steps for token in step.proposed]
    assert len(tokens) == len(outs) >= 20 and set(tokens) <= set(ids)
    with torch.no_grad():
        whole = torch.cat([tiny.head(FAMILY).logits(layer, out) for layer, out in outs])
    if seed is None:
        margin = whole[:, ids].topk(2).values
        clear = (margin[:, 0] - margin[:, 1]) > 1e-4
        best = torch.tensor(ids)[whole[:, ids].argmax(-1)]
        assert clear.sum() >= 20 and torch.equal(best[clear], torch.tensor(tokens)[clear])
        assert (whole.argmax(-1) != best).any(), "the whole head would have proposed others"
        return
    expected = torch.zeros_like(whole)
    expected[:, ids] = (whole[:, ids] / 1.5).softmax(-1)
    assert torch.allclose(torch.cat(reported), expected, atol=1e-6)
    cold = torch.tensor([token for token in range(tiny.VOCAB) if token not in ids])
    assert not torch.cat(reported)[:, cold].any()


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[HotHead]:
    """The heads of the requests that run."""
    heads: list[HotHead] = []
    for_request = HotHead.for_request

    def noted(self: HotHead, prompt: Sequence[int]) -> HotHead:
        heads.append(for_request(self, prompt))
        return heads[-1]

    monkeypatch.setattr(HotHead, "for_request", noted)
    return heads


def test_the_prompts_end_is_in_for_that_request_alone(requests: list[HotHead]):
    ids = prompt(40)
    hot = HotSet(ranking([], special=[0]), size=7, prompt_tail=6)
    _, steps, made = decode(ids, hot_vocabulary=hot)
    assert {token for step in steps for token in step.proposed} <= set(hot.ids(tiny.VOCAB, ids[0].tolist()))
    assert {0, *ids[0, -6:].tolist()} <= set(requests[-1]._ids.tolist())
    other = ids.flip(1)
    generate(FAMILY, other, custom_generate=made, max_new_tokens=2)
    assert requests[-1]._ids.tolist() == hot.ids(tiny.VOCAB, other[0].tolist())


def test_online_counts_follow_what_is_emitted(requests: list[HotHead]):
    counts = OnlineCounts(interval=4)
    output, steps, _ = decode(prompt(40), hot_vocabulary=HotSet(counts, size=5))
    assert counts.version == len(output) // 4
    written = 0
    for step in steps:
        written = step.length - 40
        seen = OnlineCounts(interval=4)
        seen.update(output[:written])
        assert set(step.proposed) <= set(seen.ids(5, tiny.VOCAB)), f"after {written} tokens"
    assert requests[-1]._ids.tolist() == counts.ids(5, tiny.VOCAB) != [0, 1, 2, 3, 4]
    weight = tiny.model(FAMILY).get_output_embeddings().weight
    assert torch.equal(requests[-1]._rows, weight[requests[-1]._ids])


def test_ranking_anew_counts_as_the_drafts_time(monkeypatch: pytest.MonkeyPatch):
    follow = HotHead.follow

    def slow(head: HotHead, emitted: Sequence[int]) -> None:
        time.sleep(0.05)
        follow(head, emitted)

    monkeypatch.setattr(HotHead, "follow", slow)
    _, steps, made = decode(prompt(40), hot_vocabulary=HotSet(OnlineCounts(interval=4), size=5))
    assert min(step.draft_seconds for step in steps) > 0.05
    assert made.stats.draft_seconds > 0.05 * len(steps)


def test_the_bytes_of_the_copy_are_reported():
    _, _, made = decode(prompt(40), hot_vocabulary=at_random())
    assert made.stats.hot_head_bytes == made.hot_head.num_bytes == 20 * tiny.HIDDEN * 4
    assert decode(prompt(40))[2].stats.hot_head_bytes == 0


def test_an_output_head_with_a_bias():
    head = tiny.head(FAMILY)
    biased = nn.Linear(tiny.HIDDEN, tiny.VOCAB)
    hot = at_random()
    ids = hot.ids(tiny.VOCAB)

    class Biased(type(head)):
        def __init__(self) -> None:
            vars(self).update(vars(head), lm_head=biased)

    out = torch.randn(1, tiny.HIDDEN)
    made = HotHead(Biased(), hot)
    with torch.no_grad():
        assert torch.allclose(made.logits(0, out)[:, ids], biased(out)[:, ids], atol=1e-6)
    assert made.num_bytes == 20 * (tiny.HIDDEN + 1) * 4


# --- refusals -------------------------------------------------------------------------------------------------------


def refused(match: str, make: Any) -> None:
    with pytest.raises(VocabularyError, match=match) as caught:
        make()
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message


@pytest.mark.parametrize(
    ("size", "options", "match"),
    [
        (0, {}, "size is 0, but it must be at least 1"),
        (-3, {}, "size is -3"),
        (2.5, {}, "must be a whole number"),
        (4, {"prompt_tail": -1}, "prompt_tail is -1"),
        (4, {"prompt_tail": 4}, "cannot hold 1 special tokens and 4 of the prompt; ask for at least 5"),
    ],
)
def test_bad_sizes(size: Any, options: dict[str, Any], match: str):
    refused(match, lambda: HotSet(ranking([5], special=[1]), size, **options))


def test_hot_sets_that_do_not_fit_the_model():
    def make(hot: Any) -> Any:
        return lambda: tiny.drafter(FAMILY, hot_vocabulary=hot)

    refused("size is 98, but it must be from 1 to the model's 97", make(HotSet(ranking([5]), 98)))
    beyond = HotVocabulary(tokenizer=WORD.model_copy(update={"size": 200}), special=(), ranked=(150,), counts=(1,))
    refused("has token 150, but the model's 97 tokens are 0 to 96", make(HotSet(beyond, 10)))
    refused("hot_vocabulary is of type HotVocabulary, but it must be a HotSet", make(ranking([5])))


def test_heads_whose_rows_cannot_be_picked(monkeypatch: pytest.MonkeyPatch):
    head = tiny.head(FAMILY)
    wrapped = nn.Sequential(head.lm_head)
    quantised = nn.Linear(tiny.HIDDEN, tiny.VOCAB, bias=False).to(torch.float8_e4m3fn)
    for module in (wrapped, quantised):
        monkeypatch.setattr(head, "lm_head", module)
        refused("the output head is .*, whose rows cannot be picked", lambda: HotHead(head, at_random()))


def test_eagle3_with_a_vocabulary_of_its_own_is_refused():
    def make(name: str) -> WindowedMTP:
        model = tiny_eagle3.target(name)
        return WindowedMTP.from_model(model, eagle3=tiny_eagle3.checkpoint(name), hot_vocabulary=at_random())

    refused("the EAGLE-3 drafter has a vocabulary of its own", lambda: make("draft-vocabulary"))
    made = make("whole-vocabulary")
    ids = prompt(30)
    options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 20, "attention_mask": torch.ones_like(ids)}
    expected = made.model.generate(ids, **options)
    assert made.model.generate(ids, custom_generate=made, **options).tolist() == expected.tolist()
    assert made.stats.hot_head_bytes > 0
