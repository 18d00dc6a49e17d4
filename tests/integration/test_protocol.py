"""What ``generate`` offers works with the drafter, and the outside sees and steers every step."""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny
import torch
from checks import Case, changing_depth, check_greedy, drafter, generate, plain, prompt
from transformers import LogitsProcessor, MinLengthLogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from windowed_mtp import SinkWindow
from windowed_mtp.engines.protocol import StepContext, StepEvent
from windowed_mtp.engines.transformers import WindowedMTP
from windowed_mtp.errors import GenerationError

FAMILIES = ["qwen3_5", "deepseek_v3"]


class Collect(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self):
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


@pytest.mark.parametrize("family", FAMILIES)
def test_end_of_sequence_in_the_middle_of_a_step(family: str):
    truth = plain(family, 40, 24)
    for position in (41, 45, 50):
        eos = int(truth[0, position])
        ids = prompt(40)
        expected = generate(family, ids, max_new_tokens=24, eos_token_id=eos, pad_token_id=0)
        for kind in ("own", "right"):
            made = drafter(Case(family, depth=5), override=None if kind == "own" else _right(truth))
            output = generate(family, ids, max_new_tokens=24, eos_token_id=eos, pad_token_id=0, custom_generate=made)
            assert output.tolist() == expected.tolist()


def _right(truth: torch.Tensor):
    return lambda context, own: truth[0, context.length : context.length + len(own)].tolist()


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 7])
def test_max_length_is_met_exactly(new_tokens: int):
    truth = plain("qwen3_5", 40, 24)
    made = drafter(Case("qwen3_5", depth=5), override=_right(truth))
    output = generate("qwen3_5", prompt(40), max_length=40 + new_tokens, custom_generate=made)
    assert output.tolist() == truth[:, : 40 + new_tokens].tolist()
    assert made.stats.new_tokens == new_tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 9, "eos_token_id": list(range(0, tiny.VOCAB, 3)), "pad_token_id": 0},
        {"logits_processor": [MinLengthLogitsProcessor(60, 5)]},
        {"prefill_chunk_size": 16},
    ],
    ids=lambda options: next(iter(options)),
)
def test_logits_processors(family: str, options: dict):
    ids = prompt(40)
    expected = generate(family, ids, max_new_tokens=24, **options)
    for kind in ("own", "right"):
        made = drafter(Case(family, depth=4, changing=True), override=_right(expected) if kind == "right" else None)
        assert generate(family, ids, max_new_tokens=24, custom_generate=made, **options).tolist() == expected.tolist()


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_a_processor_may_run_the_target_itself(family: str):
    class AskAgain(LogitsProcessor):
        def __call__(self, input_ids, scores):
            with torch.no_grad():
                return scores + tiny.model(family)(input_ids.flip(1)).logits[:, -1]

    ids, options = prompt(20), {"max_new_tokens": 12, "logits_processor": [AskAgain()]}
    expected = generate(family, ids, **options)
    for kind in ("own", "right"):
        override = mixed(expected) if kind == "right" else None
        made = drafter(Case(family, depth=3), override=override)
        assert generate(family, ids, custom_generate=made, **options).tolist() == expected.tolist()


def mixed(truth: torch.Tensor):
    """Right proposals but for the second."""
    right = _right(truth)
    return lambda context, own: [(t + (i == 1)) % tiny.VOCAB for i, t in enumerate(right(context, own))]


def test_a_compiled_model_is_the_model():
    model = tiny.model("deepseek_v3")
    compiled = torch.compile(model, backend="eager")
    made = WindowedMTP.from_model(compiled, window=SinkWindow(4, 16))
    ids = prompt(40)
    output = compiled.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, custom_generate=made)
    assert output.tolist() == plain("deepseek_v3", 40, 24)[:, :48].tolist()


