"""EAGLE-3: drafts equal a reference without a cache, output equals the target's own, bad drafters are refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_eagle3
import torch
from tiny_eagle3 import DRAFTERS, HEAD_DIM, HEADS, KV_HEADS
from torch import Tensor, nn

from windowed_mtp import SinkWindow
from windowed_mtp.engines.protocol import StepContext, StepEvent
from windowed_mtp.engines.transformers import WindowedMTP
from windowed_mtp.engines.transformers.cache import KeepAll, Ring
from windowed_mtp.engines.transformers.draft import DraftState
from windowed_mtp.engines.transformers.heads import load_head
from windowed_mtp.engines.transformers.heads.eagle3 import Eagle3Head
from windowed_mtp.errors import CheckpointError, WindowedMTPError

ARRANGEMENTS = {"all": ("all", "full"), "ring": ("ring", "full"), "pruned": ("ring", "pruned")}
WINDOWS = ((0, 1), (1, 2), (4, 16), (64, 4032))
GAMMA = 3


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the window of", category=UserWarning)
        yield


def head_of(name: str) -> Eagle3Head:
    head = load_head(tiny_eagle3.target(name), eagle3=tiny_eagle3.checkpoint(name))
    assert isinstance(head, Eagle3Head)
    return head


def prompt(length: int) -> Tensor:
    return torch.randint(0, tiny.VOCAB, (1, length), generator=torch.Generator().manual_seed(length))


def generate(name: str, ids: Tensor, **options: Any) -> Any:
    options = {"do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(ids), **options}
    return tiny_eagle3.target(name).generate(ids, **options)


def target_features(name: str, ids: Tensor, layers: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        states = tiny_eagle3.target(name)(ids, output_hidden_states=True).hidden_states
    return torch.cat([states[layer] for layer in layers], dim=-1)


class Reference:
    """A drafter in plain torch: every query again over all entries before it, under an explicit mask.

    ``mistake`` names one thing to get wrong; the comparison must notice each.
    """

    def __init__(self, name: str, window: SinkWindow | None, mistake: str = "") -> None:
        self.drafter = DRAFTERS[name]
        self.name = name
        self.window = window
        self.mistake = mistake
        self.weights = tiny_eagle3.weights(name)
        embedding = tiny_eagle3.target(name).get_input_embeddings().weight.detach()
        self.embedding = self.weights.get("embed_tokens.weight", embedding)

    def features(self, ids: Tensor) -> Tensor:
        """Hidden states ``[n, H]`` that the target gives the entries."""
        layers = self.drafter.layers
        if self.mistake == "wrong layers":
            layers = (layers[0] - 1 if layers[0] else 1, *layers[1:])
        if self.mistake == "layers in another order":
            layers = layers[::-1]
        return target_features(self.name, ids, layers)[0] @ self.weights["fc.weight"].T

    def norm(self, which: str, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * self.weights[f"{which}.weight"]

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate ``[n, heads, dim]`` by position, the first half of dim against the second."""
        theta = self.drafter.rope_theta * (10 if self.mistake == "another rope base" else 1)
        half = HEAD_DIM // 2
        angles = torch.outer(torch.arange(len(x)) / self.drafter.rope_factor, theta ** -(torch.arange(half) / half))
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def visible(self, count: int) -> Tensor:
        """Which of ``count`` entries each may read, ``[count, count]`` bool."""
        sink, window = (0, count) if self.window is None else (self.window.sink, self.window.window)
        first = window + (1 if self.mistake == "a window one too wide" else 0)
        rows = [[k <= q and (k < sink or k > q - first) for k in range(count)] for q in range(count)]
        return torch.tensor(rows)

    def run(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Entries' tokens ``[n]`` and hidden states ``[n, H]`` to logits ``[n, V]`` and what is recycled ``[n, H]``."""
        w, count = self.weights, len(tokens)
        normed = self.norm("midlayer.hidden_norm", hidden)
        halves = [self.norm("midlayer.input_layernorm", self.embedding[tokens]), normed]
        x = torch.cat(halves[::-1] if self.mistake == "swapped halves" else halves, dim=-1)
        q, k, v = (
            (x @ w[f"midlayer.self_attn.{p}_proj.weight"].T).view(count, heads, HEAD_DIM)
            for p, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (self.rotate(k), v))
        scores = torch.einsum("qhd,khd->hqk", self.rotate(q), k) * HEAD_DIM**-0.5
        attention = scores.masked_fill(~self.visible(count), float("-inf")).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", attention, v).flatten(1) @ w["midlayer.self_attn.o_proj.weight"].T
        after_norm = self.drafter.norm_before_residual != (self.mistake == "residual from the other side")
        x = (normed if after_norm else hidden) + mixed
        y = self.norm("midlayer.post_attention_layernorm", x)
        gate, up, down = (w[f"midlayer.mlp.{p}_proj.weight"].T for p in ("gate", "up", "down"))
        x = x + (nn.functional.silu(y @ gate) * (y @ up)) @ down
        out = self.norm("norm", x)
        recycles_out = self.drafter.norm_output != (self.mistake == "the other output recycled")
        return self.over_vocabulary(out @ w["lm_head.weight"].T), out if recycles_out else x

    def over_vocabulary(self, logits: Tensor) -> Tensor:
        if "d2t" not in self.weights:
            return logits
        full = torch.full((len(logits), tiny.VOCAB), float("-inf"))
        for draft_id, offset in enumerate(self.weights["d2t"].tolist()):
            full[:, draft_id + (0 if self.mistake == "no d2t" else offset)] = logits[:, draft_id]
        return full

    def draft(self, ids: Tensor, drafted: Tensor) -> list[Tensor]:
        """Logits ``[V]`` that each of the drafted tokens should have come from."""
        shift = 0 if self.mistake == "each entry its own token" else 1
        known = ids.shape[1] - 1
        hidden = self.features(ids)[:known]
        made = []
        for token in drafted[0]:
            tokens = ids[0, shift : shift + len(hidden)]
            logits, recycled = self.run(tokens, hidden)
            made.append(logits[-1])
            hidden = torch.cat([hidden, recycled[-1:]])
            ids = torch.cat([ids, token.view(1, 1)], dim=1)
        return made


def distance(actual: Tensor, expected: Tensor) -> float:
    """Largest difference of two logits; infinite where they do not cover the same tokens."""
    finite = expected.isfinite()
    if not torch.equal(finite, actual.isfinite()):
        return float("inf")
    return float((actual - expected)[finite].abs().max())


def drafting_distance(name: str, window: SinkWindow | None, arrangement: str, mistake: str = "") -> float:
    """Largest distance from the reference over a prefill and steps that keep 1, 4, 2, ... tokens."""
    keep, prefill = ARRANGEMENTS[arrangement]
    state = DraftState(head_of(name), window, GAMMA, keep, prefill)  # type: ignore[arg-type]
    reference = Reference(name, window, mistake)
    ids = prompt(60)
    features = target_features(name, ids, DRAFTERS[name].layers)
    logits: list[Tensor] = []

    def choose(scores: Tensor, before: Tensor) -> Tensor:
        logits.append(scores[0])
        return scores.argmax(-1, keepdim=True)

    worst, seen, known = 0.0, 0, 30
    with torch.no_grad():
        for step in (1, 4, 2, 1, 3):
            state.observe(features[:, seen : known - 1])
            seen = known - 1
            drafted = state.propose(ids[:, :known], GAMMA, choose)
            expected = reference.draft(ids[:, :known], drafted)
            worst = max(worst, *(distance(a, e) for a, e in zip(logits[-GAMMA:], expected, strict=True)))
            known += step
    return worst


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("window", [*WINDOWS, None])
def test_drafts_equal_the_reference(name: str, window: tuple[int, int] | None) -> None:
    reads = None if window is None else SinkWindow(*window)
    for arrangement in ("all",) if reads is None else ARRANGEMENTS:
        assert drafting_distance(name, reads, arrangement) < 1e-4, arrangement


MISTAKES = (
    "swapped halves",
    "wrong layers",
    "layers in another order",
    "no d2t",
    "residual from the other side",
    "the other output recycled",
    "another rope base",
    "a window one too wide",
    "each entry its own token",
)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_notices(mistake: str) -> None:
    assert drafting_distance("draft-vocabulary", SinkWindow(4, 8), "all", mistake) > 1e-2


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize(
    ("window", "ring"), [((1, 2), False), ((1, 2), True), ((4, 16), False), ((4, 16), True), (None, False)]
)
def test_every_query_of_a_pass_equals_the_reference(name: str, window: tuple[int, int] | None, ring: bool) -> None:
    reads = None if window is None else SinkWindow(*window)
    head, ids = head_of(name), prompt(50)
    kv = Ring(reads, GAMMA) if ring and reads is not None else KeepAll(reads)
    reference = Reference(name, reads)
    expected, _ = reference.run(ids[0, 1:], reference.features(ids)[:-1])
    start = 0
    with torch.no_grad():
        hidden = head.fuse(target_features(name, ids, DRAFTERS[name].layers))
        for length in (30, 1, 4, 3, 4, 1, 2, 4):
            end = start + length
            positions = torch.arange(start, end)[None]
            out, _ = head.forward(0, ids[:, start + 1 : end + 1], hidden[:, start:end], positions, kv)
            assert distance(head.logits(0, out)[0], expected[start:end]) < 1e-4
            start = end
    assert start == 49


def proposals(kind: str, truth: Tensor) -> Any:
    """Replace proposals by what the target will say, by what it will not, or by both in turn."""

    def override(context: StepContext, own: tuple[int, ...]) -> list[int]:
        right = truth[0, context.length : context.length + len(own)].tolist()
        wrong = [(token + 1) % tiny.VOCAB for token in right]
        mixed = [r if i % 2 == context.step % 2 else w for i, (r, w) in enumerate(zip(right, wrong, strict=True))]
        return {"right": right, "wrong": wrong, "alternating": mixed}[kind]

    return None if kind == "own" else override


def check_greedy(name: str, length: int, window: tuple[int, int], depth: int, arrangement: str) -> None:
    """Greedy output is the target's own, whoever proposes; proposals known to be right are all taken."""
    ids = prompt(length)
    truth = generate(name, ids, max_new_tokens=16)
    keep, prefill = ARRANGEMENTS[arrangement]
    for kind in ("own", "right", "wrong", "alternating"):
        made = WindowedMTP(
            tiny_eagle3.target(name), head_of(name), window=SinkWindow(*window), num_speculative_tokens=depth,
            keep=keep, prefill=prefill, override=proposals(kind, truth),  # type: ignore[arg-type]
        )  # fmt: skip
        assert generate(name, ids, max_new_tokens=16, custom_generate=made).tolist() == truth.tolist(), kind
        if kind in ("right", "wrong"):
            taken = made.stats.proposed if kind == "right" else tuple(0 for _ in made.stats.proposed)
            assert tuple(made.stats.accepted) == tuple(taken)


@pytest.mark.parametrize("depth", [1, 3, 5])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_greedy_output_is_the_targets(depth: int, window: tuple[int, int], arrangement: str) -> None:
    check_greedy("draft-vocabulary", 50, window, depth, arrangement)


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "draft-vocabulary"])
@pytest.mark.parametrize(("arrangement", "length"), [("all", 2), ("ring", 50), ("pruned", 50)])
def test_greedy_output_is_the_targets_for_every_drafter(name: str, arrangement: str, length: int) -> None:
    check_greedy(name, length, (4, 16), 3, arrangement)


