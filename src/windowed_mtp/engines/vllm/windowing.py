"""A batch's attention metadata, windowed: the one place where the draft's view of a sequence changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from windowed_mtp.paging import compact_block_table
from windowed_mtp.window import SinkWindow


class Windowing:
    """Windows ``CommonAttentionMetadata`` of draft layers for one metadata builder.

    The compacted table and lengths live in buffers with fixed addresses, so that a captured CUDA graph reads what the
    next call writes.

    Parameters
    ----------
    window : SinkWindow
        What a draft query reads.
    block_size : int
        Kernel block size of the layers, in tokens.
    graphs : bool
        Whether full CUDA graphs may be captured over the result: then it is always written, never passed through.
    max_rows : int
        Rows to make room for at once; a buffer that grew later would leave captured graphs with the old one.
    exact_above : int or None
        Rows with more queries than this have exact lengths on the host, not only upper bounds of them. Rows in prefill
        always do, and some builders plan their reads by it.
    """

    def __init__(
        self, window: SinkWindow, block_size: int, graphs: bool, max_rows: int = 0, exact_above: int | None = None
    ) -> None:
        self.window = window
        self.block_size = block_size
        self.graphs = graphs
        self.max_rows = max_rows
        self.exact_above = exact_above
        self.passes = self.windowed = 0
        self._params: Tensor | None = None
        self._table: Tensor | None = None
        self._lens: Tensor | None = None
        self._source: tuple[Tensor, Tensor, Tensor] | None = None

    def bound(self, seq_len: int, query_len: int) -> int:
        """Upper bound of a row's windowed length, given upper bounds of its length and its number of queries.

        The windowed length is a sawtooth in the length, so the bound is not the windowed length of the bound.
        """
        block, window = self.block_size, self.window
        if seq_len < window.min_context:
            return seq_len
        most = -(-window.sink // block) * block + window.window + query_len - 1 + block - 1
        return min(seq_len, max(most, window.min_context))

    def length(self, seq_len: int, query_len: int) -> int:
        """Windowed length of a row, as the kernel computes it."""
        if seq_len < self.window.min_context:
            return seq_len
        sink_blocks = -(-self.window.sink // self.block_size)
        first_block = (seq_len - query_len + 1 - self.window.window) // self.block_size
        return seq_len - max(0, first_block - sink_blocks) * self.block_size

    def __call__(self, common: Any) -> Any:
        """Window one batch.

        Parameters
        ----------
        common : CommonAttentionMetadata
            As vLLM made it; it is not modified.

        Returns
        -------
        CommonAttentionMetadata
            The same object where no row can engage (outside full CUDA graphs), else a changed copy.
        """
        self.passes += 1
        longest = common.max_seq_len
        upper = getattr(common, "seq_lens_cpu_upper_bound", None)
        if upper is not None and upper.numel():
            longest = min(longest, int(upper.max()))
        if not self.graphs and not self.window.engages(longest):
            self._source = None
            return common
        self.windowed += 1
        starts, rows = common.query_start_loc, common.seq_lens.shape[0]
        self._source = (common.block_table_tensor[:rows], common.seq_lens, starts)
        table, lens = self._buffers(*self._source[:2])
        self.refresh()
        changes = {
            "seq_lens": lens,
            "block_table_tensor": table,
            "max_seq_len": self.bound(common.max_seq_len, common.max_query_len),
        }
        if upper is not None:
            changes["seq_lens_cpu_upper_bound"] = self._host_lens(common, upper)
        for cached in ("_num_computed_tokens_cache", "_seq_lens_cpu", "_num_computed_tokens_cpu"):
            if hasattr(common, cached):
                changes[cached] = None
        if getattr(common, "mm_req_doc_ranges", None) is not None:
            changes["mm_req_doc_ranges"] = None  # in positions of the whole sequence, which the rows no longer have
        return common.replace(**changes)

    def _host_lens(self, common: Any, upper: Tensor) -> Tensor:
        """Windowed lengths on the host: exact where the given ones are, upper bounds elsewhere."""
        lens, rows = upper.tolist(), upper.shape[0]
        made = [self.bound(length, common.max_query_len) for length in lens]
        starts, prefilling = getattr(common, "query_start_loc_cpu", None), getattr(common, "is_prefilling", None)
        if starts is not None:
            queries = starts[: rows + 1].diff().tolist()
            exact = [self.exact_above is not None and count > self.exact_above for count in queries]
            if prefilling is not None and prefilling.device.type == "cpu":
                exact = [one or other for one, other in zip(exact, prefilling[:rows].tolist(), strict=True)]
            made = [
                self.length(length, count) if known else most
                for length, count, known, most in zip(lens, queries, exact, made, strict=True)
            ]
        return torch.tensor(made, dtype=upper.dtype)

    def refresh(self) -> None:
        """Window the last batch again, from its tensors as they are now (inside a captured draft loop)."""
        if self._source is None:
            return
        table, lens, starts = self._source
        out_table, out_lens = self._buffers(table, lens)
        query_lens = starts[1 : lens.shape[0] + 1] - starts[: lens.shape[0]]
        if table.is_cuda:
            from windowed_mtp.paging.triton import compact_block_table_, window_params

            if self._params is None:
                self._params = window_params(self.window, device=table.device)
            compact_block_table_(
                table,
                lens,
                query_lens,
                out_table,
                out_lens,
                self._params,
                block_size=self.block_size,
                live_columns_only=True,
            )
            return
        new_table, new_lens = compact_block_table(
            table, lens, query_lens, block_size=self.block_size, window=self.window
        )
        out_table.copy_(new_table)
        out_lens.copy_(new_lens)

    def _buffers(self, table: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = table.shape
        have_rows, have_columns = (self.max_rows, 0) if self._table is None else self._table.shape
        if self._table is None or self._lens is None or have_rows < rows or have_columns < columns:
            self._table = table.new_zeros(max(rows, have_rows), max(columns, have_columns))
            self._lens = lens.new_zeros(self._table.shape[0])
        return self._table[:rows, :columns], self._lens[:rows]
