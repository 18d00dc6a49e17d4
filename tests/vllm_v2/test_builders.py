"""The windowed builder on vLLM's own metadata: which passes it windows, and what it says on the host."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed")

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from windowed_mtp import SinkWindow
from windowed_mtp.engines.vllm.backend import windowed_backend
from windowed_mtp.engines.vllm.config import PluginConfig, PluginError
from windowed_mtp.engines.vllm.drafters import only_first_pass
from windowed_mtp.engines.vllm.install import assign_passes
from windowed_mtp.engines.vllm.self_check import check_builders, padded_batch
from windowed_mtp.engines.vllm.windowing import Limits, Windowing
from windowed_mtp.paging import compact_block_table

WINDOW = SinkWindow(4, 32)
BLOCK = 16
ROWS = 16
"""Most rows of a batch."""


def batch(rows: list[tuple[int, int]], prefilling: int = 0, slack: int = 0, **more: Any) -> CommonAttentionMetadata:
    """Rows of (entries, queries), the last ``prefilling`` of them in prefill; the others' lengths lag by ``slack``."""
    lens, queries = (torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True))
    columns = int(lens.max()) // BLOCK + 2
    starts = torch.nn.functional.pad(queries.cumsum(0), (1, 0)).int()
    upper = lens.clone()
    upper[: len(rows) - prefilling] += slack
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        num_reqs=len(rows),
        num_actual_tokens=int(queries.sum()),
        max_query_len=int(queries.max()),
        max_seq_len=int(upper.max()),
        block_table_tensor=torch.arange(len(rows) * columns, dtype=torch.int32).reshape(len(rows), columns),
        slot_mapping=torch.zeros(int(queries.sum()), dtype=torch.int64),
        is_prefilling=torch.arange(len(rows)) >= len(rows) - prefilling,
        seq_lens_cpu_upper_bound=upper,
        **more,
    )


class Builder:
    """A metadata builder that hands back what it is given, the way that ``direct`` builders and others do."""

    direct = False

    def __init__(self, *args: Any):
        pass

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        return common_attn_metadata

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Any:
        return common_attn_metadata if self.direct else self.build(0, common_attn_metadata, fast_build=True)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        return common_attn_metadata if self.direct else self.build(0, common_attn_metadata)


class Direct(Builder):
    direct = True


def made(base: type, graphs: bool = False, asynchronous: bool = True, replays: bool = True, **own: Any) -> Any:
    backend = type("Backend", (), {"get_builder_cls": staticmethod(lambda: base)})
    vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: graphs)),
        scheduler_config=SimpleNamespace(max_num_seqs=ROWS, max_num_batched_tokens=128, async_scheduling=asynchronous),
        speculative_config=SimpleNamespace(num_speculative_tokens=3),
    )
    builder = windowed_backend(backend, PluginConfig(WINDOW, **own), replays).get_builder_cls()
    return builder(SimpleNamespace(block_size=BLOCK), ["layer"], vllm_config, "cpu")


@pytest.mark.parametrize("base", [Builder, Direct])
def test_each_way_to_build_windows_once(base: type):
    builder = made(base)
    for passes, build in enumerate(
        (
            lambda common: builder.build(0, common),
            lambda common: builder.build_for_drafting(common, 0),
            lambda common: builder.build_for_drafting(common, 2),
            builder.build_for_cudagraph_capture,
        ),
        1,
    ):
        assert int(build(batch([(300, 4)])).seq_lens[0]) == 300 - 15 * BLOCK
        assert builder.windowing.passes == passes


def groups(builder: Any) -> list[list[Any]]:
    """A runner's groups: one of the draft's layers, one of others."""
    return [[SimpleNamespace(metadata_builders=[builder])], [SimpleNamespace(metadata_builders=[object()])]]


def test_a_v1_runner_builds_nothing_for_the_draft_itself():
    builder = made(Builder)
    assign_passes(SimpleNamespace(attn_groups=groups(builder)))
    several = batch([(300, 4), (200, 1)])
    assert builder.build(0, several) is None and builder.build_for_cudagraph_capture(several) is None
    assert builder.windowing.passes == 0


