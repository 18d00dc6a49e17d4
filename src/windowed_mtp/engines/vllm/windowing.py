"""A batch's attention metadata, windowed: the one place where the draft's view of a sequence changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from windowed_mtp.engines.vllm.config import PluginError
from windowed_mtp.paging import compact_block_table, dropped_per_row, may_drop, windowed_length_bound
from windowed_mtp.window import SinkWindow


@dataclass(frozen=True)
class Limits:
    """What batches a metadata builder will see.

    Attributes
    ----------
    graphs : bool
        Whether full CUDA graphs may be captured over the result: then it is always written, never passed through.
    rows : int
        Most rows of a batch; room for them is made at once, as buffers that grew would leave captured graphs with the
        old ones.
    queries : int or None
        Most queries of a row; ``None`` if they are not known.
    exact_above : int or None
        Rows with more queries than this have exact lengths on the host, not only upper bounds of them. Rows in prefill
        always do, and some builders plan their reads by it.
    widest : int
        Largest window that a captured graph must have room for.
    """

    graphs: bool
    rows: int = 0
    queries: int | None = None
    exact_above: int | None = None
    widest: int = 0


class _Pass(NamedTuple):
    """A batch's own table, lengths and query starts, and where the windowed ones are written."""

    table: Tensor
    lens: Tensor
    starts: Tensor
    out_table: Tensor
    out_lens: Tensor


class Windowing:
    """Windows ``CommonAttentionMetadata`` of draft layers for one metadata builder.

    The compacted table and lengths live in buffers with fixed addresses, so that a captured CUDA graph reads what the
    next call writes. The table is as wide as a windowed row can be, whatever the context.

    Parameters
    ----------
    window : SinkWindow
        What a draft query reads.
    block_size : int
        Kernel block size of the layers, in tokens.
    limits : Limits
        What batches it will see.
    """

    def __init__(self, window: SinkWindow, block_size: int, limits: Limits) -> None:
        self._window = window
        self.block_size = block_size
        self.limits = limits
        self.passes = self.windowed = 0
        self._params: Tensor | None = None
        self._table: Tensor | None = None
        self._lens: Tensor | None = None
        self._pass: _Pass | None = None
        self._room = (0, 0)  # columns of a source table, and of its windowed rows
        self._written = 0

    @property
    def window(self) -> SinkWindow:
        """What a draft query reads; a new value holds from the next pass on, in captured graphs as well.

        Raises
        ------
        PluginError
            If captured graphs have no room for it; nothing has changed then.
        """
        return self._window

    @window.setter
    @torch.inference_mode()
    def window(self, window: SinkWindow) -> None:
        if self._table is not None and self._columns(self._room[0], window) > self._table.shape[1]:
            if self.limits.graphs:
                raise PluginError(
                    f"CUDA graphs were captured for windows of up to {max(self._window.window, self.limits.widest):,}, "
                    f'so {window} cannot be put in force; start the engine with a larger "widest_window".'
                )
            self._table, self._room = None, (0, 0)
        self._window = window
        if self._params is not None:
            from windowed_mtp.paging.triton import window_params

            self._params.copy_(window_params(window, device=self._params.device))

    def __call__(self, common: Any) -> Any:
        """Window one batch.

        Parameters
        ----------
        common : CommonAttentionMetadata
            As vLLM made it; it is not modified. Per-row fields may differ in length where the batch is padded.

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
        if not self.limits.graphs and not may_drop(longest, block_size=self.block_size, window=self.window):
            self._pass = None
            return common
        self.windowed += 1
        rows = common.seq_lens.shape[0]
        made = self._prepare(common.block_table_tensor[:rows], common.seq_lens, common.query_start_loc)
        changes = {
            "seq_lens": made.out_lens,
            "block_table_tensor": made.out_table,
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

    def refresh(self) -> None:
        """Window the last batch again, from its tensors as they are now (inside a captured draft loop)."""
        if self._pass is None:
            return
        table, lens, starts, out_table, out_lens = self._pass
        rows = min(table.shape[0], lens.shape[0], starts.shape[0] - 1)
        if rows < lens.shape[0]:  # rows that a batch is padded by may be in some of its fields only
            out_table[rows:], out_lens[rows:] = table[rows:, : out_table.shape[1]], lens[rows:]
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
        out_table[:rows], out_lens[:rows] = new_table[:, : out_table.shape[1]], new_lens

    @property
    def _policy(self) -> dict[str, Any]:
        return {"block_size": self.block_size, "window": self.window}

    def _prepare(self, table: Tensor, lens: Tensor, starts: Tensor) -> _Pass:
        """Window one batch into the buffers; rows of an earlier and larger batch are emptied."""
        made = self._pass = _Pass(table, lens, starts, *self._buffers(table, lens))
        self.refresh()
        rows = lens.shape[0]
        if self.limits.graphs and self._lens is not None:
            if rows < self._written:  # a graph may be replayed for more rows than this batch has
                self._lens[rows : self._written].zero_()
            self._written = rows
        return made

    def _host_lens(self, common: Any, upper: Tensor) -> Tensor:
        """Windowed lengths on the host: exact where the given ones are, upper bounds elsewhere."""
        starts = getattr(common, "query_start_loc_cpu", None)
        queries = _on_host(None if starts is None else starts.diff(), rows=upper.shape[0])
        exact = _on_host(getattr(common, "is_prefilling", None), rows=upper.shape[0]).bool()
        if self.limits.exact_above is not None:
            exact |= queries > self.limits.exact_above
        longest = windowed_length_bound(common.max_seq_len, common.max_query_len, **self._policy)
        kept = upper - dropped_per_row(upper, queries, **self._policy) * self.block_size
        return torch.where(exact & (queries > 0), kept, upper.clamp(max=longest)).to(upper.dtype)

    def _columns(self, source: int, window: SinkWindow) -> int:
        """Blocks that a windowed row of a table of ``source`` columns can have."""
        if self.limits.queries is None:
            return source
        longest = source * self.block_size
        keys = windowed_length_bound(longest, self.limits.queries, block_size=self.block_size, window=window)
        return -(-keys // self.block_size)

    def _buffers(self, table: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        """Give room for a batch: the buffers, or new tensors for a batch that captured graphs were not told of."""
        rows, source = max(table.shape[0], lens.shape[0]), table.shape[1]
        if source != self._room[0]:
            reserved = replace(self.window, window=max(self.window.window, self.limits.widest))
            self._room = source, self._columns(source, reserved)
        columns = self._room[1]
        out_table, out_lens = self._table, self._lens
        if out_table is None or out_lens is None or out_table.shape[0] < rows or out_table.shape[1] < columns:
            out_table = table.new_zeros(max(rows, self.limits.rows), columns)
            out_lens = lens.new_zeros(out_table.shape[0])
            if self._table is None or not self.limits.graphs:
                self._table, self._lens = out_table, out_lens
        return out_table[: table.shape[0], :columns], out_lens[: lens.shape[0]]


def _on_host(values: Tensor | None, *, rows: int) -> Tensor:
    """Give a per-row field as ``[rows]`` int64, with zeros for rows that it lacks; all zeros if it is not on the host.

    vLLM pads some of a batch's fields for a full CUDA graph and leaves others as they are.
    """
    made = torch.zeros(rows, dtype=torch.int64)
    if values is not None and values.device.type == "cpu":
        made[: values.shape[0]] = values[:rows]
    return made
