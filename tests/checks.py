"""What must hold of the embedded engine, as functions: tests call them, and mutation tests see them fail."""

from __future__ import annotations

import functools
import itertools
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import tiny
import torch
from torch import Tensor

from windowed_mtp import SinkWindow
from windowed_mtp.engines.protocol import StepContext
from windowed_mtp.engines.transformers import WindowedMTP
from windowed_mtp.engines.transformers.cache import DraftKV
from windowed_mtp.engines.transformers.draft import DraftState
from windowed_mtp.engines.transformers.heads.base import DraftHead

ARRANGEMENTS = {"all": ("all", "full"), "ring": ("ring", "full"), "pruned": ("ring", "pruned")}
DRAFTERS = ("own", "wrong", "right", "alternating")


@dataclass(frozen=True)
class Case:
    """One point of the matrix."""

    family: str
    prompt: int = 40
    depth: int = 3
    changing: bool = False
    window: tuple[int, int] | None = (4, 16)
    drafter: str = "own"
    arrangement: str = "all"
    new_tokens: int = 24

    def __str__(self) -> str:
        return "-".join(str(v).replace(" ", "") for v in vars(self).values())


def prompt(length: int, seed: int = 0) -> Tensor:
    """Random token ids, ``[1, length]``."""
    return torch.randint(0, tiny.VOCAB, (1, length), generator=torch.Generator().manual_seed(seed + length))