def test_without_the_first_pass_the_owner_and_the_index_decide():
    target, drafter = (made(Builder, window_first_pass=False) for _ in range(2))
    assign_passes(SimpleNamespace(attn_groups=groups(target), speculator=None))
    several, one = batch([(300, 4), (200, 1)]), batch([(300, 1)])
    assert target.build(0, several) is several and target.build(0, one) is one
    assert target.build_for_cudagraph_capture(several) is several
    assert drafter.build(0, several) is several  # an independent draft model's first pass
    assert int(drafter.build(0, one).seq_lens[0]) < 300
    assert drafter.build_for_drafting(one, 0) is one
    assert int(drafter.build_for_drafting(several, 1).seq_lens[0]) < 300


def runner(tokens: int = 3, parallel: bool = False, modules: bool = False, v2: bool = True) -> Any:
    speculative = SimpleNamespace(
        method="mtp",
        num_speculative_tokens=tokens,
        parallel_drafting=parallel,
        use_multi_module_mtp=lambda: modules,
    )
    made = SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=speculative))
    holder, names = ("speculator", "draft_attn_layer_names") if v2 else ("drafter", "_draft_attn_layer_names")
    setattr(made, holder, SimpleNamespace(**{names: {"layer"}}))
    return made


def alone(v2: bool = True, **drafting: Any) -> str:
    return str(only_first_pass(runner(**drafting).vllm_config.speculative_config, v2))


def test_drafters_that_have_only_a_first_pass():
    assert alone() == "None"
    assert "one pass" in alone(parallel=True)
    assert "one pass" in alone(parallel=True, v2=False)
    assert "one token" in alone(tokens=1)
    assert "modules" in alone(modules=True)
    assert alone(modules=True, v2=False) == "None"


def test_a_parallel_drafter_stops_the_engine_whatever_strict_says(monkeypatch: pytest.MonkeyPatch):
    from windowed_mtp.engines.vllm import install

    monkeypatch.setattr(install, "_last_pipeline_rank", lambda: True)
    for strict in (True, False):
        config = PluginConfig(WINDOW, window_first_pass=False, strict=strict)
        with pytest.raises(PluginError, match="has no other pass, as it drafts all of its tokens in one pass"):
            install.window_draft_layers(runner(parallel=True), config)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_host_lengths_are_exact_where_vllm_has_them_exact(asynchronous: bool):
    rows = [(length, 4) for length in range(60, 140)] + [(length, 9) for length in range(100, 180)] + [(150, 2)]
    common = batch(rows, prefilling=81, slack=3 if asynchronous else 0)
    result = made(Builder, asynchronous=asynchronous).build(0, common)
    exact = torch.ones(len(rows), dtype=torch.bool)
    exact[:80] = not asynchronous
    assert result.seq_lens_cpu_upper_bound[exact].equal(result.seq_lens[exact])
    assert (result.seq_lens_cpu_upper_bound >= result.seq_lens).all()
    assert (result.seq_lens < common.seq_lens).any()


def test_prefill_rows_are_exact_without_word_of_them():
    common = batch([(200, 4), (300, 100)], slack=2)
    common.is_prefilling = None
    result = Windowing(WINDOW, BLOCK, Limits(graphs=False, exact_above=4))(common)
    assert result.seq_lens_cpu_upper_bound[0] > result.seq_lens[0]
    common = batch([(200, 4), (300, 100)])
    common.is_prefilling = None
    result = Windowing(WINDOW, BLOCK, Limits(graphs=False, exact_above=4))(common)
    assert result.seq_lens_cpu_upper_bound[1] == result.seq_lens[1]


def test_a_batch_is_copied_not_changed_and_forgets_what_no_longer_fits():
    common = batch([(300, 4)], mm_req_doc_ranges={0: [(3, 9)]})
    common.compute_num_computed_tokens()
    before = common.seq_lens.clone(), common.block_table_tensor.clone(), common.max_seq_len
    result = Windowing(WINDOW, BLOCK, Limits(graphs=False))(common)
    assert result.mm_req_doc_ranges is None and common.mm_req_doc_ranges is not None
    assert result.compute_num_computed_tokens().tolist() == [300 - 15 * BLOCK - 4]
    assert common.seq_lens.equal(before[0]) and common.block_table_tensor.equal(before[1])
    assert common.max_seq_len == before[2] and result.slot_mapping is common.slot_mapping


