"""The lossless probe passes what is lossless and finds what is not."""

from typing import Any

import pytest
import tiny
import torch
from checks import prompt
from scipy.stats import chisquare
from torch import Tensor
from transformers import DynamicCache
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Attention, Qwen3_5GatedDeltaNet

from windowed_mtp import SinkWindow
from windowed_mtp.engines.transformers import WindowedMTP, drafter
from windowed_mtp.errors import GenerationError
from windowed_mtp.probes import lossless
from windowed_mtp.probes.lossless import LosslessResult, SampledCheck, greedy_verdict, uniform_test
from windowed_mtp.probes.target_runs import chunked_logits, first_difference
from windowed_mtp.reference import checkpoint_path
from windowed_mtp.results import Provenance

WINDOW = SinkWindow(2, 8)


@pytest.fixture
def windowed() -> WindowedMTP:
    return tiny.drafter("qwen3_5", window=WINDOW)


def accept_everything(self: Any, drafted: Tensor, distributions: Any, logits: Tensor) -> Any:
    """An acceptance rule that never looks at the target."""
    scores = logits[-1:].float()
    last = torch.multinomial(scores.softmax(-1), 1)[:, 0]
    return [(token, scores) for token in (*drafted.unbind(1), last)]


def propose_the_argmax(self: Any, context: Any, depth: int) -> Any:
    """A draft that takes its likeliest token, but claims to have drawn it."""
    distributions = []

    def choose(logits: Tensor, drafted: Tensor) -> Tensor:
        distributions.append(logits.float().softmax(-1))
        return distributions[-1].argmax(-1, keepdim=True)

    return self.draft.propose(self.ids, depth, choose), distributions


def sampled(windowed: WindowedMTP, tokens: int = 400) -> Any:
    torch.manual_seed(0)
    check = SampledCheck(windowed, [prompt(20), prompt(21)], tokens=tokens, new_tokens=50)
    assert list(check.run())[-1] >= tokens
    return check.verdict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_honest_greedy_output_passes(dtype: torch.dtype):
    windowed = WindowedMTP.from_model(tiny.model("qwen3_5", dtype), window=WINDOW)
    verdict = greedy_verdict(windowed, prompt(30), new_tokens=20)
    assert verdict.verdict in ("equal", "near tie") and verdict.engaged
    assert verdict.new_tokens == 20 and verdict.acceptance_length >= 1
    assert dtype == torch.bfloat16 or verdict.verdict == "equal"


