"""Drop the blocks between sinks and window from a paged cache's block table (torch reference)."""

from __future__ import annotations

import operator

import torch

from windowed_mtp.errors import WindowError
from windowed_mtp.paging.lengths import sink_blocks
from windowed_mtp.window import SinkWindow


def compact_block_table(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_lens: torch.Tensor,
    *,
    block_size: int,
    window: SinkWindow,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Window each row of a block table by dropping whole blocks between its sinks and its recent entries.

    A row of ``s`` entries whose last ``q`` are this pass's queries has, with ``B = block_size``, ``n = ceil(sink / B)``
    sink blocks and drops ``d = max(0, (s - q + 1 - window) // B - n)`` blocks after them, provided that
    ``s >= min_context``. The row keeps its first ``n`` columns and then skips ``d``; its length becomes ``s - d * B``.
    What is left is exactly the blocks that hold a position of ``window.positions(s, q)``.

    Parameters
    ----------
    block_table : torch.Tensor
        ``[R, C]`` int32, physical block ids: column ``c`` of a row holds its entries ``c * B .. c * B + B - 1``.
    seq_lens : torch.Tensor
        ``[R]`` int32, entries of each row, this pass's queries included; 0 for a padding row.
    query_lens : torch.Tensor
        ``[R]`` int32, queries of each row in this pass; 0 for a padding row.
    block_size : int
        Entries a block, at least 1. It is the block of the attention kernel, which may be a part of the allocator's.
    window : SinkWindow
        What a query may read. ``min_context`` is compared with the row's length, not with each query's.

    Returns
    -------
    new_table : torch.Tensor
        ``[R, C]`` int32, a new tensor on the same device. Columns that would come from past the end of the source are
        0, a valid block id that no query reads.
    new_lens : torch.Tensor
        ``[R]`` int32, a new tensor on the same device. Queries stay at the end of their row, so a bottom-right aligned
        causal mask stays right.

    Raises
    ------
    WindowError
        If a shape, a dtype or a device is not as above, or if ``block_size`` is below 1.

    Notes
    -----
    A row with ``d = 0`` is returned bit for bit; ``s <= sink + window`` always gives ``d = 0``. No query reads fewer
    keys than its window, and none reads more than ``q - 1 + 2 * (B - 1)`` others: the bound is the first query's, and
    both ends are rounded outward to blocks. The inputs are not modified and their values are not read on the host.
    """
    block_size = check_rows(block_table, seq_lens, query_lens, block_size)

    num_columns = block_table.shape[1]
    dropped = dropped_per_row(seq_lens, query_lens, block_size=block_size, window=window)

    columns = torch.arange(num_columns, device=block_table.device)  # [C]
    source = columns + dropped[:, None] * (columns >= sink_blocks(block_size, window))  # [R, C]
    inside = source < num_columns
    new_table = torch.where(inside, block_table.gather(1, torch.where(inside, source, 0)), 0)
    return new_table, (seq_lens - dropped * block_size).int()


def dropped_per_row(
    seq_lens: torch.Tensor, query_lens: torch.Tensor, *, block_size: int, window: SinkWindow
) -> torch.Tensor:
    """Blocks that a pass leaves out of each row: `windowed_mtp.paging.dropped_blocks`, for many rows at once.

    Parameters
    ----------
    seq_lens, query_lens : torch.Tensor
        ``[R]``, of any integer dtype: entries of each row, this pass's queries included, and its queries.
    block_size : int
        Entries a block, at least 1.
    window : SinkWindow
        What a query may read.

    Returns
    -------
    torch.Tensor
        ``[R]`` int64.
    """
    lens = seq_lens.long()
    first_block = torch.div(lens - query_lens + 1 - window.window, block_size, rounding_mode="floor")
    return (first_block - sink_blocks(block_size, window)).clamp(min=0) * (lens >= window.min_context)


def check_rows(block_table: torch.Tensor, seq_lens: torch.Tensor, query_lens: torch.Tensor, block_size: int) -> int:
    """Refuse a block table, lengths or a block size that do not fit together.

    Parameters
    ----------
    block_table : torch.Tensor
        ``[R, C]`` int32.
    seq_lens, query_lens : torch.Tensor
        ``[R]`` int32 on the table's device.
    block_size : int
        Entries a block, at least 1.

    Returns
    -------
    int
        ``block_size`` as a Python integer.

    Raises
    ------
    WindowError
        If one of them is not as above.
    """
    check_tensor("block_table", block_table, dim=2, device=block_table.device)
    for name, lens in (("seq_lens", seq_lens), ("query_lens", query_lens)):
        check_tensor(name, lens, dim=1, device=block_table.device)
        if lens.shape[0] != block_table.shape[0]:
            raise WindowError(
                f"{name} has {lens.shape[0]} rows, but block_table has {block_table.shape[0]}; pass one length a row."
            )
    try:
        block_size = operator.index(block_size)
    except TypeError:
        raise WindowError(f"block_size is {block_size!r}, but it must be a whole number; pass an integer.") from None
    if block_size < 1:
        raise WindowError(f"block_size is {block_size}, but it must be at least 1; pass the attention kernel's block.")
    return block_size


def check_tensor(name: str, tensor: torch.Tensor, *, dim: int, device: torch.device) -> None:
    """Refuse a tensor that is not int32, has another number of dimensions, or lives on another device.

    Parameters
    ----------
    name : str
        What the error calls the tensor.
    tensor : torch.Tensor
        The tensor to look at; its values are not read.
    dim : int
        Number of dimensions it must have.
    device : torch.device
        Where it must live.

    Raises
    ------
    WindowError
        If one of the three does not hold.
    """
    if tensor.dim() != dim:
        raise WindowError(f"{name} has {tensor.dim()} dimensions, but it must have {dim}; reshape it.")
    if tensor.dtype != torch.int32:
        raise WindowError(f"{name} is {tensor.dtype}, but it must be torch.int32; convert it.")
    if tensor.device != device:
        raise WindowError(f"{name} is on {tensor.device}, but block_table is on {device}; move it there.")
