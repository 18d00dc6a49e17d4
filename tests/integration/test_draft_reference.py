"""The draft's logits equal a reference with no cache and an explicit mask, for every query of every pass."""

from collections.abc import Iterator

import checks
import pytest
import tiny
import torch
from checks import ARRANGEMENTS, Case, cases, check_proposals, check_reference, pairwise, prompt, record

from windowed_mtp import SinkWindow
from windowed_mtp.engines.transformers.draft import DraftState

ROWS = pairwise(
    prompt=(5, 70, 600),
    depth=(1, 3, 5),
    changing=(False, True),
    window=((0, 1), (1, 2), (4, 16), (30, 50), (64, 4032), None),
    drafter=("own", "alternating"),
    arrangement=("all", "ring", "pruned"),
    new_tokens=(14,),
)


@pytest.mark.parametrize("case", [c for family in tiny.BUILDERS for c in cases(family, ROWS)], ids=str)
@pytest.mark.parametrize("sighted", [True, False], ids=["sighted", "blind"])
def test_every_query_equals_the_reference(case: Case, sighted: bool):
    assert check_reference(case, sighted) >= case.new_tokens // 2


@pytest.mark.parametrize("family", tiny.BUILDERS)
@pytest.mark.parametrize("arrangement", ["all", "ring", "pruned"])
@pytest.mark.parametrize("changing", [False, True])
def test_proposals_are_those_of_the_head_from_scratch(family: str, arrangement: str, changing: bool):
    for depth, kind in ((5, "alternating"), (2, "right"), (5, "own")):
        case = Case(family, 60, depth, changing, drafter=kind, arrangement=arrangement, new_tokens=16)
        assert check_proposals(case) >= (1 if changing else depth)


@pytest.fixture
def nan_where_nothing_was_written() -> Iterator[None]:
    """Fill what is allocated without values with NaN, as memory that was used before may be."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.zeros(1).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("family", tiny.BUILDERS)
@pytest.mark.parametrize("arrangement", ["all", "ring", "pruned"])
def test_slots_that_nothing_was_written_to_are_not_in_a_proposal(
    family: str, arrangement: str, nan_where_nothing_was_written: None
):
    case = Case(family, 60, 5, True, window=(1, 2), drafter="own", arrangement=arrangement, new_tokens=16)
    assert check_proposals(case) >= 1


@pytest.mark.parametrize("family", tiny.BUILDERS)
@pytest.mark.parametrize("window", [SinkWindow(64, 4032), SinkWindow(2, 8, min_context=10_000)], ids=["long", "inert"])
def test_a_window_that_does_not_engage_changes_no_bit(family: str, window: SinkWindow):
    _, native = record(Case(family, prompt=70, window=None))
    _, windowed = record(Case(family, prompt=70, window=None), window=window)
    assert len(native) == len(windowed)
    assert all(torch.equal(a.out, b.out) for a, b in zip(native, windowed, strict=True))


@pytest.mark.parametrize("family", tiny.BUILDERS)
def test_the_window_changes_the_draft_once_it_engages(family: str):
    _, native = record(Case(family, prompt=70, window=None, drafter="right"))
    _, windowed = record(Case(family, prompt=70, window=(4, 16), drafter="right"))
    assert (native[-1].layer, native[-1].start) == (windowed[-1].layer, windowed[-1].start)
    assert (native[-1].out - windowed[-1].out).abs().max() > 1e-3


@pytest.mark.parametrize("family", tiny.BUILDERS)
def test_min_context_is_a_threshold_by_query(family: str):
    case = Case(family, prompt=40, window=(4, 16), drafter="right", new_tokens=30)
    _, native = record(case, window=None)
    _, windowed = record(case, window=SinkWindow(4, 16, min_context=55))
    for a, b in zip(native, windowed, strict=True):
        below = max(0, 54 - a.start)
        assert torch.allclose(a.out[:, :below], b.out[:, :below], atol=1e-5)
        if a.start > 55:
            assert not torch.allclose(a.out, b.out, atol=1e-4)


@pytest.mark.parametrize("family", tiny.BUILDERS)
@pytest.mark.parametrize("window", [(0, 1), (1, 2), (4, 16)])
def test_ring_and_all_kept_read_the_same_positions(family: str, window: tuple[int, int]):
    runs = [
        record(Case(family, prompt=60, depth=5, changing=True, window=window, arrangement=a))[1]
        for a in ("all", "ring")
    ]
    for a, b in zip(*runs, strict=True):
        assert (a.layer, a.start) == (b.layer, b.start)
        assert torch.equal(a.tokens, b.tokens)
        assert torch.allclose(a.out, b.out, atol=1e-5)


@pytest.mark.parametrize("family", tiny.BUILDERS)
@pytest.mark.parametrize("length", [3, 30, 300, 1100])
@pytest.mark.parametrize("window", [(0, 1), (3, 7), (8, 40)])
def test_pruned_prefill_equals_unpruned_on_every_kept_slot(family: str, length: int, window: tuple[int, int]):
    ids = prompt(length)
    head = tiny.head(family)
    features = torch.randn(1, length - 1, tiny.feature_size(family), generator=torch.Generator().manual_seed(3))
    states = []
    for keep, prefill in (ARRANGEMENTS["ring"], ARRANGEMENTS["pruned"]):
        state = DraftState(head, SinkWindow(*window), 3, keep, prefill)
        with torch.no_grad():
            state.observe(features)
            state.advance(ids)
        states.append(state)
    for full, pruned in zip(states[0].kv, states[1].kv, strict=True):
        if full.length == 0:
            assert pruned.length == 0
            continue
        held, keys, values = full.entries()
        pruned_held, pruned_keys, pruned_values = pruned.entries()
        assert held == pruned_held
        assert torch.allclose(keys, pruned_keys, atol=1e-5)
        assert torch.allclose(values, pruned_values, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5-chained"])
def test_pruned_prefill_does_not_grow_with_the_prompt(family: str):
    def entries_run(length: int) -> int:
        head = checks.Recorder(tiny.head(family))
        state = DraftState(head, SinkWindow(4, 16), 3, "ring", "pruned")
        with torch.no_grad():
            state.observe(torch.randn(1, length - 1, tiny.feature_size(family)))
            state.advance(prompt(length))
        return sum(p.tokens.shape[1] for p in head.passes)

    assert entries_run(300) == entries_run(900)


@pytest.mark.parametrize("family", tiny.BUILDERS)
def test_a_ring_holds_sink_window_and_depth_whatever_the_prompt(family: str):
    short, long = (checks.check_greedy(Case(family, prompt=n, arrangement="ring")) for n in (130, 400))
    assert short.stats.draft_kv_bytes == long.stats.draft_kv_bytes > 0
    everything = checks.check_greedy(Case(family, prompt=400, arrangement="all"))
    entries = 400 + 24 - 1
    assert everything.stats.draft_kv_bytes * (4 + 16 + 3) >= long.stats.draft_kv_bytes * (entries - 6)