def generate(family: str, ids: Tensor, **kwargs: Any) -> Any:
    """Run a family's tiny model greedily unless told otherwise, without an end-of-sequence token."""
    options = {"do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    return tiny.model(family).generate(ids, **{**options, **kwargs})


@functools.cache
def plain(family: str, length: int, new_tokens: int) -> Tensor:
    """Greedy output of the target alone."""
    return generate(family, prompt(length), max_new_tokens=new_tokens)


def override(kind: str, truth: Tensor) -> Callable[[StepContext, tuple[int, ...]], list[int] | None]:
    """Proposals by knowledge of the truth: always right, always wrong, or in turn; or the head's own."""

    def propose(context: StepContext, own: tuple[int, ...]) -> list[int] | None:
        right = truth[0, context.length : context.length + len(own)].tolist()
        wrong = [(token + 1) % tiny.VOCAB for token in right]
        mixed = [r if i % 2 == context.step % 2 else w for i, (r, w) in enumerate(zip(right, wrong, strict=True))]
        return {"own": None, "right": right, "wrong": wrong, "alternating": mixed}[kind]

    return propose


def changing_depth(limit: int) -> Callable[[StepContext], int]:
    """Depths that change from step to step, 0 included."""
    return lambda context: min(limit, (1, 0, 5, 0, 0, 2, 3)[context.step % 7])


def drafter(case: Case, **options: Any) -> WindowedMTP:
    """The drafter of a case."""
    keep, prefill = ARRANGEMENTS[case.arrangement]
    options = {
        "window": None if case.window is None else SinkWindow(*case.window),
        "num_speculative_tokens": case.depth,
        "keep": keep,
        "prefill": prefill,
        "depth": changing_depth(case.depth) if case.changing else None,
        **options,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return tiny.drafter(case.family, **options)


def check_greedy(case: Case) -> WindowedMTP:
    """Greedy output equals plain greedy, token for token."""
    expected = plain(case.family, case.prompt, case.new_tokens)
    made = drafter(case, override=override(case.drafter, expected))
    output = generate(case.family, prompt(case.prompt), max_new_tokens=case.new_tokens, custom_generate=made)
    assert output.tolist() == expected.tolist(), f"{case}: differs"
    if case.drafter == "right" and not case.changing:
        assert made.stats.accepted == made.stats.proposed
    if case.drafter == "wrong":
        assert sum(made.stats.accepted) == 0
    return made


@dataclass
class Pass:
    """One recorded pass of a layer: its entries, and what came out for each of its queries."""

    known: int
    layer: int
    start: int
    tokens: Tensor
    hidden: Tensor
    out: Tensor
    blind: bool


@dataclass
class Recorder(DraftHead):
    """A head that keeps what every pass was given and gave."""

    head: DraftHead
    passes: list[Pass] = field(default_factory=list)
    known: int = 0
    proposals: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_layers = self.head.num_layers

    def feature_layers(self) -> list[int] | None:
        return self.head.feature_layers()

    def fuse(self, features: Tensor) -> Tensor:
        return self.head.fuse(features)

    def logits(self, layer: int, out: Tensor) -> Tensor:
        return self.head.logits(layer, out)

    def forward(self, layer: int, tokens: Tensor, hidden: Tensor, positions: Tensor, kv: DraftKV) -> Any:
        out, recycled = self.head.forward(layer, tokens, hidden, positions, kv)
        assert positions[0].tolist() == list(range(int(positions[0, 0]), int(positions[0, 0]) + tokens.shape[1]))
        self.passes.append(Pass(self.known, layer, int(positions[0, 0]), tokens, hidden, out, kv.blind))
        return out, recycled


@functools.cache
def visible_mask(window: SinkWindow | None, length: int = 1024) -> Tensor:
    """Which keys each query reads, said query by query from the definition: ``[1, 1, length, length]`` bool."""
    mask = torch.zeros(length, length, dtype=torch.bool)
    for query in range(length):
        visible: Iterable[int] = range(query + 1)
        if window is not None and query + 1 >= window.min_context:
            visible = (key for key in visible if key < window.sink or key >= query + 1 - window.window)
        mask[query, list(visible)] = True
    return mask[None, None]


class NoCache:
    """Stands where the KV would: keeps nothing, and states the visible set of every query position by position."""

    def __init__(self, window: SinkWindow | None) -> None:
        self.window = window

    def mask(self, query_len: int, device: torch.device) -> Tensor:
        return visible_mask(self.window)[..., :query_len, :query_len]

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return keys, values


def record(case: Case, sighted: bool = False, **options: Any) -> tuple[WindowedMTP, list[Pass]]:
    """Run a case and record every pass of its head, with the tokens known by then, and what it proposed.

    With ``sighted`` the draft has no prefill of its own: the first proposal's pass covers the prompt, and its outputs
    count.
    """
    made = drafter(case, **options)
    recorder = Recorder(made.head, known=case.prompt)
    depth, replace = made.depth, override(case.drafter, plain(case.family, case.prompt, case.new_tokens))

    def begin(context: StepContext) -> int:
        recorder.known = context.length
        return made.num_speculative_tokens if depth is None else depth(context)

    def propose(context: StepContext, own: tuple[int, ...]) -> Sequence[int] | None:
        recorder.proposals[context.length] = own
        return replace(context, own)

    made.head, made.depth, made.override = recorder, begin, propose
    no_prefill = mock.patch.object(DraftState, "advance", lambda self, ids: None) if sighted else nullcontext()
    with no_prefill:
        generate(case.family, prompt(case.prompt), max_new_tokens=case.new_tokens, custom_generate=made)
    return made, recorder.passes


@functools.cache
def features(family: str, length: int, new_tokens: int) -> Tensor:
    """Fused features ``[1, n, H]`` of greedy output, from one pass of the target."""
    model, head = tiny.model(family), tiny.head(family)
    with torch.no_grad():
        return head.fuse(model.get_decoder()(plain(family, length, new_tokens)).last_hidden_state)


def check_inputs(case: Case, head: DraftHead, window: SinkWindow | None, passes: list[Pass]) -> None:
    """Entries of known tokens hold those tokens, with the target's features or what the layer before made of them."""
    # transformers' Nemotron-H holds the step size dt above a least value in passes, but not in single-token steps.
    tolerance = 1e-2 if case.family == "nemotron_h" else 1e-4
    ids = plain(case.family, case.prompt, case.new_tokens)
    hidden = features(case.family, case.prompt, case.new_tokens)
    for layer in range(1 + max(one.layer for one in passes)):
        for one in passes:
            count = min(one.tokens.shape[1], one.known - 1 - layer - one.start)
            if one.layer != layer or count <= 0:
                continue
            at, first = f"{case}: layer {layer} entry {one.start}", one.start + 1 + layer
            assert torch.equal(one.tokens[:, :count], ids[:, first : first + count]), f"{at} holds other tokens"
            expected = hidden[:, one.start : one.start + count]
            difference = (one.hidden[:, :count] - expected).abs().max()
            assert difference < tolerance, f"{at} takes another hidden state: {difference}"
        tokens = ids[:, 1 + layer :]
        with torch.no_grad():
            positions = torch.arange(tokens.shape[1])[None]
            _, hidden = head.forward(layer, tokens, hidden[:, : tokens.shape[1]], positions, NoCache(window))


def check_proposals(case: Case) -> int:
    """What a step proposes is what the head proposes from scratch; returns how many tokens were compared."""
    made, _ = record(case)
    recorder, window = made.head, made.window
    head, layers = recorder.head, min(recorder.num_layers, case.depth)
    compared = 0
    for known, own in recorder.proposals.items():
        ids = plain(case.family, case.prompt, case.new_tokens)[:, :known]
        hidden = features(case.family, case.prompt, case.new_tokens)[:, : known - 1]
        for step, token in enumerate(own):
            layer = min(step, layers - 1)
            tokens = ids[:, 1 + layer :]
            positions = torch.arange(tokens.shape[1])[None]
            with torch.no_grad():
                out, recycled = head.forward(layer, tokens, hidden, positions, NoCache(window))
                top = head.logits(layer, out[0, -1]).topk(2)
            if top.values[0] - top.values[1] > 1e-2:
                assert token == top.indices[0], f"{case}: token {step} after {known} tokens"
                compared += 1
            hidden = recycled if step + 1 < layers else torch.cat([hidden, recycled[:, -1:]], dim=1)
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    return compared


def check_reference(case: Case, sighted: bool = True, tolerance: float = 1e-4) -> int:
    """Every query of every pass equals a reference with no cache and an explicit mask; returns how many were compared.

    Blind passes, whose outputs nobody uses, are not compared: their keys and values are, through what reads them.

    The inputs of a layer's entries are collected as its passes give them (a provisional entry is replaced by the
    next pass that covers it), and the layer is run over all of them at once. What a pruned prefill leaves out is filled
    with noise, which no later query may read.
    """
    made, passes = record(case, sighted)
    head, window = made.head.head, made.window
    check_inputs(case, head, window, passes)
    inputs: dict[int, tuple[Tensor, Tensor]] = {}
    compared = 0
    for one in passes:
        tokens, hidden = inputs.get(one.layer, (one.tokens[:, :0], one.hidden[:, :0]))
        hole = one.start - tokens.shape[1]
        if hole > 0:
            assert case.arrangement == "pruned", f"{case}: layer {one.layer} left a hole before entry {one.start}"
            tokens = torch.cat([tokens, torch.zeros(1, hole, dtype=tokens.dtype)], dim=1)
            hidden = torch.cat([hidden, torch.full((1, hole, hidden.shape[2]), 7.0)], dim=1)
        tokens = torch.cat([tokens[:, : one.start], one.tokens], dim=1)
        hidden = torch.cat([hidden[:, : one.start], one.hidden], dim=1)
        inputs[one.layer] = tokens, hidden
        if case.arrangement == "pruned" and one.start < case.prompt - 1 - one.layer:
            continue  # a pruned prefill's own queries are exact only where a later one depends on them
        if one.blind:
            continue
        first = one.tokens.shape[1] - 1 if hole > 0 else 0  # and of a pass that skips entries, its last query
        positions = torch.arange(tokens.shape[1])[None]
        with torch.no_grad():
            out, _ = head.forward(one.layer, tokens, hidden, positions, NoCache(window))
            expected = head.logits(one.layer, out[:, one.start + first :])
            actual = head.logits(one.layer, one.out[:, first:])
        finite = expected.isfinite()
        assert (finite == actual.isfinite()).all()
        difference = (expected - actual)[finite].abs().max()
        assert difference < tolerance, f"{case}: layer {one.layer} entry {one.start}: {difference}"
        compared += one.tokens.shape[1] - first
    return compared


def pairwise(seed: int = 0, **factors: Sequence[Any]) -> list[dict[str, Any]]:
    """Few combinations in which every pair of values of two factors occurs."""
    names = list(factors)
    open_pairs = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    rng = random.Random(seed)
    rows = []
    while open_pairs:
        forced = dict(min(open_pairs))
        candidates = [{n: rng.randrange(len(factors[n])) for n in names} | forced for _ in range(30)]
        best = max(candidates, key=lambda row: len(open_pairs & set(_pairs(row))))
        open_pairs -= set(_pairs(best))
        rows.append({n: factors[n][i] for n, i in best.items()})
    return rows


def _pairs(row: dict[str, int]) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
    return itertools.combinations(row.items(), 2)  # in the order of the factors, as the open pairs are


FACTORS: dict[str, Sequence[Any]] = {
    "prompt": (5, 33, 130, 400),
    "depth": (1, 3, 5),
    "changing": (False, True),
    "window": ((0, 1), (1, 2), (4, 16), (64, 4032), None),
    "drafter": DRAFTERS,
    "arrangement": ("all", "ring", "pruned"),
}


def cases(family: str, rows: Iterable[dict[str, Any]]) -> list[Case]:
    """Cases of a family; a ring without a window is left out, as the library refuses it."""
    made = [Case(family, **row) for row in rows]
    return [case for case in made if case.window is not None or case.arrangement == "all"]