@pytest.mark.parametrize("name", ["draft-vocabulary", "hybrid"])
def test_sampled_drafts_come_from_the_draft_vocabulary(name: str) -> None:
    events: list[StepEvent] = []
    made = WindowedMTP(tiny_eagle3.target(name), head_of(name), window=SinkWindow(4, 16), on_step=events.append)
    torch.manual_seed(0)
    output = generate(
        name, prompt(30), max_new_tokens=40, do_sample=True, temperature=1.5, custom_generate=made,
        return_dict_in_generate=True, output_scores=True, output_logits=True,
    )  # fmt: skip
    weights = tiny_eagle3.weights(name)
    vocabulary = set((weights["d2t"] + torch.arange(len(weights["d2t"]))).tolist())
    drafted = {token for event in events for token in event.proposed}
    assert len(drafted) > 10 and drafted <= vocabulary
    assert made.stats.acceptance_length > 1
    assert output.sequences.shape == (1, 70) and not set(output.sequences[0, 30:].tolist()) <= vocabulary
    assert torch.stack(output.logits).isfinite().all() and not torch.stack(output.scores).isnan().any()


@pytest.mark.parametrize("sample", [False, True])
def test_forbidding_the_whole_draft_vocabulary_stops_nothing(sample: bool) -> None:
    offsets = tiny_eagle3.weights("draft-vocabulary")["d2t"]
    vocabulary = (offsets + torch.arange(len(offsets))).tolist()
    made = WindowedMTP(tiny_eagle3.target("draft-vocabulary"), head_of("draft-vocabulary"), window=SinkWindow(4, 16))
    output = generate(
        "draft-vocabulary", prompt(30), max_new_tokens=12, do_sample=sample, suppress_tokens=vocabulary,
        custom_generate=made,
    )  # fmt: skip
    assert output.shape == (1, 42) and not set(output[0, 30:].tolist()) & set(vocabulary)


