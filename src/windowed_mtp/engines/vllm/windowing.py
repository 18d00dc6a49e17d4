"""A batch's attention metadata, windowed: the one place where the draft's view of a sequence changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from windowed_mtp.paging import compact_block_table, dropped_per_row, may_drop, windowed_length_bound
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
        self._window = window
        self.block_size = block_size
        self.graphs = graphs
        self.max_rows = max_rows
        self.exact_above = exact_above
        self.passes = self.windowed = 0
        self._params: Tensor | None = None
        self._table: Tensor | None = None
        self._lens: Tensor | None = None
        self._source: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def window(self) -> SinkWindow:
        """What a draft query reads; a new value holds from the next pass on, in captured graphs as well."""
        return self._window

    @window.setter
    @torch.inference_mode()
    def window(self, window: SinkWindow) -> None:
        self._window = window
        if self._params is not None:
            from windowed_mtp.paging.triton import window_params

            self._params.copy_(window_params(window, device=self._params.device))

    def __call__(self, common: Any) -> Any:
        """Window one batch.

        Parameters
        ----------
        common : CommonAttentionMetadata
            As vLLM made it; it is not modified.

        Returns
        -------
        CommonAttentionMetadata
            The same object where no row can lose a block (outside full CUDA graphs), else a changed copy.
        """
        self.passes += 1
        longest = common.max_seq_len
        upper = getattr(common, "seq_lens_cpu_upper_bound", None)
        if upper is not None and upper.numel():
            longest = min(longest, int(upper.max()))
        if not self.graphs and not may_drop(longest, block_size=self.block_size, window=self.window):
            self._source = None
            return common
        self.windowed += 1
        rows = common.seq_lens.shape[0]
        self._source = (common.block_table_tensor[:rows], common.seq_lens, common.query_start_loc)
        table, lens = self._buffers(*self._source[:2])
        self.refresh()
        changes = {
            "seq_lens": lens,
            "block_table_tensor": table,
            "max_seq_len": windowed_length_bound(common.max_seq_len, common.max_query_len, **self._policy),
        }
        if upper is not None:
            changes["seq_lens_cpu_upper_bound"] = self._host_lens(common, upper)
        for cached in ("_num_computed_tokens_cache", "_seq_lens_cpu", "_num_computed_tokens_cpu"):
            if hasattr(common, cached):
                changes[cached] = None
        if getattr(common, "mm_req_doc_ranges", None) is not None:
            changes["mm_req_doc_ranges"] = None  # in positions of the whole sequence, which the rows no longer have
        return common.replace(**changes)

    @property
    def _policy(self) -> dict[str, Any]:
        return {"block_size": self.block_size, "window": self.window}

    def _host_lens(self, common: Any, upper: Tensor) -> Tensor:
        """Windowed lengths on the host: exact where the given ones are, upper bounds elsewhere."""
        starts = getattr(common, "query_start_loc_cpu", None)
        queries = _on_host(None if starts is None else starts.diff(), rows=upper.shape[0])
        exact = _on_host(getattr(common, "is_prefilling", None), rows=upper.shape[0]).bool()
        if self.exact_above is not None:
            exact |= queries > self.exact_above
        longest = windowed_length_bound(common.max_seq_len, common.max_query_len, **self._policy)
        kept = upper - dropped_per_row(upper, queries, **self._policy) * self.block_size
        return torch.where(exact & (queries > 0), kept, upper.clamp(max=longest)).to(upper.dtype)

    def refresh(self) -> None:
        """Window the last batch again, from its tensors as they are now (inside a captured draft loop)."""
        if self._source is None:
            return
        table, lens, starts = self._source
        out_table, out_lens = self._buffers(table, lens)
        rows = min(table.shape[0], lens.shape[0], starts.shape[0] - 1)
        if rows < lens.shape[0]:  # rows that a batch is padded by may be in some of its fields only
            out_table[rows:], out_lens[rows:] = table[rows:], lens[rows:]
        table, lens, starts = table[:rows], lens[:rows], starts[: rows + 1]
        if table.is_cuda:
            from windowed_mtp.paging.triton import compact_block_table_, window_params

            if self._params is None:
                self._params = window_params(self.window, device=table.device)
            compact_block_table_(
                table,
                lens,
                starts,
                out_table,
                out_lens,
                self._params,
                block_size=self.block_size,
                live_columns_only=True,
                query_starts=True,
            )
            return
        new_table, new_lens = compact_block_table(
            table, lens, starts.diff(), block_size=self.block_size, window=self.window
        )
        out_table[:rows], out_lens[:rows] = new_table, new_lens

    def _buffers(self, table: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = max(table.shape[0], lens.shape[0]), table.shape[1]
        have_rows, have_columns = (self.max_rows, 0) if self._table is None else self._table.shape
        if self._table is None or self._lens is None or have_rows < rows or have_columns < columns:
            self._table = table.new_zeros(max(rows, have_rows), max(columns, have_columns))
            self._lens = lens.new_zeros(self._table.shape[0])
        return self._table[: table.shape[0], :columns], self._lens[: lens.shape[0]]


def _on_host(values: Tensor | None, *, rows: int) -> Tensor:
    """Give a per-row field as ``[rows]`` int64, with zeros for rows that it lacks; all zeros if it is not on the host.

    vLLM pads some of a batch's fields for a full CUDA graph and leaves others as they are.
    """
    made = torch.zeros(rows, dtype=torch.int64)
    if values is not None and values.device.type == "cpu":
        made[: values.shape[0]] = values[:rows]
    return made