def test_graphs_find_their_buffers_where_they_were_captured():
    builder = made(Builder, graphs=True)
    small = builder.build(0, batch([(300, 1)] * 2))
    large = builder.build(0, batch([(300, 1)] * ROWS))
    for name in ("seq_lens", "block_table_tensor"):
        assert getattr(small, name).data_ptr() == getattr(large, name).data_ptr()


PADDED = 4


@pytest.mark.parametrize(
    "short",
    [
        ("is_prefilling",),
        ("query_start_loc_cpu",),
        ("query_start_loc",),
        ("block_table_tensor",),
        ("seq_lens_cpu_upper_bound",),
        ("is_prefilling", "query_start_loc_cpu", "query_start_loc", "block_table_tensor", "seq_lens_cpu_upper_bound"),
    ],
    ids=lambda names: "all" if len(names) > 1 else names[0],
)
@pytest.mark.parametrize("build", ["build", "build_for_drafting", "build_for_cudagraph_capture"])
def test_a_batch_may_be_padded_in_some_of_its_fields_only(short: tuple[str, ...], build: str):
    rows = [(300, 4), (90, 4), (500, 4), (40, 4)]
    plain = batch(rows, prefilling=1)
    common = batch(rows + [(0, 0)] * PADDED, prefilling=PADDED + 1)
    for name in short:
        setattr(common, name, getattr(common, name)[:-PADDED])
    lengths = {len(getattr(common, name)) for name in ("seq_lens", *short)}
    assert max(lengths) - min(lengths) in (PADDED - 1, PADDED)  # it is padded, and not everywhere
    builder = made(Builder, graphs=True)
    arguments = {"build": (0, common), "build_for_drafting": (common, 1), "build_for_cudagraph_capture": (common,)}
    result = getattr(builder, build)(*arguments[build])
    want = made(Builder).build(0, plain)
    assert (want.seq_lens < plain.seq_lens).any()
    assert result.seq_lens.tolist() == want.seq_lens.tolist() + [0] * PADDED
    assert result.block_table_tensor.shape[0] == common.block_table_tensor.shape[0]
    for row, length in enumerate(want.seq_lens.tolist()):
        live = -(-length // BLOCK)
        assert result.block_table_tensor[row, :live].equal(want.block_table_tensor[row, :live])
    assert (result.seq_lens_cpu_upper_bound[: len(rows)] >= want.seq_lens).all()
    assert result.seq_lens_cpu_upper_bound.shape == common.seq_lens_cpu_upper_bound.shape


def test_a_table_is_as_wide_as_a_windowed_row_can_be():
    builder = made(Builder, graphs=True)
    limit = 128 + 4  # queries of a row at most
    room = BLOCK + WINDOW.window + limit - 1 + BLOCK - 1  # sinks, and a window that ends within a block
    for rows in ([(4000, 1)], [(4000, limit)], [(4000, 4), (70, 70), (900, 3)]):
        common = batch(rows)
        result = builder.build(0, common)
        assert result.block_table_tensor.shape[1] == -(-room // BLOCK) < common.block_table_tensor.shape[1]
        want, lens = compact_block_table(
            common.block_table_tensor, common.seq_lens, common.query_start_loc.diff(), block_size=BLOCK, window=WINDOW
        )
        assert result.seq_lens.equal(lens)
        for row, length in enumerate(lens.tolist()):
            live = -(-length // BLOCK)
            assert result.block_table_tensor[row, :live].equal(want[row, :live])


def test_captured_graphs_take_a_window_they_have_room_for_and_refuse_another():
    common = batch([(4000, 1)])
    wide = SinkWindow(4, 1000)
    builder = made(Builder, graphs=True)
    builder.build(0, common)
    with pytest.raises(PluginError, match=r'windows of up to 32, so .* start the engine with a larger "widest_window"'):
        builder.windowing.window = wide
    assert builder.windowing.window == WINDOW
    roomy = made(Builder, graphs=True, widest_window=1000)
    before = roomy.build(0, common)
    assert int(before.seq_lens[0]) < 100
    roomy.windowing.window = wide
    after = roomy.build(0, common)
    assert int(after.seq_lens[0]) >= 1000
    assert after.block_table_tensor.data_ptr() == before.block_table_tensor.data_ptr()
    free = made(Builder)
    free.build(0, common)
    free.windowing.window = wide
    assert int(free.build(0, common).seq_lens[0]) == int(after.seq_lens[0])


def test_a_batch_that_graphs_were_not_told_of_leaves_their_buffers_alone():
    builder = made(Builder, graphs=True)
    captured = builder.build(0, batch([(300, 1)] * 2))
    large = builder.build(0, batch([(300, 1)] * (ROWS + 1)))
    assert large.seq_lens.tolist() == captured.seq_lens.tolist()[:1] * (ROWS + 1)
    assert large.seq_lens.data_ptr() != captured.seq_lens.data_ptr()
    again = builder.build(0, batch([(300, 1)] * ROWS))
    assert again.seq_lens.data_ptr() == captured.seq_lens.data_ptr()


def test_rows_of_a_larger_batch_before_are_empty_to_a_graph():
    builder = made(Builder, graphs=True)
    large = builder.build(0, batch([(300, 1)] * 8))
    assert large.seq_lens.all()
    builder.build(0, batch([(300, 1)] * 3))
    assert large.seq_lens[:3].all() and not large.seq_lens[3:].any()


def test_a_short_context_launches_nothing_in_a_runner_that_replays_no_graphs():
    builder, short = made(Builder, graphs=True, replays=False), batch([(40, 1)])
    assert builder.build(0, short) is short and not builder.windowing.windowed
    assert made(Builder, graphs=True).build(0, short) is not short


class Own:
    """A V2 speculator that builds all of its metadata."""


Own.__name__ = "DFlashSpeculator"


def test_a_v2_runner_builds_nothing_for_drafters_with_metadata_of_their_own():
    class Derived(Own):
        pass

    for speculator, unused in ((Own(), True), (Derived(), True), (SimpleNamespace(), False)):
        builder, common = made(Builder), batch([(300, 4)])
        assign_passes(SimpleNamespace(attn_groups=groups(builder), speculator=speculator))
        assert builder.unused is unused
        assert (builder.build(0, common) is None) is unused


class Checked(Builder):
    device = torch.device("cpu")


def test_the_self_check_sees_a_builder_that_the_window_breaks(monkeypatch: pytest.MonkeyPatch):
    class Fragile(Checked):
        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            assert common_attn_metadata.block_table_tensor.shape[1] > 100
            return common_attn_metadata

    class Hopeless(Checked):
        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            raise RuntimeError("not for made-up batches")

    assert check_builders([made(Checked, graphs=True), made(Checked)], 4096, 4) == 2
    assert check_builders([made(Hopeless)], 4096, 4) == 0
    with pytest.raises(PluginError, match=r"does not pass WindowedFragile \(AssertionError"):
        check_builders([made(Fragile, graphs=True)], 4096, 4)
    monkeypatch.setattr(Windowing, "_host_lens", lambda *_: list(zip([1, 2], [1], strict=True)))
    with pytest.raises(PluginError, match=r"does not pass WindowedChecked \(ValueError"):
        check_builders([made(Checked, graphs=True)], 4096, 4)


@pytest.mark.parametrize("queries", [1, 4])
def test_the_self_checks_batch_is_padded_and_loses_keys(queries: int):
    windowing = made(Checked, graphs=True).windowing
    common = padded_batch(windowing, "cpu", 4096, queries)
    assert len(common.is_prefilling) < len(common.seq_lens) == len(common.query_start_loc) - 1
    assert common.query_start_loc.diff().tolist()[-1] == 0 == common.seq_lens[-1]
    assert (windowing(common).seq_lens[:-1] < common.seq_lens[:-1]).all()
    short = padded_batch(windowing, "cpu", 20, queries)
    assert int(short.max_seq_len) == 20