def test_bfloat16_follows_the_target() -> None:
    target = tiny_eagle3.llama().to(torch.bfloat16)
    head = load_head(target, eagle3=tiny_eagle3.checkpoint("draft-vocabulary"))
    made = WindowedMTP(target, head, window=SinkWindow(4, 16))
    ids = prompt(40)
    output = target.generate(ids, max_new_tokens=8, attention_mask=torch.ones_like(ids), custom_generate=made)
    assert output.shape == (1, 48)
    assert {p.dtype for p in head.module.parameters()} == {torch.bfloat16}  # type: ignore[attr-defined]


def hooks(model: nn.Module) -> list[tuple[int, ...]]:
    return [(*module._forward_hooks, *module._forward_pre_hooks) for module in model.modules()]


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_come_off(fails: bool) -> None:
    def observe(event: StepEvent) -> None:
        if fails:
            raise RuntimeError("stop")

    made = WindowedMTP(tiny_eagle3.target("hybrid"), head_of("hybrid"), window=SinkWindow(4, 16), on_step=observe)
    before = hooks(made.model)
    if fails:
        with pytest.raises(RuntimeError, match="stop"):
            generate("hybrid", prompt(20), max_new_tokens=8, custom_generate=made)
    else:
        generate("hybrid", prompt(20), max_new_tokens=8, custom_generate=made)
    assert hooks(made.model) == before


