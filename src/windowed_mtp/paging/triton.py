"""Drop the blocks between sinks and window from a paged cache's block table: one Triton launch, no host sync."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from windowed_mtp.errors import WindowError
from windowed_mtp.paging.blocks import check_rows, check_tensor
from windowed_mtp.window import SinkWindow

COLUMNS_PER_PROGRAM = 1024


def window_params(window: SinkWindow, *, device: torch.device | str) -> torch.Tensor:
    """Put a window where the kernel reads it.

    Copy another window's parameters into the tensor that a CUDA graph was captured with to change the window at its
    next replay.

    Parameters
    ----------
    window : SinkWindow
        What a query may read.
    device : torch.device or str
        Where the block table lives.

    Returns
    -------
    torch.Tensor
        ``[3]`` int32: ``sink, window, min_context``.

    Raises
    ------
    WindowError
        If a value does not fit 32 bits.
    """
    values = [window.sink, window.window, window.min_context]
    if max(values) > torch.iinfo(torch.int32).max:
        raise WindowError(f"{window} does not fit 32 bits; pass values below 2**31.")
    return torch.tensor(values, dtype=torch.int32, device=device)


def compact_block_table_(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_lens: torch.Tensor,
    out_table: torch.Tensor,
    out_lens: torch.Tensor,
    params: torch.Tensor,
    *,
    block_size: int,
    live_columns_only: bool = False,
    query_starts: bool = False,
) -> None:
    """Window each row of a block table into buffers that the caller owns.

    The result is that of `windowed_mtp.paging.compact_block_table`. It is one launch on the current stream; nothing is
    read on the host and nothing is allocated, so it can be captured in a CUDA graph.

    Parameters
    ----------
    block_table : torch.Tensor
        ``[R, C]`` int32, physical block ids; rows may be strided, columns must be adjacent.
    seq_lens : torch.Tensor
        ``[R]`` int32, contiguous, entries of each row, this pass's queries included.
    query_lens : torch.Tensor
        ``[R]`` int32, contiguous, queries of each row in this pass; with ``query_starts`` ``[>= R + 1]``, where each
        row's queries start among those of the pass (vLLM's ``query_start_loc``).
    out_table : torch.Tensor
        ``[>= R, W]`` int32, written: rows from ``R`` on are left as they are, columns that would come from past the end
        of the source are 0. Rows may be strided, columns must be adjacent. ``W`` may be less than ``C``: the columns
        that fit are written, and it is the caller's to have room for the longest windowed row.
    out_lens : torch.Tensor
        ``[>= R]`` int32, contiguous, written: rows from ``R`` on are left as they are.
    params : torch.Tensor
        ``[3]`` int32, contiguous, as made by `window_params`: ``sink, window, min_context``, read by the kernel.
    block_size : int
        Entries a block, at least 1; compiled into the kernel.
    live_columns_only : bool
        Leave the columns past a row's new length as they are instead of writing them. Nobody reads them, and a table
        that is as wide as the model's longest context makes most of its columns such.

    Raises
    ------
    WindowError
        If a shape, a stride, a dtype or a device is not as above, if ``block_size`` is below 1, if an output shares its
        storage with an input (programs read what others write), or if the tensors are on the CPU while the kernel is
        not interpreted.
    """
    counts = query_lens[1:] if query_starts else query_lens
    if query_starts:
        check_tensor("query_lens", query_lens, dim=1, device=block_table.device)
        if counts.shape[0] < block_table.shape[0]:
            raise WindowError(
                f"query_lens has {query_lens.shape[0]} starts, but block_table has {block_table.shape[0]} rows; "
                f"pass one start more than rows."
            )
        counts = counts[: block_table.shape[0]]
    block_size = check_rows(block_table, seq_lens, counts, block_size)
    _check_buffers(block_table, seq_lens, query_lens, out_table, out_lens, params)
    num_rows, num_columns = block_table.shape
    out_columns = out_table.shape[1]
    grid = (num_rows, max(1, triton.cdiv(out_columns, COLUMNS_PER_PROGRAM)))
    _compact_rows[grid](
        block_table,
        seq_lens,
        query_lens,
        out_table,
        out_lens,
        params,
        block_table.stride(0),
        out_table.stride(0),
        num_columns,
        out_columns,
        BLOCK_SIZE=block_size,
        LIVE_ONLY=live_columns_only,
        STARTS=query_starts,
        COLUMNS=COLUMNS_PER_PROGRAM,
    )


# No argument may be called params: Triton's launcher has a variable of that name up to 3.6.
@triton.jit(do_not_specialize=["table_stride", "out_stride", "num_columns", "out_columns"])
def _compact_rows(
    block_table: tl.tensor,
    seq_lens: tl.tensor,
    query_lens: tl.tensor,
    out_table: tl.tensor,
    out_lens: tl.tensor,
    policy: tl.tensor,
    table_stride: tl.tensor,
    out_stride: tl.tensor,
    num_columns: tl.tensor,
    out_columns: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    LIVE_ONLY: tl.constexpr,
    STARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Program ``(r, k)`` writes columns ``k * COLUMNS ..`` of row ``r``; those with ``k = 0`` its length too."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(seq_lens + row).to(tl.int64)
    query_len = tl.load(query_lens + row).to(tl.int64)
    if STARTS:
        query_len = tl.load(query_lens + row + 1).to(tl.int64) - query_len
    sink = tl.load(policy).to(tl.int64)
    window = tl.load(policy + 1).to(tl.int64)
    min_context = tl.load(policy + 2).to(tl.int64)

    sink_blocks = (sink + BLOCK_SIZE - 1) // BLOCK_SIZE
    # Triton divides towards zero: clamp first, which leaves the maximum below as floor division would have it.
    first_block = tl.maximum(length - query_len + 1 - window, 0) // BLOCK_SIZE
    dropped = tl.where(length >= min_context, tl.maximum(first_block - sink_blocks, 0), 0)
    new_len = length - dropped * BLOCK_SIZE
    if tl.program_id(1) == 0:
        tl.store(out_lens + row, new_len.to(tl.int32))

    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    write = column < out_columns
    if LIVE_ONLY:
        write = write & (column < (new_len + BLOCK_SIZE - 1) // BLOCK_SIZE)
    source = column + tl.where(column >= sink_blocks, dropped, 0)
    block = tl.load(block_table + row * table_stride + source, mask=write & (source < num_columns), other=0)
    tl.store(out_table + row * out_stride + column, block, mask=write)


def _check_buffers(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_lens: torch.Tensor,
    out_table: torch.Tensor,
    out_lens: torch.Tensor,
    params: torch.Tensor,
) -> None:
    """Refuse buffers that the kernel cannot write to, or would read while another program writes."""
    device = block_table.device
    if device.type == "cpu" and isinstance(_compact_rows, triton.JITFunction):
        raise WindowError(
            "the tensors are on the CPU, where Triton does not run; use windowed_mtp.paging.compact_block_table."
        )
    check_tensor("out_table", out_table, dim=2, device=device)
    check_tensor("out_lens", out_lens, dim=1, device=device)
    check_tensor("params", params, dim=1, device=device)
    if out_table.shape[0] < block_table.shape[0]:
        raise WindowError(
            f"out_table has {out_table.shape[0]} rows, but block_table has {block_table.shape[0]}; "
            f"pass one with at least as many."
        )
    if out_lens.shape[0] < block_table.shape[0]:
        raise WindowError(
            f"out_lens has {out_lens.shape[0]} rows, but block_table has {block_table.shape[0]}; "
            f"pass one with at least as many."
        )
    if params.shape[0] != 3:
        raise WindowError(f"params has {params.shape[0]} values, but it must have 3; make it with window_params.")
    for name, table in (("block_table", block_table), ("out_table", out_table)):
        if table.shape[1] > 1 and table.stride(1) != 1:
            raise WindowError(f"{name} has columns {table.stride(1)} apart, but they must be adjacent; copy it.")
    for name, vector in (
        ("seq_lens", seq_lens),
        ("query_lens", query_lens),
        ("out_lens", out_lens),
        ("params", params),
    ):
        if not vector.is_contiguous():
            raise WindowError(f"{name} is not contiguous, but it must be; copy it.")
    inputs = {t.untyped_storage().data_ptr() for t in (block_table, seq_lens, query_lens, params) if t.numel()}
    for name, out in (("out_table", out_table), ("out_lens", out_lens)):
        if out.untyped_storage().data_ptr() in inputs:
            raise WindowError(
                f"{name} shares its storage with an input, which other programs still read; pass another."
            )
