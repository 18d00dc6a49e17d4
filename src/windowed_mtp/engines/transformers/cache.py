"""The draft's KV: everything kept, or a ring of sink + window + γ slots; both read exactly the window's keys."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from windowed_mtp.errors import AllocationError
from windowed_mtp.paging import ring_kept, ring_slot, ring_slots_per_sequence
from windowed_mtp.window import SinkWindow


class DraftKV(ABC):
    """KV of one draft layer for one sequence.

    A decoder layer sees it as its cache: ``update`` takes the new entries of a pass and returns the keys and values
    that the pass reads, in order of position. ``mask`` gives the matching attention mask.

    Parameters
    ----------
    window : SinkWindow or None
        What a query reads; ``None`` reads everything (native).

    Attributes
    ----------
    length : int
        Number of entries.
    keys_read : int
        Keys returned by ``update`` so far, once a pass whatever its number of queries.
    blind : bool
        Set for passes whose outputs nobody uses: their queries read the pass's own entries only, by the plain causal
        rule. An entry's key and value do not depend on what its query reads.
    """

    def __init__(self, window: SinkWindow | None) -> None:
        self.window = window
        self.length = 0
        self.keys_read = 0
        self.blind = False

    def reads(self) -> tuple[int, int]:
        """Bounds of what the next pass reads: ``[0, sinks)`` and all from ``start`` on."""
        if self.blind:
            return 0, self.length
        first = self.length + 1  # what the pass's first query sees must be there too
        if self.window is None or not self.window.engages(first):
            return 0, 0
        return self.window.sink, self.window.tail_start(first)

    def mask(self, query_len: int, device: torch.device) -> Tensor | None:
        """Which of the keys that ``update`` returns each query of the next pass may read.

        Parameters
        ----------
        query_len : int
            Number of entries q in the pass.
        device : torch.device
            Where the mask is needed.

        Returns
        -------
        Tensor or None
            ``[1, 1, q, keys]`` bool, or ``None`` where the plain causal rule says the same.
        """
        sinks, start = self.reads()
        end = self.length + query_len
        if query_len == 1 or self.blind or (self.length == 0 and (self.window is None or not self.window.engages(end))):
            return None
        keys = torch.cat([torch.arange(sinks, device=device), torch.arange(start, end, device=device)])
        last = torch.arange(self.length, end, device=device)[:, None]  # each query's own position
        visible = keys <= last
        if self.window is not None:
            engaged = (last >= self.window.span) & (last + 1 >= self.window.min_context)
            recent = keys > last - self.window.window
            visible &= ~engaged | recent | (keys < self.window.sink)
        return visible[None, None]

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int = 0, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Add a pass's entries and return what it reads.

        Parameters
        ----------
        keys, values : Tensor
            ``[1, heads, q, dim]``; the two may differ in heads and dim (MLA keeps latents).
        layer_idx : int
            Ignored: one object serves one layer.

        Returns
        -------
        tuple of Tensor
            Keys and values read, ``[1, heads, n, dim]``, in order of position.
        """
        sinks, start = self.reads()
        read = self._store(keys, values, sinks, start)
        self.length += keys.shape[2]
        self.keys_read += read[0].shape[2]
        return read

    def crop(self, length: int) -> None:
        """Forget the entries from ``length`` on; they are overwritten by the next pass."""
        self.length = min(self.length, length)

    @abstractmethod
    def skip_to(self, length: int) -> None:
        """Leave the entries up to ``length`` unwritten (pruned prefill)."""

    @abstractmethod
    def _store(self, keys: Tensor, values: Tensor, sinks: int, start: int) -> tuple[Tensor, Tensor]: ...

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of the slots in use."""

    @abstractmethod
    def entries(self) -> tuple[list[int], Tensor, Tensor]:
        """Positions held, and their keys and values ``[1, heads, n, dim]`` in that order."""


class KeepAll(DraftKV):
    """Keeps every entry, in buffers that grow by half, so that a step never copies the whole KV."""

    def __init__(self, window: SinkWindow | None) -> None:
        super().__init__(window)
        self._buffers: list[Tensor] = []

    def skip_to(self, length: int) -> None:
        """Refuse: with everything kept, nothing may be left out."""
        raise RuntimeError("a cache that keeps everything cannot skip entries")

    def _store(self, keys: Tensor, values: Tensor, sinks: int, start: int) -> tuple[Tensor, Tensor]:
        end = self.length + keys.shape[2]
        if not self._buffers or self._buffers[0].shape[2] < end:
            self._grow(max(256, end + end // 2), keys, values)
        for buffer, new in zip(self._buffers, (keys, values), strict=True):
            buffer[:, :, self.length : end] = new
        read = [
            torch.cat([b[:, :, :sinks], b[:, :, start:end]], dim=2) if sinks else b[:, :, start:end]
            for b in self._buffers
        ]
        return read[0], read[1]

    def _grow(self, capacity: int, keys: Tensor, values: Tensor) -> None:
        grown = _allocated(Tensor.new_empty, (keys, values), capacity, "shorten the prompt, or use keep='ring'")
        for new, old in zip(grown, self._buffers, strict=False):
            new[:, :, : self.length] = old[:, :, : self.length]
        self._buffers = grown

    @property
    def num_bytes(self) -> int:
        """Bytes of the entries held."""
        return sum(b[:, :, : self.length].numel() * b.element_size() for b in self._buffers)

    def entries(self) -> tuple[list[int], Tensor, Tensor]:
        """Positions held, and their keys and values."""
        keys, values = (b[:, :, : self.length] for b in self._buffers)
        return list(range(self.length)), keys, values


class Ring(DraftKV):
    """Keeps sink + window + γ slots: enough for every query of a pass of γ + 1 entries to find its window.

    A longer pass reads its own entries directly and writes only those that stay.

    Parameters
    ----------
    window : SinkWindow
        What a query reads.
    num_speculative_tokens : int
        Largest depth γ.
    """

    window: SinkWindow

    def __init__(self, window: SinkWindow, num_speculative_tokens: int) -> None:
        super().__init__(window)
        self.num_speculative_tokens = num_speculative_tokens
        self._slots: list[Tensor] = []
        self._written = 0  # one past the last position ever written: rolled-back entries have overwritten slots too

    def _slot(self, positions: Tensor) -> Tensor:
        return ring_slot(0, positions, window=self.window, num_speculative_tokens=self.num_speculative_tokens)

    def skip_to(self, length: int) -> None:
        """Leave the entries up to ``length`` unwritten (pruned prefill)."""
        self.length = max(self.length, length)

    def _store(self, keys: Tensor, values: Tensor, sinks: int, start: int) -> tuple[Tensor, Tensor]:
        if not self._slots:
            count = ring_slots_per_sequence(self.window, self.num_speculative_tokens)
            # Zeros: a pass may read slots that nothing was written to, under a mask.
            self._slots = _allocated(Tensor.new_zeros, (keys, values), count, "use a smaller window, or keep='all'")
        device = keys.device
        end = self.length + keys.shape[2]
        old = torch.cat([torch.arange(sinks, device=device), torch.arange(start, self.length, device=device)])
        old_slots = self._slot(old)
        kept = torch.arange(self.length, end, device=device)
        if end - self.length > self.window.window:  # a long pass: several of its entries share a slot
            kept = self._positions(end, device)
            kept = kept[kept >= self.length]
        kept_slots = self._slot(kept)
        read = []
        for slots, new in zip(self._slots, (keys, values), strict=True):
            read.append(torch.cat([slots[:, :, old_slots], new], dim=2))
            slots[:, :, kept_slots] = new[:, :, kept - self.length]
        self._written = max(self._written, end)
        return read[0], read[1]

    def _positions(self, length: int, device: torch.device) -> Tensor:
        kept = ring_kept(length, window=self.window, num_speculative_tokens=self.num_speculative_tokens)
        return torch.tensor(list(kept), dtype=torch.int64, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots, in use or not: a ring is allocated whole."""
        return sum(s.numel() * s.element_size() for s in self._slots)

    def entries(self) -> tuple[list[int], Tensor, Tensor]:
        """Positions held, and their keys and values."""
        held = self._positions(self._written, self._slots[0].device)
        held = held[held < self.length]
        keys, values = (s[:, :, self._slot(held)] for s in self._slots)
        return held.tolist(), keys, values


def _allocated(make: Callable[..., Tensor], like: Sequence[Tensor], slots: int, remedy: str) -> list[Tensor]:
    """Make room for a number of entries, one tensor for each of ``like`` ``[1, heads, q, dim]``.

    Raises
    ------
    AllocationError
        If the device does not have the memory.
    """
    try:
        return [make(t, *t.shape[:2], slots, t.shape[3]) for t in like]
    except (RuntimeError, TypeError) as error:  # out of memory, or a size beyond what torch can count
        size = sum(t[:, :, :1].numel() * t.element_size() for t in like) * slots
        raise AllocationError(
            f"the draft's keys and values need {slots:,} slots a layer, {size:,} bytes, which {like[0].device} cannot "
            f"give; {remedy}."
        ) from error
