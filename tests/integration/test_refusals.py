"""Bad input gets one sentence, from the library a ``WindowedMTPError``, before anything runs."""

import pytest
import tiny
import torch
from checks import Case, drafter, generate, prompt
from transformers import DynamicCache

from windowed_mtp import SinkWindow
from windowed_mtp.engines.transformers import WindowedMTP
from windowed_mtp.engines.transformers.compat import cache_argument
from windowed_mtp.errors import AllocationError, GenerationError, WindowedMTPError, WindowError


def refused(error: type[WindowedMTPError], match: str):
    return pytest.raises(error, match=match)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"num_speculative_tokens": 2.5}, "num_speculative_tokens is 2.5"),
        ({"window": (4, 16)}, r"window is \(4, 16\), but it must be a SinkWindow"),
        ({"keep": "some"}, "keep is 'some'"),
        ({"prefill": "half"}, "prefill is 'half'"),
        ({"prefill": "pruned"}, "use keep='ring'"),
        ({"keep": "ring", "window": None}, "needs a window"),
        ({"keep": "ring", "window": SinkWindow(4, 16, min_context=21)}, "min_context 21 is above sink"),
    ],
)
def test_options_that_contradict(options: dict, match: str):
    with refused(WindowError, match):
        WindowedMTP(tiny.model("qwen3_5"), tiny.head("qwen3_5"), **options)


def test_a_window_shorter_than_a_first_pass_warns_once():
    with pytest.warns(UserWarning, match="shorter than the 6 entries") as caught:
        WindowedMTP(tiny.model("qwen3_5"), tiny.head("qwen3_5"), window=SinkWindow(4, 5), num_speculative_tokens=5)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def request(match: str, ids: torch.Tensor | None = None, **options) -> None:
    ids = prompt(20) if ids is None else ids
    with refused(GenerationError, match) as caught:
        generate("qwen3_5", ids, custom_generate=drafter(Case("qwen3_5")), **{"max_new_tokens": 4, **options})
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message


def test_batches():
    request("one sequence at a time, but the batch has 2", prompt(20).repeat(2, 1))
    request("one sequence at a time, but the batch has 3", num_return_sequences=3, do_sample=True)


def test_beams():
    request("num_beams=2", num_beams=2)


def test_padding():
    mask = torch.ones(1, 20, dtype=torch.int64)
    mask[0, :3] = 0
    request("the prompt is padded", attention_mask=mask)


def test_embeddings_instead_of_ids():
    embeddings = tiny.model("qwen3_5").get_input_embeddings()(prompt(20)).detach()
    request("inputs_embeds was passed", prompt(20), inputs_embeds=embeddings)
    with refused(GenerationError, "inputs_embeds was passed"):
        made = drafter(Case("qwen3_5"))
        tiny.model("qwen3_5").generate(inputs_embeds=embeddings, max_new_tokens=4, custom_generate=made)


def test_positions_of_the_caller():
    request("position_ids do not count", position_ids=torch.arange(20)[None] * 2)
    request("position_ids do not count", position_ids=torch.arange(21)[None])
    positions = torch.arange(20)[None]
    generate("qwen3_5", prompt(20), max_new_tokens=4, custom_generate=drafter(Case("qwen3_5")), position_ids=positions)


@pytest.mark.parametrize("depth", [None, 1.5, -1, 4])
def test_depths_that_cannot_be(depth: object):
    with refused(GenerationError, f"returned {depth}, but it must stay between 0 and"):
        made = drafter(Case("qwen3_5"), depth=lambda context: depth)
        generate("qwen3_5", prompt(20), max_new_tokens=4, custom_generate=made)


@pytest.mark.parametrize("token", [-1, tiny.VOCAB])
def test_proposals_outside_the_vocabulary(token: int):
    with refused(GenerationError, "the override proposed .* tokens are 0 to 96"):
        made = drafter(Case("qwen3_5"), override=lambda context, own: [token])
        generate("qwen3_5", prompt(20), max_new_tokens=4, custom_generate=made)


def test_a_caller_s_own_cache():
    request("carries no hidden states", past_key_values=DynamicCache(config=tiny.model("qwen3_5").config))


def test_other_caches():
    request("dynamic cache", use_cache=False)
    request("dynamic cache", cache_implementation="static")


def test_an_offloaded_cache():
    made = drafter(Case("qwen3_5"))

    def offloaded(*args, **kwargs):
        kwargs[cache_argument(args[0])].offloading = True  # only a machine with a GPU makes one
        return made(*args, **kwargs)

    with refused(GenerationError, "dynamic cache, but generate made one that is offloaded"):
        generate("qwen3_5", prompt(20), max_new_tokens=4, custom_generate=offloaded)


@pytest.mark.parametrize("prefill", ["full", "pruned"])
@pytest.mark.parametrize("window", [10**12, 2**62, 10**20])
def test_a_ring_that_no_memory_holds(window: int, prefill: str):
    options = {"window": SinkWindow(4, window), "keep": "ring", "prefill": prefill}
    with refused(
        AllocationError, f"need {window + 7:,} slots a layer, {(window + 7) * 2 * 2 * 16 * 4:,} bytes"
    ) as caught:
        generate("qwen3_5", prompt(20), max_new_tokens=4, custom_generate=tiny.drafter("qwen3_5", **options))
    message = str(caught.value)
    assert message.endswith("cpu cannot give; use a smaller window, or keep='all'.") and "\n" not in message


def test_a_draft_that_outgrows_its_memory(monkeypatch: pytest.MonkeyPatch):
    """The machine gives 256 slots and no more."""
    empty = torch.Tensor.new_empty

    def limited(self, *size, **options):
        if len(size) == 4 and size[2] > 256:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return empty(self, *size, **options)

    monkeypatch.setattr(torch.Tensor, "new_empty", limited)
    ids = prompt(250)
    with refused(
        AllocationError, r"need 3\d\d slots a layer, \d\d,\d\d\d bytes, .* shorten the prompt, or use keep='ring'\.$"
    ):
        generate("qwen3_5", ids, max_new_tokens=24, custom_generate=drafter(Case("qwen3_5", window=None)))
    assert generate("qwen3_5", prompt(20), max_new_tokens=4, custom_generate=drafter(Case("qwen3_5"))).shape == (1, 24)


def test_a_prompt_beyond_the_positions_names_the_limit():
    request("positions end at 1024", prompt(1025))


def test_internals_of_the_target_are_not_collected():
    request("output_attentions", output_hidden_states=True, return_dict_in_generate=True)


def test_another_model():
    with refused(GenerationError, "made for another model"):
        ids = prompt(20)
        generate("deepseek_v3", ids, max_new_tokens=4, custom_generate=drafter(Case("qwen3_5")))