def test_stopping_criteria_see_every_prefix():
    class StopAt(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([input_ids.shape[1] >= 47])

    truth = plain("qwen3_5", 40, 24)
    made = drafter(Case("qwen3_5", depth=5), override=_right(truth))
    output = generate("qwen3_5", prompt(40), max_new_tokens=24, stopping_criteria=[StopAt()], custom_generate=made)
    assert output.tolist() == truth[:, :47].tolist()


class Around:
    """Somebody's object that holds a drafter."""

    def __init__(self, made: WindowedMTP):
        self.made = made

    def decode(self, *args, **kwargs):
        return (lambda: self.made(*args, **kwargs))()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda made: made,
        lambda made: lambda *args, **kwargs: made(*args, **kwargs),
        lambda made: functools.partial(made),
        lambda made: functools.partial(lambda *args, **kwargs: made(*args, **kwargs)),
        lambda made: functools.wraps(made.__call__)(lambda *args, **kwargs: made(*args, **kwargs)),
        lambda made: Around(made).decode,
    ],
    ids=["itself", "lambda", "partial", "partial of lambda", "wraps", "method"],
)
def test_the_streamer_of_generate_gets_every_token(wrap):
    streamer = Collect()
    custom = wrap(drafter(Case("qwen3_5")))
    output = generate("qwen3_5", prompt(40), max_new_tokens=24, custom_generate=custom, streamer=streamer)
    assert streamer.tokens == output[0].tolist() == plain("qwen3_5", 40, 24)[0].tolist()
    assert streamer.ended