def test_default_layers_are_early_middle_and_late(tmp_path: Path) -> None:
    target = tiny_eagle3.llama(layers=9)
    drafter = tiny_eagle3.save(tmp_path, "draft-vocabulary", eagle_config=None)
    assert load_head(target, eagle3=drafter).feature_layers() == [2, 4, 6]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no tensor": ({"drop": "midlayer.mlp.up_proj.weight"}, "without midlayer.mlp.up_proj.weight"),
    "no d2t": ({"drop": "d2t"}, "no tensor d2t"),
    "no lm_head": ({"drop": "lm_head.weight"}, "without lm_head.weight"),
    "unknown tensor": ({"tensors": {"mask_hidden": torch.zeros(1, 96)}}, "unknown tensor mask_hidden"),
    "quantised": ({"tensors": {"fc.weight": torch.zeros(32, 96, dtype=torch.int8)}}, "quantised"),
    "d2t out of range": ({"tensors": {"d2t": torch.full((61,), 50)}}, "d2t"),
    "d2t twice the same": ({"tensors": {"d2t": -torch.arange(61)}}, "d2t"),
    "d2t too short": ({"tensors": {"d2t": torch.zeros(60, dtype=torch.long)}}, "d2t"),
    "no size": ({"intermediate_size": None}, "intermediate_size"),
    "impossible size": ({"num_attention_heads": 5}, "not valid"),
    "another hidden size": ({"target_hidden_size": 64}, "features of size 64"),
    "two layers": ({"num_hidden_layers": 2}, "num_hidden_layers to 2"),
    "norm before fc": ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc"),
    "fc norm": ({"fc_norm": True}, "fc_norm"),
    "parallel": ({"pard_token": 5}, "pard_token"),
    "final features": ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
    "sliding": ({"layer_types": ["sliding_attention"]}, "layer_types"),
    "rope": ({"rope_scaling": {"rope_type": "spiral"}}, "rope_type to 'spiral'"),
    "default layers": ({"eagle_config": None}, r"layers \[2, 3, 3\] does not fit a model of 6 layers"),
    "late layer": ({"eagle_aux_hidden_state_layer_ids": [2, 3, 6], "eagle_config": None}, "does not fit a model of 6"),
    "two features": ({"eagle_aux_hidden_state_layer_ids": [2, 3], "eagle_config": None}, "fc.weight is"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_drafters_are_refused_in_one_sentence(case: str, tmp_path: Path) -> None:
    changes, match = BAD[case]
    folder = tiny_eagle3.save(tmp_path, "draft-vocabulary", **changes)
    with pytest.raises(CheckpointError, match=match) as caught:
        load_head(tiny_eagle3.target("draft-vocabulary"), eagle3=folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert caught.value.__cause__ is None and isinstance(caught.value, WindowedMTPError)


def test_a_short_embedding_is_refused(tmp_path: Path) -> None:
    rows = {"embed_tokens.weight": torch.zeros(90, tiny.HIDDEN)}
    folder = tiny_eagle3.save(tmp_path, "whole-vocabulary", tensors=rows, vocab_size=90)
    with pytest.raises(CheckpointError, match="embeds 90 tokens"):
        load_head(tiny_eagle3.target("whole-vocabulary"), eagle3=folder)


def test_a_folder_without_a_drafter_is_refused(tmp_path: Path) -> None:
    target = tiny_eagle3.target("draft-vocabulary")
    with pytest.raises(CheckpointError, match=r"no readable config\.json"):
        load_head(target, eagle3=str(tmp_path))
    folder = Path(tiny_eagle3.save(tmp_path, "draft-vocabulary"))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"convert its pytorch_model\.bin"):
        load_head(target, eagle3=str(folder))
    with pytest.raises(CheckpointError, match="pass one of them"):
        load_head(target, checkpoint=str(folder), eagle3=str(folder))


def test_the_targets_output_head_serves_where_the_drafter_has_none(tmp_path: Path) -> None:
    target = tiny_eagle3.target("whole-vocabulary")
    folder = tiny_eagle3.save(tmp_path, "whole-vocabulary", drop="lm_head.weight")
    head = load_head(target, eagle3=folder)
    out = torch.randn(1, 2, tiny.HIDDEN)
    assert torch.equal(head.logits(0, out), target.get_output_embeddings()(out))


def test_a_drafter_for_fewer_positions_is_announced(tmp_path: Path) -> None:
    folder = tiny_eagle3.save(tmp_path, "draft-vocabulary", max_position_embeddings=512)
    with pytest.warns(UserWarning, match="512 positions, the model for 1024"):
        load_head(tiny_eagle3.target("draft-vocabulary"), eagle3=folder)