def test_unverified_greedy_output_is_different(windowed: WindowedMTP, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(drafter._Decoding, "_accept", accept_everything)
    verdict = greedy_verdict(windowed, prompt(30), new_tokens=20)
    assert verdict.verdict == "different"
    assert verdict.gap > verdict.threshold and verdict.margin > 0


def test_an_output_that_ends_early_is_different(windowed: WindowedMTP, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(drafter._Decoding, "_step", lambda self: True)
    verdict = greedy_verdict(windowed, prompt(30), new_tokens=20)
    assert verdict.verdict == "different" and verdict.position == 1 and verdict.new_tokens == 1


def test_a_tie_in_the_target_is_a_near_tie(monkeypatch: pytest.MonkeyPatch):
    """Tokens in pairs that the target cannot tell apart; the drafter takes the pair's other one."""
    model = tiny.AutoModelForCausalLM.from_pretrained(tiny.checkpoint("qwen3_5"), dtype=torch.float32).eval()
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        module.weight.data[1:96:2] = module.weight.data[0:96:2]
    accept = drafter._Decoding._accept

    def the_other(*args: Any) -> Any:
        return ((torch.where(token < 96, token ^ 1, token), scores) for token, scores in accept(*args))

    monkeypatch.setattr(drafter._Decoding, "_accept", the_other)
    verdict = greedy_verdict(WindowedMTP.from_model(model, window=WINDOW), prompt(30), new_tokens=20)
    assert verdict.verdict == "near tie" and verdict.position == 0
    assert verdict.gap <= verdict.threshold < 1e-3 and verdict.margin < 1e-4


def cache_in(kwargs: dict[str, Any]) -> Any:
    """The cache among a module's arguments, by any of the names that versions of transformers give it."""
    names = ("cache", "past_key_values", "cache_params")
    return next((kwargs[name] for name in names if kwargs.get(name) is not None), None)


def chunks_without_the_recurrent_state(patch: pytest.MonkeyPatch):
    """Passes of several tokens begin with an empty recurrent state, if not with an empty cache."""
    forward = Qwen3_5GatedDeltaNet.forward

    def broken(self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
        cache = cache_in(kwargs)
        if cache is not None and hidden_states.shape[1] > 1:
            for state in cache.layers[self.layer_idx].recurrent_states.values():
                if state is not None:
                    state.zero_()
        return forward(self, hidden_states, **kwargs)

    patch.setattr(Qwen3_5GatedDeltaNet, "forward", broken)


def chunks_that_see_ahead(patch: pytest.MonkeyPatch):
    """In passes of several tokens each one attends to all of them, if the cache is not empty."""
    forward = Qwen3_5Attention.forward

    def broken(self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
        cache, queries = cache_in(kwargs), hidden_states.shape[1]
        known = cache.get_seq_length(self.layer_idx) if isinstance(cache, DynamicCache) else 0  # else the draft's
        if known and queries > 1:
            kwargs["attention_mask"] = torch.ones(1, 1, queries, known + queries, dtype=torch.bool)
        return forward(self, hidden_states, **kwargs)

    patch.setattr(Qwen3_5Attention, "forward", broken)


def chunks_that_overflow(patch: pytest.MonkeyPatch):
    """Passes of several tokens give NaN, if the cache is not empty, as where numbers leave a dtype's range."""
    forward = Qwen3_5Attention.forward

    def broken(self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
        cache = cache_in(kwargs)
        known = cache.get_seq_length(self.layer_idx) if isinstance(cache, DynamicCache) else 0
        made = forward(self, hidden_states, **kwargs)
        return (made[0] * float("nan"), *made[1:]) if known and hidden_states.shape[1] > 1 else made

    patch.setattr(Qwen3_5Attention, "forward", broken)


FAULTS = [chunks_without_the_recurrent_state, chunks_that_see_ahead, chunks_that_overflow]


@pytest.mark.parametrize(
    ("checkpoint", "dtype"),
    [("tiny", torch.float32), ("bundled", torch.float32), ("bundled", torch.bfloat16)],
)
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_target_whose_chunks_are_wrong_disagrees_with_itself(
    fault: Any, checkpoint: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    path = tiny.checkpoint("qwen3_5") if checkpoint == "tiny" else checkpoint_path()
    model = tiny.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    windowed = WindowedMTP.from_model(model, window=WINDOW, override=lambda context, own: [5, 6, 7][: len(own)])
    if fault is None:
        assert greedy_verdict(windowed, prompt(60), new_tokens=40).verdict in ("equal", "near tie")
        return
    fault(monkeypatch)
    verdict = greedy_verdict(windowed, prompt(60), new_tokens=40)
    assert verdict.verdict == "the target disagrees with itself" and verdict.position is not None
    assert not verdict.noise <= 4 * verdict.explained
    assert not LosslessResult(provenance=Provenance.collect(), settings={}, rows=(verdict,)).passed


@pytest.mark.parametrize("family", sorted({*tiny.BUILDERS} - {"qwen3_5-chained", "deepseek_v3-chained"}))
def test_rounding_explains_what_honest_chunks_differ_by(family: str):
    """In bfloat16, whether or not the drafter's output happens to differ."""
    model, ids = tiny.model(family, torch.bfloat16), prompt(40)
    plain = lossless.generate(model, ids, do_sample=False, max_new_tokens=24, eos_token_id=None)
    alone = chunked_logits(model, plain, 40, 1)
    explained = lossless.ROUNDING_MARGIN * lossless._rounding(model, plain, 40, alone)
    for chunk in (2, 4):
        noise = lossless._largest(chunked_logits(model, plain, 40, chunk) - alone)
        assert noise.max() <= explained.max() and noise.mean() <= explained.mean()
    layers = model.get_decoder().layers
    assert not any(layer._forward_pre_hooks for layer in layers)


def test_honest_sampled_output_is_consistent(windowed: WindowedMTP):
    head, observer = windowed.head, windowed.on_step
    verdict = sampled(windowed)
    assert verdict.verdict == "consistent" and verdict.p_value > 1e-4
    assert verdict.control_p_value < 1e-6, "the same test must notice the draft's own tokens"
    assert (windowed.head, windowed.on_step) == (head, observer)


@pytest.mark.parametrize(
    ("method", "sabotage"),
    [("_accept", accept_everything), ("_propose", propose_the_argmax)],
    ids=["accept", "propose"],
)
def test_biased_sampled_output_is_different(
    windowed: WindowedMTP, monkeypatch: pytest.MonkeyPatch, method: str, sabotage: Any
):
    monkeypatch.setattr(drafter._Decoding, method, sabotage)
    assert sampled(windowed).verdict == "different"


def test_a_prompt_over_the_limit_and_too_few_draws_are_refused(windowed: WindowedMTP):
    with pytest.raises(GenerationError, match="1024"):
        greedy_verdict(windowed, prompt(1020), new_tokens=20)
    with pytest.raises(GenerationError, match="at least 80"):
        SampledCheck(windowed, [prompt(20)], tokens=79)


def test_the_uniform_test_is_pearsons():
    values = torch.rand(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 1.1
    expected = chisquare(torch.histc(values, 16, 0, 1).numpy())
    assert uniform_test(values) == pytest.approx((expected.statistic, expected.pvalue), rel=1e-9)


@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_chunks_do_not_change_the_target(chunk: int):
    model, ids = tiny.model("qwen3_5"), prompt(30)
    with torch.no_grad():
        whole = model(ids).logits[0]
    assert torch.allclose(chunked_logits(model, ids, 12, chunk), whole[11:-1], atol=1e-4)


def test_first_difference():
    one = torch.tensor([1, 2, 3])
    assert first_difference(one, one) is None
    assert first_difference(one, torch.tensor([1, 5, 3])) == 1
    assert first_difference(one, one[:2]) == first_difference(one[:2], one) == 2