def test_a_generation_within_another_has_a_streamer_of_its_own():
    outer, inner, made = Collect(), Collect(), drafter(Case("qwen3_5"))

    class Nested(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == 45:
                generate("qwen3_5", prompt(33), max_new_tokens=3, custom_generate=made, streamer=inner)
                generate("qwen3_5", prompt(33), max_new_tokens=3, custom_generate=made)
            return scores

    options = {"max_new_tokens": 8, "streamer": outer, "logits_processor": [Nested()]}
    generate("qwen3_5", prompt(40), custom_generate=lambda *args, **kwargs: made(*args, **kwargs), **options)
    assert outer.tokens == plain("qwen3_5", 40, 24)[0, :48].tolist()
    assert inner.tokens == plain("qwen3_5", 33, 3)[0].tolist()


def test_a_call_from_elsewhere_is_refused():
    made = drafter(Case("qwen3_5"))

    def elsewhere(*args, **kwargs):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(made, *args, **kwargs).result()

    class Direct(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return made(tiny.model("qwen3_5"), input_ids, [], [], None)

    for options in ({"custom_generate": elsewhere}, {"logits_processor": [Direct()]}):
        with pytest.raises(GenerationError, match="was not called by generate") as caught:
            generate("qwen3_5", prompt(40), max_new_tokens=4, streamer=Collect(), **options)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_cache_are_those_of_plain_decoding(family: str):
    options = {"max_new_tokens": 12, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    ids = prompt(40)
    expected = generate(family, ids, **options)
    made = generate(family, ids, custom_generate=drafter(Case(family, depth=5)), **options)
    assert made.sequences.tolist() == expected.sequences.tolist()
    for a, b in zip(made.scores + made.logits, expected.scores + expected.logits, strict=True):
        assert torch.allclose(a, b, atol=1e-4)
    caches = [getattr(o, "cache", None) or o.past_key_values for o in (made, expected)]
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == ids.shape[1] + 11
    for a, b in zip(caches[0].layers, caches[1].layers, strict=True):
        for name in ("keys", "values"):
            if getattr(a, name, None) is not None:
                assert torch.allclose(getattr(a, name), getattr(b, name), atol=1e-4)
        for name in ("conv_states", "recurrent_states"):
            for index, state in getattr(a, name, {}).items():
                assert torch.allclose(state, getattr(b, name)[index], atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_hooks_come_off(family: str):
    made = drafter(Case(family))
    hooks = lambda: sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in tiny.model(family).modules())  # noqa: E731
    before = hooks()
    generate(family, prompt(40), max_new_tokens=8, custom_generate=made)

    def fail(event: StepEvent) -> None:
        raise RuntimeError("observer failed")

    made.on_step = fail
    with pytest.raises(RuntimeError, match="observer failed"):
        generate(family, prompt(40), max_new_tokens=8, custom_generate=made)
    assert hooks() == before


def test_step_events_add_up():
    events: list[StepEvent] = []
    truth = plain("qwen3_5", 40, 24)
    case = Case("qwen3_5", depth=4, changing=True, window=(4, 16))
    made = drafter(case, on_step=events.append, override=_right(truth))
    output = generate("qwen3_5", prompt(40), max_new_tokens=24, custom_generate=made)
    assert [event.step for event in events] == list(range(len(events)))
    assert [t for event in events for t in event.emitted] == output[0, 41:].tolist()
    length = 41
    for event in events:
        assert event.length == length
        assert len(event.proposed) <= event.depth
        assert event.emitted[: event.accepted] == event.proposed[: event.accepted]
        assert event.draft_seconds >= 0 <= event.verify_seconds
        # Each pass reads at most sink + window keys, and its own further entries.
        assert event.draft_keys <= max(event.depth, 0) * (4 + 16) + 24 if event.depth else event.draft_keys == 0
        length += len(event.emitted)
    assert made.stats.steps == len(events)
    assert made.stats.step_tokens == 23
    assert made.stats.acceptance_length == 23 / len(events)
    assert made.stats.draft_keys_read == sum(event.draft_keys for event in events)
    assert all(share == 1 for share in made.stats.conditional_acceptance)


def test_depth_sees_the_context_and_is_checked():
    seen: list[StepContext] = []

    def depth(context: StepContext) -> int:
        seen.append(context)
        assert context.ids.shape[1] == context.length
        assert context.length + context.remaining == 64
        return changing_depth(3)(context)

    generate("qwen3_5", prompt(40), max_new_tokens=24, custom_generate=drafter(Case("qwen3_5"), depth=depth))
    assert [context.step for context in seen] == list(range(len(seen)))
    made = drafter(Case("qwen3_5"), depth=lambda context: 4)
    with pytest.raises(ValueError, match="between 0 and num_speculative_tokens"):
        generate("qwen3_5", prompt(40), max_new_tokens=24, custom_generate=made)


def test_a_step_does_not_copy_all_ids():
    places: list[int] = []

    def depth(context: StepContext) -> int:
        places.append(context.ids.data_ptr())
        return 3

    made = drafter(Case("qwen3_5"), depth=depth)
    ids = prompt(40)
    output = generate("qwen3_5", ids, max_new_tokens=24, custom_generate=made)
    assert len(places) > 5 and len({*places}) == 1
    assert places[0] not in (ids.data_ptr(), output.data_ptr())
    assert output.untyped_storage().nbytes() == 8 * 64, "the output comes without room for more"


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5-chained"])
def test_a_shadow_head_proposes_as_it_would_alone_and_disturbs_nothing(family: str):
    truth = plain(family, 60, 24)
    right = _right(truth)
    alone: list[tuple[int, ...]] = []
    beside: list[StepEvent] = []

    def keep(context: StepContext, own: tuple[int, ...]) -> list[int]:
        alone.append(own)
        return right(context, own)

    case = Case(family, prompt=60, depth=4, changing=True)
    generate(family, prompt(60), max_new_tokens=24, custom_generate=drafter(case, override=keep, window=None))
    shadows = {"native": None, "windowed": SinkWindow(*case.window)}
    made = drafter(case, override=right, shadows=shadows, on_step=beside.append)
    output = generate(family, prompt(60), max_new_tokens=24, custom_generate=made)
    assert output.tolist() == truth.tolist()
    assert [event.shadow["native"] for event in beside] == alone
    own: list[tuple[int, ...]] = []
    watched = drafter(case, override=lambda context, tokens: own.append(tokens) or right(context, tokens))
    generate(family, prompt(60), max_new_tokens=24, custom_generate=watched)
    assert [event.shadow["windowed"] for event in beside] == own

    torch.manual_seed(0)
    sampled = generate(family, prompt(60), max_new_tokens=24, do_sample=True, custom_generate=drafter(case))
    torch.manual_seed(0)
    made = drafter(case, shadows=shadows, on_step=beside.append)
    assert generate(family, prompt(60), max_new_tokens=24, do_sample=True, custom_generate=made).equal(sampled)


def test_a_drafter_serves_one_generation_after_another():
    for length in (40, 5, 130):
        check_greedy(Case("qwen3_5", prompt=length))
    made = drafter(Case("qwen3_5"))
    for length in (40, 5, 130):
        output = generate("qwen3_5", prompt(length), max_new_tokens=24, custom_generate=made)
        assert output.tolist() == plain("qwen3_5", length, 24).tolist()


def test_bf16_runs():
    model = tiny.model("qwen3_5", torch.bfloat16)
    made = WindowedMTP.from_model(model, window=SinkWindow(4, 16), keep="ring", prefill="pruned")
    output = model.generate(prompt(40), max_new_tokens=8, eos_token_id=None, do_sample=True, custom_generate=made)
    assert output.shape == (1, 48)
