"""The compiled kernel on a CUDA device against the torch reference, and inside a captured graph."""

import os

import pytest
import torch

from windowed_mtp.paging import compact_block_table
from windowed_mtp.window import SinkWindow

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 leaves nothing compiled"),
]

POLICIES = [SinkWindow(0, 1), SinkWindow(1, 2), SinkWindow(5, 17), SinkWindow(64, 4032), SinkWindow(64, 500, 9000)]


def random_batch(
    seed: int, rows: int, columns: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A block table with lengths and query lengths, padding rows included."""
    generator = torch.Generator("cuda").manual_seed(seed)
    options = {"generator": generator, "dtype": torch.int32, "device": "cuda"}
    table = torch.randint(1, 2**30, (rows, columns), **options)
    lens = torch.randint(0, columns * block_size + 1, (rows,), **options)
    lens *= torch.rand(rows, generator=generator, device="cuda") > 0.1
    return table, lens, torch.randint(1, 9, (rows,), **options).minimum(lens)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize(("columns", "block_size"), [(700, 1), (3000, 16), (513, 64), (90, 1104), (1, 32)])
def test_equals_the_reference(policy: SinkWindow, columns: int, block_size: int):
    from windowed_mtp.paging.triton import compact_block_table_, window_params

    inputs = random_batch(columns, 1000, columns, block_size)
    before = [tensor.clone() for tensor in inputs]
    persistent = torch.full((1003, columns + 77), -7, dtype=torch.int32, device="cuda")
    out_table, out_lens = persistent[:, : columns + 5], torch.full((1003,), -7, dtype=torch.int32, device="cuda")
    compact_block_table_(*inputs, out_table, out_lens, window_params(policy, device="cuda"), block_size=block_size)
    new_table, new_lens = compact_block_table(*inputs, block_size=block_size, window=policy)
    assert torch.equal(persistent[:1000, :columns], new_table)
    assert torch.equal(out_lens[:1000], new_lens)
    assert (persistent[:1000, columns : columns + 5] == 0).all()
    assert (persistent[:, columns + 5 :] == -7).all()
    assert (persistent[1000:] == -7).all()
    assert (out_lens[1000:] == -7).all()
    assert all(torch.equal(now, then) for now, then in zip(inputs, before, strict=True))


def test_live_columns_only_leaves_the_others():
    from windowed_mtp.paging.triton import compact_block_table_, window_params

    table, lens, queries = random_batch(0, 500, 3000, 16)
    policy = SinkWindow(64, 4032)
    out_table, out_lens = torch.full_like(table, -7), torch.empty_like(lens)
    params = window_params(policy, device="cuda")
    compact_block_table_(table, lens, queries, out_table, out_lens, params, block_size=16, live_columns_only=True)
    new_table, new_lens = compact_block_table(table, lens, queries, block_size=16, window=policy)
    live = torch.arange(3000, device="cuda") < (new_lens[:, None] + 15) // 16
    assert torch.equal(out_table, torch.where(live, new_table, -7))
    assert torch.equal(out_lens, new_lens)


def test_running_starts_do_for_counts():
    from windowed_mtp.paging.triton import compact_block_table_, window_params

    table, lens, queries = random_batch(1, 500, 3000, 16)
    starts = torch.nn.functional.pad(queries.cumsum(0), (1, 0)).int()
    policy = SinkWindow(64, 4032)
    out_table, out_lens = torch.empty_like(table), torch.empty_like(lens)
    params = window_params(policy, device="cuda")
    compact_block_table_(table, lens, starts, out_table, out_lens, params, block_size=16, query_starts=True)
    new_table, new_lens = compact_block_table(table, lens, queries, block_size=16, window=policy)
    assert torch.equal(out_table, new_table)
    assert torch.equal(out_lens, new_lens)


def test_a_captured_graph_follows_new_windows_and_new_rows():
    from windowed_mtp.paging.triton import compact_block_table_, window_params

    inputs = random_batch(0, 64, 2000, 16)
    out_table, out_lens = torch.empty_like(inputs[0]), torch.empty_like(inputs[1])
    params = window_params(SinkWindow(), device="cuda")

    def call() -> None:
        compact_block_table_(*inputs, out_table, out_lens, params, block_size=16)

    call()  # compiled outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for seed, policy in enumerate(POLICIES):
        params.copy_(window_params(policy, device="cuda"))
        for tensor, fresh in zip(inputs, random_batch(seed, 64, 2000, 16), strict=True):
            tensor.copy_(fresh)
        graph.replay()
        new_table, new_lens = compact_block_table(*inputs, block_size=16, window=policy)
        assert torch.equal(out_table, new_table)
        assert torch.equal(out_lens, new_lens)


def test_a_launch_never_waits_for_the_device():
    from windowed_mtp.paging.triton import compact_block_table_, window_params

    inputs = random_batch(0, 64, 2000, 16)
    out_table, out_lens = torch.empty_like(inputs[0]), torch.empty_like(inputs[1])
    params = window_params(SinkWindow(), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        compact_block_table_(*inputs, out_table, out_lens, params, block_size=16)
        compact_block_table(*inputs, block_size=16, window=SinkWindow())
    finally:
        torch.cuda.set_sync_debug_mode("default")
